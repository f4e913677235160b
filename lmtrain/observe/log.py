"""log.txt of a run folder: every line a person was shown, with its time in UTC. Called by the views.

Only appends, so that a run that was continued tells its whole story in one file; where lines could not be written, it
says how many.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from lmtrain.observe.growing_file import GrowingFile
from lmtrain.observe.safe_text import plain, warn


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
