"""Pickles read as data. A pickle is a program for a small stack machine; this is that machine without its one
dangerous instruction: names of classes and functions stay names, and what would be a call becomes a record of it.

Called by the reader. Nothing is imported, looked up or called here, whatever a file says, so there is no list of what
is allowed to keep up to date. Python's own module reads the instructions one by one and does not run them either.
"""

from __future__ import annotations

import pickletools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

from lmtrain.errors import DataError, shorten

MAX_PICKLE_BYTES = 64 << 20
MAX_OBJECT_BYTES = 256 << 20  # of Python's objects, by their rough sizes; so there are at most 6 million instructions
MAX_NUMBER_BITS = 256  # because: states of random numbers have 128, and nothing has more
MAX_KEY = 1 << 32  # because: numbers can be chosen so that a dict of them takes forever
MAX_KEY_PARTS = 16
MAX_DEPTH = 100
_MAX_LINE_BYTES = 1 << 20


class BoundedFile:
    """A file from which at most MAX_PICKLE_BYTES are read, whatever lengths a pickle in it claims."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._bytes_left = file, MAX_PICKLE_BYTES

    def read(self, size: int) -> bytes:
        if size > self._bytes_left:
            raise ValueError(f"the pickle asks for {size} bytes; at most {MAX_PICKLE_BYTES} are allowed")
        data = self._file.read(size)
        self._bytes_left -= len(data)
        return data

    def readline(self) -> bytes:
        line = self._file.readline(min(_MAX_LINE_BYTES, self._bytes_left))
        self._bytes_left -= len(line)
        return line


def require_text(value: Any, role: str) -> str:
    """Return `value` if it is a str. Raise ValueError otherwise; the message names it by `role`, such as "a name", and
    its type, but does not show it, since nested data can be endless.
    """
    if not isinstance(value, str):
        raise ValueError(f"{role} is a {type(value).__name__}, but must be a text")
    return value


class Global(NamedTuple):
    """A class or function that the pickle names."""

    module: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class CallRecord:
    """A call that a pickle asks for, recorded instead of carried out: the function or class and its arguments, and the
    state, dict items and list entries that the pickle gives to the result.
    """

    callee: Any
    args: Any = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    entries: list[Any] = field(default_factory=list)

    @property
    def path(self) -> str:
        return self.callee.path if isinstance(self.callee, Global) else ""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the attribute `name` of the object that the recorded call would make, as its pickled state has it, or
        `default`. The state is a dict, or a tuple of dicts for a class with slots.
        """
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        values = [state[name] for state in states if isinstance(state, dict) and name in state]
        return values[0] if values else default


class PersistentId(NamedTuple):
    """A reference in a pickle to an object that is stored outside of it, such as the storage of a tensor."""

    key: Any


_MARK = object()
_CONSTANT_OPCODES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY_CONTAINERS: dict[str, Callable[[], Any]] = {
    "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "EMPTY_SET": list
}  # fmt: skip
_IGNORED_OPCODES = {"PROTO", "FRAME"}
# Roughly the bytes of memory that an instruction, and the object that it makes, take.
_STEP, _CONTAINER, _PER_ITEM, _RECORD, _MEMO_ENTRY = 48, 64, 16, 300, 100
_COSTS = {
    **dict.fromkeys(
        ["LIST", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "DICT", "FROZENSET", *_EMPTY_CONTAINERS], _STEP + _CONTAINER
    ),
    **dict.fromkeys(["GLOBAL", "STACK_GLOBAL", "PERSID", "BINPERSID"], _STEP + _CONTAINER),
    **dict.fromkeys(["REDUCE", "NEWOBJ", "NEWOBJ_EX", "INST", "OBJ"], _STEP + _RECORD),
    **dict.fromkeys(["MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"], _STEP + _MEMO_ENTRY),
}
# Containers that pickles make by a call.
_CONTAINER_CALLS = {
    "collections.OrderedDict": dict, "torch.Size": tuple, "builtins.tuple": tuple, "builtins.set": list,
    "builtins.frozenset": list, "builtins.list": list, "__builtin__.set": list,
}  # fmt: skip


