"""What a slip can make of a statement: every change that the operators know, in Python by its syntax tree.

An operator looks at one node of the tree and yields texts that may stand in its place: another comparison, a border
moved by one, an argument left out. Nothing here knows what the code is for, so what is drawn from these changes is
chosen by nobody. Left alone is what no input can tell: annotations, asserts, imports, words for people.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

COMPARISONS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is not": "is", "is": "is not", "not in": "in", "in": "not in",
}  # fmt: skip
OPERATORS = {
    "+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "//", "**": "*", "<<": ">>", ">>": "<<", "&": "|", "|": "&",
    "^": "&", "@": "*",
}  # fmt: skip
FUNCTIONS = {
    "min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor", "round": "int",
    "minimum": "maximum", "maximum": "minimum", "amax": "amin", "amin": "amax", "startswith": "endswith",
    "endswith": "startswith", "partition": "rpartition", "rpartition": "partition", "append": "extend",
    "union": "intersection", "zeros": "ones", "ones": "zeros", "argmax": "argmin", "cumsum": "cumprod", "lt": "le",
    "find": "rfind", "lstrip": "rstrip", "rstrip": "lstrip",
}  # fmt: skip
UNWRAPPED = {
    "sorted", "reversed", "abs", "set", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "sum_over_shards",
    "detach", "contiguous", "clone", "float", "flip", "resolve", "copy", "sqrt", "square", "lower", "strip", "log",
    "exp", "ceil", "floor", "round",
}  # fmt: skip
SYMMETRIC = {"min", "max", "minimum", "maximum", "gcd", "lcm", "logical_and", "logical_or", "equal", "isclose", "fmax"}
AXES = ["tp", "pp", "dp", "cp", "vp", "dp_shard", "dp_replicate"]
# arguments that no input can tell apart
SILENT = {
    "strict", "encoding", "errors", "help", "metavar", "frozen", "slots", "kw_only", "stacklevel", "repr", "indent",
    "width", "style", "description", "flush", "eq", "highlight", "markup", "title", "name", "justify", "no_wrap",
    "rich_help_panel", "daemon", "separators", "because", "why",
}  # fmt: skip
KEY = re.compile(r"[A-Za-z_][\w./-]*")


@dataclass(frozen=True)
class Change:
    """Replacement of the text between two places of a file, as a slip would make it."""

    kind: str
    begin: int
    end: int
    new: str


@dataclass
class Statement:
    """A statement, where it stands, and what a slip can make of it."""

    function: str  # "Class.method", or "" outside of functions
    begin: int
    end: int
    changes: list[Change] = field(default_factory=list)


def statements(text: str) -> list[Statement]:
    """Return the statements of a module that some slip can change, in their order."""
    return _Module(text).read()


class _Module:
    def __init__(self, text: str) -> None:
        self.text, self.tree = text, ast.parse(text)
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = text.splitlines()
        self.keys = sorted({
            node.value for node in ast.walk(self.tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and KEY.fullmatch(node.value)
        })  # fmt: skip
        self.found: list[Statement] = []

    def read(self) -> list[Statement]:
        self._block(self.tree.body, "", {}, {})
        return self.found

    def _at(self, line: int, column: int) -> int:
        """Return the place in the text of a line and a column, which the syntax tree counts in bytes."""
        here = self.lines[line - 1]
        return self.starts[line - 1] + (column if here.isascii() else len(here.encode()[:column].decode()))

    def _span(self, node: ast.expr | ast.stmt | ast.keyword | ast.arg) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno or 0, node.end_col_offset or 0)

    def _said(self, node: ast.expr | ast.stmt) -> str:
        begin, end = self._span(node)
        return self.text[begin:end]

    def _is_placed(self, node: ast.expr) -> bool:
        """Whether the tree says rightly where it stands: before Python 3.12 it errs in some texts with braces."""
        try:
            said = self._said(node)
            return ast.dump(ast.parse(f"({said})", mode="eval").body) == ast.dump(node)
        except (SyntaxError, IndexError):
            return False

    # -- statements

    def _block(
        self, block: list[ast.stmt], function: str, twins: dict[str, list[str]], fields: dict[str, list[str]]
    ) -> None:
        for index, node in enumerate(block):
            if isinstance(node, ast.ClassDef):
                self._block(node.body, f"{function}.{node.name}".strip("."), twins, _twins(_fields(node)))
                continue
            if _is_left_alone(node):
                continue
            inside = twins
            name = function
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{function}.{node.name}".strip(".")
                inside = _twins({
                    each.arg: ast.unparse(each.annotation) for each in (*node.args.args, *node.args.kwonlyargs)
                    if each.annotation is not None
                })  # fmt: skip
            begin, end = self._span(node)
            here = Statement(name, begin, end)
            here.changes += self._of_expressions(node, inside, fields)
            if name and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                here.changes += self._of_statement(block, index)
            here.changes = [change for change in here.changes if self.text[change.begin : change.end] != change.new]
            if here.changes:
                self.found.append(here)
            for below in _blocks(node):
                self._block(below, name, inside, fields)

    def _of_statement(self, block: list[ast.stmt], index: int) -> Iterator[Change]:
        node = block[index]
        begin, end = self._span(node)
        after = block[index + 1] if index + 1 < len(block) else None
        is_yield = isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield | ast.YieldFrom)
        is_jump = isinstance(node, ast.Expr | ast.Raise | ast.Continue | ast.Break | ast.Delete) and not is_yield
        if is_jump or _is_effect(node):
            yield Change("statement dropped", begin, end, "pass")
        elif isinstance(node, ast.If) and not node.orelse and self.text[begin : begin + 2] == "if":
            yield Change("branch dropped", begin, end, "pass")
        if after is not None and _is_effect(node) and _is_effect(after) and _order_counts(node, after):
            first, last = self._span(after)
            between = self.text[end:first]
            yield Change("order exchanged", begin, last, self.text[first:last] + between + self.text[begin:end])

    # -- expressions

    def _of_expressions(
        self, statement: ast.stmt, twins: dict[str, list[str]], fields: dict[str, list[str]]
    ) -> Iterator[Change]:
        for node in _own(statement, self._is_placed):
            begin, end = self._span(node)
            match node:
                case ast.Compare():
                    for left, right in pairwise([node.left, *node.comparators]):
                        yield from self._token("comparison", left, right, COMPARISONS)
                    if isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE) and len(node.ops) == 1:
                        yield from self._moved(node.comparators[0])
                case ast.BinOp():
                    if not (isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)):
                        yield from self._token("operator", node.left, node.right, OPERATORS)
                        for operand in (node.left, node.right):
                            yield Change("operand left out", begin, end, self._in_brackets(operand))
                case ast.BoolOp():
                    for left, right in pairwise(node.values):
                        yield from self._token("and or or", left, right, {"and": "or", "or": "and"})
                    for position in range(len(node.values)):
                        rest = [self._in_brackets(v) for k, v in enumerate(node.values) if k != position]
                        joined = (" and " if isinstance(node.op, ast.And) else " or ").join(rest)
                        yield Change("condition left out", begin, end, f"({joined})")
                case ast.UnaryOp(op=ast.Not()):
                    yield Change("not", begin, end, f"({self._said(node.operand)})")
                case ast.UnaryOp(op=ast.USub()) if not isinstance(node.operand, ast.Constant):
                    yield Change("operator", begin, end, f"({self._said(node.operand)})")
                case ast.IfExp():
                    yield Change("not", *self._span(node.test), f"not ({self._said(node.test)})")
                    for choice in (node.body, node.orelse):
                        yield Change("choice left out", begin, end, f"({self._said(choice)})")
                case ast.Constant():
                    yield from self._constant(node, begin, end)
                case ast.Call():
                    yield from self._call(node, begin, end)
                case ast.Subscript(slice=ast.Slice() as part):
                    for bound in (part.lower, part.upper):
                        if bound is not None:
                            yield from self._moved(bound)
                            yield Change("bound left out", *self._span(bound), "")
                case ast.List() | ast.Tuple() | ast.Set() if (
                    isinstance(getattr(node, "ctx", ast.Load()), ast.Load) and len(node.elts) > 1
                ):
                    if isinstance(node, ast.Tuple) and len(node.elts) == 2:
                        for item in node.elts:
                            yield Change("element left out", begin, end, f"({self._said(item)},)")
                        continue
                    for position in range(len(node.elts)):
                        yield self._left_out("element left out", node.elts, position)
                case ast.Dict() if len(node.values) > 1:
                    for position, key in enumerate(node.keys):
                        first = self._span(key)[0] if key is not None else self._span(node.values[position])[0] - 2
                        last = self._after_comma(self._span(node.values[position])[1])
                        yield Change("element left out", first, last, "")
                case ast.Attribute() if isinstance(node.ctx, ast.Load):
                    where = end - len(node.attr)
                    yield from self._axis(node.attr, where, end)
                    if isinstance(node.value, ast.Name) and node.value.id == "self":
                        for other in fields.get(node.attr, ()):
                            yield Change("another of its type", where, end, other)
                case ast.Name() if isinstance(node.ctx, ast.Load):
                    for other in twins.get(node.id, ()):
                        yield Change("another of its type", begin, end, other)
                case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                    for generator in node.generators:
                        for test in generator.ifs:
                            yield Change("not", *self._span(test), f"not ({self._said(test)})")
                            yield Change("condition left out", *self._span(test), "True")
        if isinstance(statement, ast.If | ast.While):
            test = statement.test
            yield Change("not", *self._span(test), f"not ({self._said(test)})")

    def _token(self, kind: str, left: ast.expr, right: ast.expr, others: dict[str, str]) -> Iterator[Change]:
        """Yield the change of the operator that stands between two operands."""
        begin, end = self._span(left)[1], self._span(right)[0]
        words = sorted(others, key=len, reverse=True)
        pattern = "|".join(rf"\b{word}\b" if word[0].isalpha() else re.escape(word) for word in words)
        if found := re.search(pattern, self.text[begin:end]):
            yield Change(kind, begin + found.start(), begin + found.end(), others[found.group()])

    def _moved(self, bound: ast.expr) -> Iterator[Change]:
        if isinstance(bound, ast.Constant | ast.UnaryOp):
            return  # the operator of constants has it
        for other in (f"{self._in_brackets(bound)} + 1", f"{self._in_brackets(bound)} - 1"):
            yield Change("border", *self._span(bound), other)

    def _in_brackets(self, node: ast.expr) -> str:
        said = self._said(node)
        return said if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript) else f"({said})"

    def _constant(self, node: ast.Constant, begin: int, end: int) -> Iterator[Change]:
        value = node.value
        if isinstance(value, bool):
            yield Change("constant", begin, end, str(not value))
        elif isinstance(value, int):
            yield Change("constant", begin, end, str(value + 1))
            if value:
                yield Change("constant", begin, end, str(value - 1))
        elif isinstance(value, float):
            yield Change("constant", begin, end, repr(value * 2 if value else 1.0))
        elif isinstance(value, str) and KEY.fullmatch(value) and self.text[begin] in "\"'":
            if value in AXES:
                yield from self._axis(value, begin + 1, end - 1)
            elif len(self.keys) > 1:
                other = self.keys[(self.keys.index(value) + 1) % len(self.keys)]
                quote = self.text[begin]
                yield Change("another key", begin, end, f"{quote}{other}{quote}")

    def _axis(self, word: str, begin: int, end: int) -> Iterator[Change]:
        base = next((axis for axis in sorted(AXES, key=len, reverse=True) if re.fullmatch(rf"{axis}(_\w+)?", word)), "")
        if base and (word == base or word.removeprefix(base) in ("_rank", "_size", "_group")):
            for other in AXES[:3]:
                if other != base:
                    yield Change("axis", begin, end, other + word.removeprefix(base))

    def _call(self, node: ast.Call, begin: int, end: int) -> Iterator[Change]:
        plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in FUNCTIONS:
            where = self._span(node.func)[1]
            yield Change("function", where - len(name), where, FUNCTIONS[name])
        if name in UNWRAPPED:
            if isinstance(node.func, ast.Attribute) and not node.args:
                yield Change("call left out", begin, end, self._in_brackets(node.func.value))
            elif plain:
                yield Change("call left out", begin, end, self._in_brackets(plain[0]))
        if name in ("min", "max", "minimum", "maximum") and len(plain) == 2:
            for argument in plain:
                yield Change("operand left out", begin, end, f"({self._said(argument)})")
        for left, right in pairwise(plain if name not in SYMMETRIC else ()):
            one, other = self._said(left), self._said(right)
            first, last = self._span(left)[0], self._span(right)[1]
            between = self.text[self._span(left)[1] : self._span(right)[0]]
            yield Change("arguments exchanged", first, last, other + between + one)
        if name == "range":
            for bound in plain[:2]:
                yield from self._moved(bound)
        arguments: list[ast.expr | ast.keyword] = [*node.args, *node.keywords]
        for position, keyword in enumerate(arguments):
            if isinstance(keyword, ast.keyword) and keyword.arg not in (None, *SILENT):
                yield self._left_out("argument left out", arguments, position)
        if len(node.args) > 1 and not node.keywords and name not in FUNCTIONS:
            yield self._left_out("argument left out", arguments, len(arguments) - 1)

    def _left_out(self, kind: str, items: Sequence[ast.expr | ast.keyword], position: int) -> Change:
        begin, end = self._span(items[position])
        if position + 1 < len(items):
            return Change(kind, begin, self._span(items[position + 1])[0], "")
        return Change(kind, begin, self._after_comma(end), "")

    def _after_comma(self, place: int) -> int:
        found = re.match(r"\s*,[ \t]*", self.text[place:])
        return place + (found.end() if found else 0)


def _fields(node: ast.ClassDef) -> dict[str, str]:
    return {
        each.target.id: ast.unparse(each.annotation) for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }  # fmt: skip


def _twins(types: dict[str, str]) -> dict[str, list[str]]:
    """Return for each name the next one of the same type."""
    found: dict[str, list[str]] = {}
    for name, kind in types.items():
        names = [other for other, its in types.items() if its == kind]
        if len(names) > 1:
            found[name] = [names[(names.index(name) + 1) % len(names)]]
    return found


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        if isinstance(block := getattr(node, name, None), list):
            yield block
    for handler in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
        yield handler.body


def _is_effect(node: ast.stmt) -> bool:
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return is_call or isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Assign) and all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets)
    )  # fmt: skip


def _order_counts(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether the order of two effects can matter: what only changes a value does not, unless the other looks at it."""
    changed = [_changed_alone(node) for node in (first, second)]
    said = [ast.unparse(node) for node in (first, second)]
    if changed[0] is None or changed[1] is None:
        return True
    return any(name in said[1] for name in changed[0]) or any(name in said[0] for name in changed[1])


