"""What a person sees while a run trains: a live panel on a terminal, plain one-line logs everywhere else.

Called by the training loop with the rows of metrics.jsonl; decides nothing and never raises for a row that lacks a
figure. Every line also goes to the run folder's log.txt. Its words are made in row_text.py, the panel in panel.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from io import UnsupportedOperation
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lmtrain.observe.metrics import GrowingFile
from lmtrain.observe.safe_text import plain, warn, wrapped
from lmtrain.observe.screen.panel import RunPanel, Saves
from lmtrain.observe.screen.row_text import Row, eval_line, step_line, valid_line
from lmtrain.observe.screen.verb_progress import is_live


class RunLog:
    def __init__(self, path: Path, clock: Callable[[], datetime] = partial(datetime.now, UTC)) -> None:
        self._clock = clock
        self._file = GrowingFile(path, "lines")
        if self._file.last_line():  # because: a kill or a full disk can have torn it
            self._file.append(b"\n")

    def line(self, text: str) -> None:
        """One time stamp a call; further lines of the text are indented below the first."""
        gap = f"{self._file.lost} lines are missing here, which could not be written\n" if self._file.lost else ""
        stamp = self._clock().strftime("%Y-%m-%dT%H:%M:%SZ")
        lines = plain(gap + text).rstrip().replace("\n", "\n" + " " * (len(stamp) + 2))
        self._file.append(f"{stamp}  {lines}\n".encode())

    def warn(self, text: str) -> None:
        """For somebody who looks now, and for who reads the log later."""
        warn(text)
        self.line(f"warning: {text}")

    def close(self) -> None:
        self._file.close()


def build_view(
    console: Console, title_facts: Mapping[str, str], total_steps: int, *, log: RunLog | None = None,
    saves: Saves | None = None,
) -> RunView:  # fmt: skip
    """The view that suits this console. `title_facts["run"]` is the title; the other facts are listed below it."""
    if not is_live(console):
        return RunView(console, title_facts, total_steps, log)
    return LiveView(console, title_facts, total_steps, log, saves)


def print_line(console: Console, text: str) -> None:
    """At once and as one piece, for a signal can come in the middle of another line. What nobody takes is lost.

    because: a full disk, or a reader that went away, is no reason to end a run, whose log has the line too.
    """
    text = plain(text)
    text = wrapped(text, console.width) if console.file.isatty() else text
    data = f"{text}\n".encode(console.encoding, "backslashreplace")
    if console.quiet:
        return
    try:
        number = console.file.fileno()
    except UnsupportedOperation:  # a file in memory
        console.file.write(data.decode(console.encoding))
        return
    with suppress(OSError):
        os.write(number, data)


class RunView:
    """Plain lines: what a log file, a pipe or a batch job gets. A context manager, as the live view is."""

    def __init__(
        self, console: Console, title_facts: Mapping[str, str], total_steps: int, log: RunLog | None = None
    ) -> None:
        self.console, self.facts, self.total_steps, self._log = console, dict(title_facts), total_steps, log

    def __enter__(self) -> Self:
        self._line("  ".join(f"{name} {value}" for name, value in self.facts.items()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def step(self, row: Row) -> None:
        self._line(step_line(row, self.total_steps))

    def valid(self, row: Row) -> None:
        self._line(valid_line(row))

    def evaluated(self, row: Row) -> None:
        self._line(eval_line(row))

    def saved(self, row: Row, text: str) -> None:
        """A checkpoint is on disk."""
        self.note(text)

    def note(self, text: str) -> None:
        self._line(text)

    def doing(self, text: str) -> None:
        """What the run does now, while no row comes."""

    def stopping(self, text: str) -> None:
        """As `doing`, called by a signal in the middle of whatever goes on."""
        self._show(text)

    def _line(self, text: str) -> None:
        if self._log is not None:
            self._log.line(text)
        self._show(text)

    def _show(self, text: str) -> None:
        print_line(self.console, text)


class LiveView(RunView):
    """A panel that is redrawn a few times a second by rich's own thread; rows only replace what it draws."""

    def __init__(
        self, console: Console, title_facts: Mapping[str, str], total_steps: int, log: RunLog | None = None,
        saves: Saves | None = None,
    ) -> None:  # fmt: skip
        super().__init__(console, title_facts, total_steps, log)
        self.panel = RunPanel(self.facts, total_steps, saves=saves)
        self._live = Live(self.panel, console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.panel.stop()
        with suppress(OSError):
            self._live.stop()

    def step(self, row: Row) -> None:
        self.panel.step(row)
        super().step(row)

    def valid(self, row: Row) -> None:
        self.panel.valid(row)
        super().valid(row)

    def evaluated(self, row: Row) -> None:
        self.panel.evaluated(row)
        super().evaluated(row)

    def saved(self, row: Row, text: str) -> None:
        self.panel.saved(row)
        super().saved(row, text)

    def note(self, text: str) -> None:
        super().note(text)
        with suppress(OSError):  # because: a terminal can go while its run stays
            self.console.print(Text(plain(text), overflow="fold"))

    def doing(self, text: str) -> None:
        self.panel.now = text

    stopping = doing  # because: another thread draws it

    def _show(self, text: str) -> None:
        pass  # the panel shows it; only notes are printed above
