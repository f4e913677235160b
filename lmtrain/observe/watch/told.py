"""A verdict in words, and as the reason of the run's end. Called by the hub, and by whoever speaks for rank 0."""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def explained(verdict: dict[str, Any]) -> str:
    """A verdict, with where to look and what to do."""
    folder = verdict.get("folder")
    look = f"The stacks of all processes are in {folder}; start" if folder else "Start"
    return f"{verdict['verdict']} {look} the same command again to go on."


def _newest_checkpoint(folder: str) -> str | None:
    """What the next start goes on from, as far as names tell."""
    place = os.path.join(folder, "checkpoints")
    try:
        names = sorted(name for name in os.listdir(place) if name.startswith("step_") and name[5:].isdecimal())
    except OSError:
        return None
    return os.path.join(place, names[-1]) if names else None


def write_stop(folder: str, verdict: dict[str, Any]) -> None:
    """stop.json, unless somebody has told more by now."""
    rank = (verdict.get("ranks") or [0])[0]
    facts = {"cause": explained(verdict), "exit_code": 76, "requeue": True, "rank": rank}
    facts["resume"] = _newest_checkpoint(folder)
    facts |= {"hang": verdict["folder"]} if verdict.get("folder") else {"lost": rank}
    try:
        with open(os.path.join(folder, "stop.json"), "x") as file:
            json.dump(facts, file, indent=2)
    except OSError:
        pass  # because: one that is there already says the same
