"""A strict reader of YAML config files, whose error messages name the file, the line and a way out.

Called for every config that is composed, and by `lmtrain corpus build`. A file is data of bounded size and depth: no
tags, no duplicate keys, no aliases that expand without limit. This module must not depend on what the keys mean.
"""

from __future__ import annotations

import errno
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from lmtrain.errors import MissingInputError, SettingsError
from lmtrain.runtime.files.similar_path import missing_path

MAX_BYTES = 1 << 18
MAX_DEPTH = 32
MAX_VALUES = 10_000  # because: nested aliases can expand a hundred bytes to a gigabyte
MAX_DIGITS = 100  # because: Python takes minutes to parse a million digits and refuses to print 5,000
_STRING_TAG = "tag:yaml.org,2002:str"
_SURROGATE = re.compile("[\ud800-\udfff]")
# because: YAML 1.1 reads 1e-3 as a text, while every user means the number
_FLOAT = re.compile(
    r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))$"
)


@dataclass(frozen=True)
class YamlFile:
    """A parsed config file, with the line of each value."""

    path: Path
    data: dict[str, Any]
    header: str  # the comment lines at the top of the file
    lines: dict[tuple[str | int, ...], int] = field(repr=False)  # path of each value -> its first line, counted from 1

    def location(self, *keys: str | int) -> str:
        """Return the file and line of a value, for messages; the file alone if the line is unknown."""
        line = self.lines.get(keys)
        return f"{self.path} line {line}" if line else str(self.path)