def _changed_alone(node: ast.stmt) -> list[str] | None:
    """Return the places that the statement changes; None if it may do more, as a call does."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        return [ast.unparse(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ("append", "add"):
        return [ast.unparse(call.func.value)]
    return None


def _is_left_alone(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Pass | ast.Assert | ast.Global | ast.Nonlocal):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True  # a docstring
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        return True
    names = [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []
    return "__all__" in names


def _own(statement: ast.stmt, is_placed: Callable[[ast.expr], bool]) -> Iterator[ast.expr]:
    """Yield the expressions of a statement itself: not of what it holds, nor annotations, decorators and words."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        waiting: list[ast.AST] = [*statement.args.defaults, *(d for d in statement.args.kw_defaults if d is not None)]
    else:
        skipped = ("body", "orelse", "finalbody", "handlers", "cases", "annotation", "decorator_list")
        waiting = [
            child for name, value in ast.iter_fields(statement) if name not in skipped
            for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)
        ]  # fmt: skip
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.JoinedStr):
            inside = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
            waiting += [value for value in inside if is_placed(value)]
            continue
        if isinstance(node, ast.keyword) and node.arg in SILENT:
            continue
        if isinstance(node, ast.Lambda):
            waiting.append(node.body)
            continue
        if isinstance(node, ast.expr):
            yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context)]
