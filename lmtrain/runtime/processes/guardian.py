"""A small process that outlives our own launcher, and then ends what that left behind. Started by launch.

Run as `python -m lmtrain.runtime.processes.guardian`; its input is a pipe that gives a process id a line and closes
when the launcher ends. A rank ends itself when its launcher is gone, but not while it stands still by SIGSTOP or holds
the interpreter's lock.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def main() -> None:
    """Wait for the launcher's end, then kill these processes and their groups."""
    text = b""
    while data := os.read(0, 1 << 16):
        text += data
    for pid in map(int, text.split()):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
