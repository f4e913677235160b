"""A small process that outlives a killed launcher and kills the ranks that it left behind.

Started by local_rank_launcher.py.

Run as `python -m lmtrain.runtime.processes.kill_orphaned_ranks`; its input is a pipe with a process id on each line,
which closes when the launcher ends. A rank ends itself when its launcher is gone, but not while it is stopped by
SIGSTOP or holds the interpreter's lock.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def main() -> None:
    """Read process ids, one on each line, from standard input until it closes; then kill the process group of each."""
    text = b""
    while data := os.read(0, 1 << 16):
        text += data
    for pid in map(int, text.split()):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
