"""A block of lines on a terminal, of which only those that have changed are sent again, for slow connections.

Called by `lmtrain watch`. Nothing is cleared that somebody else wrote, and where the terminal's size has changed the
block is written anew below.
"""

from __future__ import annotations

from rich.console import Console, RenderableType


class Redrawn:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: list[str] = []
        self._size = console.size

    def show(self, what: RenderableType) -> None:
        console = self._console
        with console.capture() as captured:
            console.print(what)
        lines = captured.get().split("\n")[:-1]
        if console.size != self._size or len(lines) > console.height - 1:
            self._size, self._lines = console.size, []
        console.file.write(difference(self._lines, lines))
        console.file.flush()
        self._lines = lines


def difference(before: list[str], now: list[str]) -> str:
    """What to write for `now` to stand where `before` stands, with the cursor below it before and after."""
    if len(now) < len(before):
        now = [*now, *([""] * (len(before) - len(now)))]
    sent, at = "", len(before)  # `at`: the line that the cursor is on
    for number, line in enumerate(now):
        if number < len(before):
            if line == before[number]:
                continue
            sent += _move(number - at) + f"\r{line}\x1b[K"
            at = number
        else:
            sent += _move(number - at) + f"\r{line}\n"
            at = number + 1
    return sent + (_move(len(now) - at) + "\r" if sent else "")


def _move(lines: int) -> str:
    if lines == 0:
        return ""
    return f"\x1b[{lines}B" if lines > 0 else f"\x1b[{-lines}A"
