"""Text that is safe for a terminal: control characters escaped, lines wrapped between words. No torch, no rich.

Used by all code that writes lines for people: the command line's output, the log, the live view, warnings.
"""

from __future__ import annotations

import re
import sys
import textwrap
from contextlib import suppress
from typing import TextIO

# characters that move the cursor, change the terminal's state, reverse the order of letters, or are invalid
_CONTROL_CHARACTERS = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")
# start of a list entry or of a fact; wrapped lines are indented to its text
_LIST_HEAD = re.compile(r" *\d+\. |\w+ {2,}")
_LABEL = re.compile(r"^(\w+:) ")  # a label is never separated from the word after it, however long that is
_QUOTED = re.compile(r'`[^`]*`|"[^"]*"')
_NO_BREAK = "\N{NO-BREAK SPACE}"
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def escape_control_characters(text: str) -> str:
    r"""Replace control characters by JSON escapes, such as \u001b. JSON text keeps its meaning."""
    return _CONTROL_CHARACTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def plain_text(text: str) -> str:
    """Remove colours, and escape control characters, since names of files may contain anything."""
    return escape_control_characters(_ESCAPE.sub("", text).replace("\r", ""))


_COMMAND_START = "  lmtrain "


def wrap_text(text: str, width: int) -> str:
    """Wrap the lines of `text` between words, to `width` characters. A word that is longer than a line, such as a path,
    is not broken.

    Text between ` or " signs is not broken either, nor an indented line that is a command, because people copy it, and
    a shell would read two lines as two commands.
    """

    def wrap_line(line: str) -> str:
        if line.startswith(_COMMAND_START):
            return line
        line = _QUOTED.sub(lambda match: match[0].replace(" ", _NO_BREAK), line)
        line = _LABEL.sub(rf"\1{_NO_BREAK}", line)
        head = _LIST_HEAD.match(line)
        indent = " " * (head.end() if head else 2 + len(line) - len(line.lstrip()) if line.startswith(" ") else 0)
        lines = textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        return lines.replace(_NO_BREAK, " ")

    return "\n".join(map(wrap_line, text.split("\n")))


def warn(text: str | None) -> None:
    """Write `text` to standard error as a warning, unless it is None; ignore an error of the write."""
    if text is None:
        return
    with suppress(OSError):
        write_line(f"warning: {plain_text(text)}", sys.stderr)  # looked up here: a live view may have replaced it


def write_line(text: str, stream: TextIO) -> None:
    """Write a line with its control characters escaped, at once."""
    stream.write(f"{escape_control_characters(text)}\n")
    stream.flush()
