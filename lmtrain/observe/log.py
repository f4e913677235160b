"""log.txt of a run folder: every line a person was shown, with its time in UTC. Called by the views.

Only appends, so that a run that was continued tells its whole story in one file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from lmtrain.runtime.files import storage_errors

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class RunLog:
    def __init__(self, path: Path, clock: Callable[[], datetime] = partial(datetime.now, UTC)) -> None:
        self.path, self._clock = path, clock
        with storage_errors(path, "Opening"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115

    def line(self, text: str) -> None:
        """One time stamp a call; further lines of the text are indented below the first."""
        stamp = self._clock().strftime("%Y-%m-%dT%H:%M:%SZ")
        plain = _CONTROL.sub("", _ESCAPE.sub("", text)).rstrip().replace("\n", "\n" + " " * (len(stamp) + 2))
        with storage_errors(self.path, "Writing"):
            self._file.write(f"{stamp}  {plain}\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()
