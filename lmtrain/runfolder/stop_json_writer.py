"""The only writer of stop.json, which records why a run ended and whether a scheduler should restart it. Torch-free.

Called by read_and_record_run_end.py, for ranks and launchers, and by the companion processes of the watchdog.
Companions start without site packages and in milliseconds, so this module imports next to nothing and takes plain
arguments instead of a class.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

from lmtrain.errors import PeerLostError, StoppedEarly
from lmtrain.runfolder.file_names import CHECKPOINTS, STOP, checkpoint_names

TYPE_CHECKING = False
if TYPE_CHECKING:  # because: importing typing takes a third of a companion's start time
    from typing import Any

DONE = "done"  # the cause if a run reached its last step
_REQUEUE_CODES = (StoppedEarly.exit_code, PeerLostError.exit_code)


def write(
    folder: str | os.PathLike[str], cause: str, exit_code: int, *, replace: bool, fsync: bool = True, **extra_facts: Any
) -> None:
    """Write stop.json into the run folder atomically: the cause of the run's end, its exit code, the newest checkpoint,
    from which the next start resumes, and `extra_facts`. With `replace` False, an existing file is left as it is. Raise
    OSError if writing fails.

    Readers never see half of it. The first process that fails has the true cause, since its peers fail because of it,
    so it passes `replace=False`; a writer that speaks for all processes passes True. With `fsync` the text is fsynced
    before the file gets its name; a caller that must not block on a hanging disk passes False.
    """
    path = os.path.join(folder, STOP)
    if os.path.lexists(path) and not replace:
        return
    names = checkpoint_names(os.path.join(folder, CHECKPOINTS))
    facts = {
        "cause": cause, "exit_code": exit_code, "requeue": exit_code in _REQUEUE_CODES, **extra_facts,
        "resume": os.path.join(folder, CHECKPOINTS, names[-1]) if names else None,
    }  # fmt: skip
    text = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
    temporary = os.path.join(folder, f".{STOP}.tmp-{os.urandom(6).hex()}")  # because: all ranks may write at once
    try:
        with open(temporary, "xb") as file:
            file.write(text.encode(errors="backslashreplace"))  # because: JSON escapes lone surrogates likewise
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        (os.replace if replace else _link_if_absent)(temporary, path)
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def _link_if_absent(temporary: str, path: str) -> None:
    """Give the file `temporary` the additional name `path` by a hard link, or rename it where hard links are not
    supported. If `path` exists already, do nothing.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # because: not every file system has hard links
        if not os.path.lexists(path):
            os.replace(temporary, path)
