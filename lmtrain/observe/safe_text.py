"""Text as a terminal gets it: what names and files hold is spelt out, lines end between words. No torch, no rich.

Called by whatever writes lines for people: the command line's printing, the log, the live view, warnings.
"""

from __future__ import annotations

import re
import sys
import textwrap
from contextlib import suppress

# because: these move the cursor, change the terminal, turn the order of letters round, or are no characters at all
_OBEYED = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")
_HEAD = re.compile(r" *\d+\. |\w+ {2,}")  # of a list's entry, or of a fact: what follows goes on below its text
_LABEL = re.compile(r"^(\w+:) ")  # what follows stays beside it, however long it is
_QUOTED = re.compile(r'`[^`]*`|"[^"]*"')
_NO_BREAK = "\N{NO-BREAK SPACE}"
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def escaped(text: str) -> str:
    r"""Every character that is more than ink as JSON writes it: an escape becomes \u001b. JSON stays the same JSON."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def plain(text: str) -> str:
    """Without colours, and without what a terminal would obey: names of files are in many lines and hold anything."""
    return escaped(_ESCAPE.sub("", text).replace("\r", ""))


def wrapped(text: str, width: int) -> str:
    """Lines that end between words; a word that is longer than a line, as a path can be, stays whole.

    So does what stands between ` or " signs: it is to be copied, and a shell would read two lines of it as two.
    """

    def one(line: str) -> str:
        line = _QUOTED.sub(lambda found: found[0].replace(" ", _NO_BREAK), line)
        line = _LABEL.sub(rf"\1{_NO_BREAK}", line)
        head = _HEAD.match(line)
        indent = " " * (head.end() if head else 2 + len(line) - len(line.lstrip()) if line.startswith(" ") else 0)
        lines = textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        return lines.replace(_NO_BREAK, " ")

    return "\n".join(map(one, text.split("\n")))


def warn(text: str) -> None:
    """On standard error, if that takes it."""
    errors = sys.stderr  # where it is now: a live view may have put itself there
    with suppress(OSError):
        errors.write(f"warning: {plain(text)}\n")
        errors.flush()
