"""A verdict in words, and as the reason of the run's end. Called by the hub, and by whoever speaks for rank 0."""

from __future__ import annotations

from contextlib import suppress

from lmtrain.errors import PeerLostError
from lmtrain.runfolder import stop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def explained(verdict: dict[str, Any]) -> str:
    """Return a verdict with where to look and what to do."""
    folder = verdict.get("folder")
    look = f"The stacks of all processes are in {folder}; start" if folder else "Start"
    return f"{verdict['verdict']} {look} the same command again to go on."


def write_stop(folder: str, verdict: dict[str, Any]) -> None:
    """Write the verdict into stop.json, unless somebody has told more by now."""
    rank, stacks = (verdict.get("ranks") or [0])[0], verdict.get("folder")
    where = {"rank": rank, "hang": stacks} if stacks else {"rank": rank, "lost": rank}
    with suppress(OSError):  # because: a disk that fails must not keep the processes from being ended
        stop.write(folder, explained(verdict), PeerLostError.exit_code, replace=False, waits=False, **where)
