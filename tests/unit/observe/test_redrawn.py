"""Only lines that changed are sent, and what a terminal then shows is the newest block."""

from __future__ import annotations

import io
import random
import re

from rich.console import Console
from rich.text import Text

from lmtrain.cli.runs.watch_command import Redrawer, redraw_text


def shown(sent: str) -> list[str]:
    """What a terminal makes of it: lines, and the cursor as it moves."""
    lines, row = [""], 0
    for up, down, text, end in re.findall(r"\x1b\[(\d+)A|\x1b\[(\d+)B|\r([^\x1b\r\n]*)(\x1b\[K|\n)?", sent):
        row += int(down or 0) - int(up or 0)
        if end:  # because: a carriage return alone writes nothing
            lines[row] = text
        if end == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
    return lines


def test_any_block_becomes_any_other() -> None:
    chosen = random.Random(1)
    for _ in range(200):
        blocks = [[chosen.choice("abcd") * 3 for _ in range(chosen.randint(1, 6))] for _ in range(4)]
        before: list[str] = []
        sent = ""
        for block in blocks:
            part = redraw_text(before, block)
            assert part.count("\n") == max(len(block) - len(before), 0)
            sent += part
            before = block + [""] * (len(before) - len(block))
        assert [line for line in shown(sent) if line] == blocks[-1]


def test_what_stays_is_not_sent_again() -> None:
    lines = [f"line {number}" for number in range(20)]
    assert redraw_text(lines, lines) == ""
    assert redraw_text(lines, [*lines[:7], "other", *lines[8:]]) == "\x1b[13A\rother\x1b[K\x1b[13B\r"


def test_a_console_gets_few_bytes() -> None:
    file = io.StringIO()
    drawn = Redrawer(Console(file=file, width=80, height=30, force_terminal=True, legacy_windows=False))
    drawn.draw(Text("\n".join(f"figure {number}" for number in range(12))))
    first = len(file.getvalue())
    drawn.draw(Text("\n".join(f"figure {number + (number == 3) * 50}" for number in range(12))))
    assert "figure 53" in file.getvalue()[first:]
    assert len(file.getvalue()) - first < 30
