"""Print a line with a single write() call. Called for every message and every row of a run; it imports no rich itself.
"""

from __future__ import annotations

import os
from contextlib import suppress
from io import UnsupportedOperation
from typing import TYPE_CHECKING

from lmtrain.runtime.processes.command_watch import note_output
from lmtrain.runtime.terminal_safe_text import plain_text, wrap_text

if TYPE_CHECKING:
    from rich.console import Console


def print_line(console: Console, text: str) -> None:
    """Print `text` as a line with a single write() call, because a signal handler may print at any time.

    A failed write is ignored, because a full disk or a closed pipe is no reason to end a run, whose log has the line
    too.
    """
    note_output()
    text = plain_text(text)
    text = wrap_text(text, console.width) if console.file.isatty() else text
    data = f"{text}\n".encode(console.encoding, "backslashreplace")
    if console.quiet:
        return
    try:
        fd = console.file.fileno()
    except UnsupportedOperation:  # a file in memory
        console.file.write(data.decode(console.encoding))
        return
    with suppress(OSError):
        os.write(fd, data)