def read_yaml(path: Path) -> YamlFile:
    """Read a YAML config file and return its data with the line number of each value. Raise MissingInputError if the
    file cannot be read, and SettingsError if it is empty, is not valid YAML or has no keys at its top level.
    """
    text = _read_text(path)
    loader = _Loader(text, path)
    try:
        node = loader.get_single_node()
        if node is None:
            raise SettingsError([f"{path} is empty. Write lines of `key: value` into it, or leave it out."])
        if not isinstance(node, yaml.MappingNode):
            kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
            line = node.start_mark.line + 1
            raise SettingsError([f"{path} line {line} begins with {kind}. A config is lines of `key: value`."])
        lines = dict(_iter_lines(node))
        data = loader.construct_document(node)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        line, yaml_fault, way_out = _explain_yaml_error(error, text, loader.line)
        raise SettingsError([f"{path} line {line} {yaml_fault}. {way_out}."]) from error
    finally:
        loader.dispose()
    # the header: comments and empty lines
    header = takewhile(lambda line: not line.strip() or line.lstrip().startswith("#"), text.splitlines())
    return YamlFile(path, data, "\n".join(header), lines)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # because: PyYAML has no type annotations
    """A SafeLoader that limits depth, values and digits while it parses, so that no small file needs much memory. It
    raises SettingsError, which names `path`, for what a config file must not contain.
    """

    def __init__(self, text: str, path: Path) -> None:
        super().__init__(text)
        self.path = path
        self.depth = self.count = 0
        self.sizes: dict[int, int] = {}  # id of each node -> the number of values in its subtree

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        where = f"{self.path} line {event.start_mark.line + 1}"
        if getattr(event, "tag", None) not in (None, _STRING_TAG):
            raise SettingsError([
                f"{where} has a tag (a word with `!`), but settings are plain data. Take the tag out."
            ])  # fmt: skip
        self.count += 1
        if self.count > MAX_VALUES:
            raise SettingsError([f"{where} holds more than {MAX_VALUES} values. Divide it, or leave some out."])
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise SettingsError([f"{where} nests deeper than {MAX_DEPTH} levels. Use fewer levels."])
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if is_alias and id(node) not in self.sizes:
            raise SettingsError([f"{where} refers to a value from within that value. Write the value out."])
        self.sizes[id(node)] = size = 1 + sum(self.sizes.get(id(child), 0) for child in _child_nodes(node))
        if size > MAX_VALUES:
            raise SettingsError([
                f"{where} stands for more than {MAX_VALUES} values because of aliases (`*`). Write the values out."
            ])  # fmt: skip
        return node

    def compose_scalar_node(self, anchor: Any) -> Any:
        node = super().compose_scalar_node(anchor)
        where = f"{self.path} line {node.start_mark.line + 1}"
        if node.tag != _STRING_TAG and len(node.value) > MAX_DIGITS:
            raise SettingsError([
                f"{where} has a number of {len(node.value)} digits; at most {MAX_DIGITS} are allowed. "
                "Put it in quotes if it is a text."
            ])  # fmt: skip
        if node.tag != _STRING_TAG and node.value.startswith("+"):
            raise SettingsError([
                f"{where} has {node.value}, but nothing can be added to a value. Write {node.value[1:]}, or put it in "
                "quotes if it is a text."
            ])  # fmt: skip
        if surrogate := _SURROGATE.search(node.value):
            raise SettingsError([
                f"{where} has the escape \\u{ord(surrogate[0]):04x}, which is half a character. "
                "Write the character itself."
            ])  # fmt: skip
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise SettingsError([
                f"{self.path} line {node.start_mark.line + 1} has {node.value}, which is not a number. "
                "Put it in quotes if it is a text."
            ]) from error  # fmt: skip

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        line_by_key: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != _STRING_TAG:
                key_text = f"the key {key.value}" if isinstance(key, yaml.ScalarNode) else "a key"
                raise SettingsError([
                    f"{self.path} line {line} has {key_text}, which is not a word. Put it in quotes if it is a name."
                ])  # fmt: skip
            if key.value in line_by_key:
                first_place = f"line {line_by_key[key.value]}" if line_by_key[key.value] != line else "the same line"
                raise SettingsError([
                    f"{self.path} line {line} gives {key.value} again, after {first_place}. Keep one of the two."
                ])  # fmt: skip
            line_by_key[key.value] = line
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, found) for tag, found in rules if tag.rpartition(":")[2] not in ("timestamp", "float")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _read_text(path: Path) -> str:
    """Read a file of at most MAX_BYTES as UTF-8 text. Raise MissingInputError if it cannot be read, SettingsError if it
    is too long or is not text.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise MissingInputError(
                f"{path} is {'a folder' if stat.S_ISDIR(status.st_mode) else 'not a regular file'}. "
                "Give the path of a config file."
            )
        if status.st_size > MAX_BYTES:
            raise SettingsError(
                [f"{path} has {status.st_size} bytes; at most {MAX_BYTES} are allowed. Shorten it."]
            )
        data = path.read_bytes()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise MissingInputError(missing_path(path, "Check the name.")) from error
        raise MissingInputError(
            f"{path} cannot be read: {error.strerror}. Make it readable, or give another file."
        ) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingsError([f"{path} line {line} is not UTF-8 text. Save the file as UTF-8."]) from error
    if unprintable := yaml.reader.Reader.NON_PRINTABLE.search(text):
        line, sign = text.count("\n", 0, unprintable.start()) + 1, f"U+{ord(unprintable[0]):04X}"
        raise SettingsError([f"{path} line {line} holds the character {sign}, which YAML does not allow. Remove it."])
    return text


def _child_nodes(node: Any) -> Iterator[Any]:
    """Yield the child nodes of a YAML list or mapping node; of a mapping, both keys and values."""
    for child in node.value if isinstance(node, yaml.CollectionNode) else ():
        yield from child if isinstance(child, tuple) else (child,)


def _iter_lines(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], int]]:
    """Yield (path, line number) for every value in a YAML node. A path has the keys and list indices that lead to the
    value; a value behind an alias gets the line of its anchor.
    """
    children: list[tuple[str | int, Any, Any]] = []  # each key, the node whose line counts, and its value
    if isinstance(node, yaml.MappingNode):
        children = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, value, value) for index, value in enumerate(node.value)]
    for key, mark, value in children:
        yield (*path, key), mark.start_mark.line + 1
        yield from _iter_lines(value, (*path, key))


# a pattern in PyYAML's message, whether our message names the line where the construct began, the problem (the line's
# text follows a final colon), and the way out
_EXPLANATIONS: tuple[tuple[str, bool, str, str], ...] = (
    ("quoted scalar.*escape", False, "has a backslash that means nothing within double quotes",
     "Use single quotes around the text"),
    ("quoted scalar", True, "opens a quote that is not closed", "Close it, or take it out"),
    ("flow sequence", True, "opens a [ that is not closed", "Add the ], or a comma between two entries"),
    ("flow mapping", True, "opens a { that is not closed", "Add the }, or a comma between two entries"),
    ("could not find expected ':'", True, "has no colon:", "Write `key: value`, with a space after the colon"),
    ("mapping values are not allowed", False, "has a colon too many or is indented too far:",
     "Begin it where the keys around it begin, and put a text with a colon in quotes"),
    ("another document|document start", False, "begins a second document",
     "Keep what stands before or after the `---`"),
    ("alias", False, "refers with `*` to a name that no `&` gives", "Write the value out, or quote the text"),
    ("anchor", False, "gives a name with `&` that is not a new one", "Write the value out, or quote the text"),
    ("block end|block collection|block mapping|not allowed here", False, "is not indented as the lines above it:",
     "Begin it where the keys around it begin"),
    ("cannot start any token", False, "begins with a sign that YAML keeps for itself:", "Put the text in quotes"),
    ("", False, "is not YAML:", "Write lines of `key: value`, indented with spaces"),
)  # fmt: skip


def _explain_yaml_error(error: Exception, text: str, last_read_line: int) -> tuple[int, str, str]:
    """Translate an error that PyYAML raised on the file content `text` to (line number from 1, what is wrong there, how
    to correct it), the last two as clauses for an error message. `last_read_line` is the number of lines read so far,
    for errors without a position.
    """
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    context = getattr(error, "context_mark", None) or mark
    message = f"{getattr(error, 'context', '')} {getattr(error, 'problem', '')}"
    lines = text.splitlines() or [""]
    line = min(mark.line + 1 if mark else last_read_line + 1, len(lines))
    first = min(context.line + 1 if context else line, len(lines))
    for number in (line, first):
        if "\t" in lines[number - 1][: len(lines[number - 1]) - len(lines[number - 1].lstrip())]:
            return number, "is indented with a tab", "Use spaces"
    if isinstance(error, (ValueError, OverflowError)):
        return line, "has an escape for a character that does not exist", "Write the character, or use single quotes"
    if "mapping values are not allowed" in message:
        before = lines[line - 2].strip() if line > 1 else ""
        if before and not before.startswith(("#", "-")) and not re.search(r":(\s|$)", before):
            return line - 1, f"has no colon with a space after it: {_shortened(before)}", "Write `key: value`"
    _, at_begin, fault, way_out = next(
        explanation for explanation in _EXPLANATIONS if re.search(explanation[0], message)
    )
    number = first if at_begin else line
    return number, fault + (f" {_shortened(lines[number - 1])}" if fault.endswith(":") else ""), way_out


def _shortened(line: str) -> str:
    """Return a line for a message, cut to 60 characters."""
    line = line.strip()
    return line if len(line) <= 60 else f"{line[:57]}..."
