"""A small process that outlives our own launcher, and then ends what that left behind. Called by launch.

A child ends itself when its launcher is gone, but not while it stands still by SIGSTOP or holds the interpreter's lock.
The guardian is this very file, run without any other: it waits for its input to close, which the launcher's end does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress


class Guardian:
    """Of these processes and their groups."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, pids)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,  # because: what ends the launcher's group is not for it
        )  # fmt: skip

    def dismiss(self) -> None:
        """All of them have ended."""
        with suppress(BrokenPipeError):
            self._process.communicate(b"dismissed")


def main() -> None:
    if os.read(0, 1):
        return
    for pid in map(int, sys.argv[1:]):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
