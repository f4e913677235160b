"""The one writer of stop.json, which says why a run ended and whether a scheduler should start it again. Torch-free.

Called by ends, for ranks and launchers, and by the watch, whose companions start without site packages and in
milliseconds: so this imports next to nothing, and takes facts instead of a class of them.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

from lmtrain.errors import PeerLostError, StoppedEarly
from lmtrain.runfolder.names import CHECKPOINTS, STOP, step_names

TYPE_CHECKING = False
if TYPE_CHECKING:  # because: importing typing takes a third of a companion's start
    from typing import Any

DONE = "done"  # the cause of a run that came to its last step
_STARTS_AGAIN = (StoppedEarly.exit_code, PeerLostError.exit_code)


def write(
    folder: str | os.PathLike[str], cause: str, exit_code: int, *, replace: bool, waits: bool = True, **more: Any
) -> None:
    """Write why the run in this folder ends, and from which checkpoint the next start goes on. Raise OSError.

    The rule, whoever writes: what can be read is whole. Of the processes of a run the first that fails is right, as the
    others fail because of it; who speaks for all of them has the last word (`replace`). The disk has the text before
    the file has its name, unless the caller must go on speaking whatever the disk does (`waits`).
    """
    path = os.path.join(folder, STOP)
    if os.path.lexists(path) and not replace:
        return
    names = step_names(os.path.join(folder, CHECKPOINTS))
    facts = {
        "cause": cause, "exit_code": exit_code, "requeue": exit_code in _STARTS_AGAIN, **more,
        "resume": os.path.join(folder, CHECKPOINTS, names[-1]) if names else None,
    }  # fmt: skip
    text = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
    new = os.path.join(folder, f".{STOP}.tmp-{os.urandom(6).hex()}")  # because: all ranks may write at once
    try:
        with open(new, "xb") as file:
            file.write(text.encode(errors="backslashreplace"))  # because: JSON writes half a character so, too
            file.flush()
            if waits:
                os.fsync(file.fileno())
        (os.replace if replace else _put_first)(new, path)
    finally:
        with suppress(OSError):
            os.unlink(new)


def _put_first(new: str, path: str) -> None:
    """Give a file its name, unless another one has it by now."""
    try:
        os.link(new, path)
    except FileExistsError:
        pass
    except OSError:  # because: not every file system has links
        if not os.path.lexists(path):
            os.replace(new, path)