def read_pickle(file: Any, where: object) -> Any:
    """Read the next pickle of `file` without running it, and return its value. Calls in it become a CallRecord, and
    names of classes and functions a Global; the rest is plain data. Raise DataError if it is damaged; `where` is the
    file's name for the message.

    The next read begins behind it. The file gives no more than is there and fits into memory, as `BoundedFile` does.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(file):
            if opcode.name == "STOP":
                return machine.pop()
            machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, EOFError) as error:
        raise DataError(f"{where} holds a damaged pickle ({shorten(error)}). Get the file again.") from error
    raise DataError(f"{where} holds a pickle that is cut short. Get the file again.")


class _Machine:
    """The stack machine that pickle instructions run on, without imports and calls."""
    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._bytes_left = MAX_OBJECT_BYTES

    def pop(self) -> Any:
        value = self._peek()
        self._stack.pop()
        return value

    def step(self, name: str, argument: Any) -> None:
        if name in _CONSTANT_OPCODES:
            if isinstance(argument, int) and argument.bit_length() > MAX_NUMBER_BITS:
                raise ValueError(f"a number has {argument.bit_length()} bits; at most {MAX_NUMBER_BITS} are allowed")
            self._charge(_STEP + sys.getsizeof(argument))
            self._stack.append(argument)
            return
        self._charge(_COSTS.get(name, _STEP))
        if name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _EMPTY_CONTAINERS:
            self._stack.append(_EMPTY_CONTAINERS[name]())
        elif name not in _IGNORED_OPCODES:
            self._run_data_instruction(name, argument)

    def _charge(self, num_bytes: int) -> None:
        """Count the bytes of memory that an instruction is about to take. Raise ValueError once all instructions
        together take more than MAX_OBJECT_BYTES.
        """
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise ValueError(f"the pickle makes more than {MAX_OBJECT_BYTES >> 20} MiB of data, which is not allowed")

    def _pop_to_mark(self) -> list[Any]:
        """Remove the values above the topmost mark, and the mark, from the stack; return the values in their order."""
        at = next((at for at in reversed(range(len(self._stack))) if self._stack[at] is _MARK), None)
        if at is None:
            raise ValueError("an instruction finds no mark on the stack")
        values = self._stack[at + 1 :]
        self._charge(_PER_ITEM * len(values))
        del self._stack[at:]
        return values

    def _peek(self) -> Any:
        value = self._stack[-1]
        if value is _MARK:
            raise ValueError("an instruction finds a mark on the stack in place of a value")
        return value

    def _run_data_instruction(self, name: str, argument: Any) -> None:
        """Carry out a pickle instruction that moves data between stack and memo, or makes or fills a container; pass
        any other to `_record_code_instruction`. `name` is pickletools' name of the opcode, and `argument` its argument.
        """
        push = self._stack.append
        match name:
            case "MARK":
                push(_MARK)
            case "POP":
                self._stack.pop()
            case "POP_MARK":
                self._pop_to_mark()
            case "DUP":
                push(self._peek())
            case "MEMOIZE":
                self._memo[len(self._memo)] = self._peek()
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self._memo[_check_key(int(argument))] = self._peek()
            case "GET" | "BINGET" | "LONG_BINGET":
                push(self._memo[int(argument)])
            case "TUPLE":
                push(tuple(self._pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                push(tuple([self.pop() for _ in range(int(name[-1]))][::-1]))
            case "LIST" | "FROZENSET":
                push(self._pop_to_mark())
            case "APPEND":
                value = self.pop()
                _list_of(self._peek()).append(value)
            case "APPENDS" | "ADDITEMS":
                values = self._pop_to_mark()
                _list_of(self._peek()).extend(values)
            case "DICT":
                push(self._fill_dict({}, self._pop_to_mark()))
            case "SETITEM":
                value, key = self.pop(), self.pop()
                self._charge(_MEMO_ENTRY)
                _dict_of(self._peek())[_check_key(key)] = value
            case "SETITEMS":
                values = self._pop_to_mark()
                self._fill_dict(_dict_of(self._peek()), values)
            case _:
                self._record_code_instruction(name, argument)

    def _record_code_instruction(self, name: str, argument: Any) -> None:
        """Carry out a pickle instruction that would import or call something by pushing a record of that in its place;
        nothing is imported or called. Raise ValueError for any other instruction. `name` is pickletools' name of the
        opcode.
        """
        push = self._stack.append
        match name:
            case "GLOBAL":
                push(_parse_global(argument))
            case "STACK_GLOBAL":
                attribute, module = require_text(self.pop(), "a name"), require_text(self.pop(), "a module")
                push(Global(module, attribute))
            case "REDUCE" | "NEWOBJ":
                args = self.pop()
                push(self._record_call(self.pop(), args))
            case "NEWOBJ_EX":
                keywords, args = self.pop(), self.pop()
                self._charge(_MEMO_ENTRY * len(keywords))
                push(CallRecord(self.pop(), args, items=dict(keywords)))
            case "INST":
                push(self._record_call(_parse_global(argument), tuple(self._pop_to_mark())))
            case "OBJ":
                callee, *args = self._pop_to_mark()
                push(self._record_call(callee, tuple(args)))
            case "BUILD":
                state, record = self.pop(), self._peek()
                if isinstance(record, CallRecord):
                    record.state = state  # of plain data there is nothing to build: torch attaches notes to its dicts
            case "PERSID":
                push(PersistentId(argument))
            case "BINPERSID":
                push(PersistentId(self.pop()))
            case _:
                raise ValueError(
                    f"the pickle has the instruction {name}, but only those that build plain data are carried out"
                )

    def _fill_dict(self, result: dict[Any, Any], values: list[Any]) -> dict[Any, Any]:
        """Add `values`, alternating keys and values, to the dict `result` and return it. Raise ValueError for an
        invalid key.
        """
        self._charge(_MEMO_ENTRY * len(values))
        result.update((_check_key(key), value) for key, value in zip(values[::2], values[1::2], strict=True))
        return result

    def _record_call(self, callee: Any, args: Any) -> Any:
        """Return a CallRecord of `callee` with `args`. If the callee is OrderedDict, set or another container of
        _CONTAINER_CALLS, return the dict, list or tuple that the call would fill instead.
        """
        path = callee.path if isinstance(callee, Global) else ""
        if path not in _CONTAINER_CALLS:
            return CallRecord(callee, args)
        items = args[0] if args else ()
        if not isinstance(items, (list, tuple, dict)):
            raise ValueError(f"the pickle makes a {path} from a value that is not a list")
        self._charge(_MEMO_ENTRY * len(items))
        if path == "collections.OrderedDict":
            return dict(items) if isinstance(items, dict) else {_check_key(key): value for key, value in items}
        return tuple(items) if _CONTAINER_CALLS[path] is tuple else list(items)


def _parse_global(argument: Any) -> Global:
    module, _, name = str(argument).partition(" ")
    return Global(module, name)


def _check_key(value: Any) -> Any:
    """Return `value`, a dict key, unchanged. Raise ValueError if it could take forever to hash: a key must be a text, a
    number or the like, or a tuple of at most MAX_KEY_PARTS of these.
    """
    parts = value if type(value) is tuple else (value,)
    if len(parts) > MAX_KEY_PARTS:
        raise ValueError(f"a key in the pickle has {len(parts)} parts; at most {MAX_KEY_PARTS} are allowed")
    for part in parts:
        if not isinstance(part, (str, int, float, bytes, CallRecord, Global, type(None))):
            raise ValueError("a key in the pickle is neither a text nor a number")
        if isinstance(part, (int, float)) and not -MAX_KEY < part < MAX_KEY:
            raise ValueError(f"a key in the pickle is a number beyond {MAX_KEY}")
    return value


def _list_of(value: Any) -> list[Any]:
    if not isinstance(value, (list, CallRecord)):
        raise ValueError("the pickle adds list entries to a value that is not a list")
    return value if isinstance(value, list) else value.entries


def _dict_of(value: Any) -> dict[Any, Any]:
    if not isinstance(value, (dict, CallRecord)):
        raise ValueError("the pickle adds dict items to a value that is not a dict")
    return value if isinstance(value, dict) else value.items
