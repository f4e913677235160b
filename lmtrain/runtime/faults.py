"""Faults on purpose, so that tests can kill a run at an exact place. Called at the points named below.

LMTRAIN_FAULT="kill:point=ckpt.mid_write:count=2" dies when that point is passed for the second time. Further
conditions: `step=7` and `rank=1`. Without LMTRAIN_ALLOW_FAULTS=1 the variable is refused, so that no fault that was
left behind in a shell can end a real run.
"""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass

from lmtrain.errors import UsageError, nearest
from lmtrain.runtime.process import ProcessEnv, fault_request

ACTIONS = ("kill", "exc", "enospc")
POINTS = (
    "step", "forward", "backward", "opt_step", "data.next",
    "ckpt.begin", "ckpt.mid_write", "ckpt.read_back", "ckpt.before_manifest", "ckpt.before_rename", "ckpt.mid_replace",
    "ckpt.after_rename", "ckpt.prune", "data.slice", "data.journal", "data.finish", "data.publish",
    "reshard.segment", "reshard.journal", "reshard.finish", "reshard.publish", "reshard.cleanup",
    "eval.batch", "eval.journal",
)  # fmt: skip


@dataclass
class Fault:
    """One fault that strikes once, at the `count`-th passing of its point."""

    action: str
    point: str
    count: int = 1
    step: int | None = None
    rank: int | None = None


_fault: Fault | None = None
_asked = False  # whether the environment has been read


def fault_point(name: str, step: int | None = None) -> None:
    """Mark a place where a fault may strike; costs next to nothing when none is asked for."""
    if _fault is not None or not _asked:
        _pass(name, step)


def arm(fault: Fault | None) -> None:
    """Set or clear the fault, whatever the environment says."""
    global _fault, _asked
    _fault, _asked = fault, True


def arm_from_env() -> None:
    """Read the environment now: called at the start of a run, so that a wrong request is refused before step 0."""
    text, allowed = fault_request()
    if text is None:
        return arm(None)
    if not allowed:
        raise UsageError(
            f"LMTRAIN_FAULT={text} asks for a fault and faults are not allowed here. "
            "Unset LMTRAIN_FAULT, or set LMTRAIN_ALLOW_FAULTS=1 in a test."
        )
    fault = parse_fault(text)
    return arm(fault if fault.rank in (None, ProcessEnv.detect().rank) else None)


def parse_fault(text: str) -> Fault:
    action, *conditions = text.split(":")
    if action not in ACTIONS:
        raise UsageError(f"LMTRAIN_FAULT={text} has no known action {action!r}. {nearest(action, ACTIONS)}")
    fault = Fault(action, "")
    for condition in conditions:
        key, _, value = condition.partition("=")
        if key == "point" and value in POINTS:
            fault.point = value
        elif key in ("count", "step", "rank") and value.isdecimal():
            setattr(fault, key, int(value))
        else:
            known = POINTS if key == "point" else ("point=NAME", "count=N", "step=N", "rank=N")
            wrong = value if key == "point" else condition
            raise UsageError(f"LMTRAIN_FAULT={text} has the wrong condition {condition!r}. {nearest(wrong, known)}")
    if not fault.point or fault.count < 1:
        raise UsageError(f"LMTRAIN_FAULT={text} names no point or a count below 1. Use {action}:point=step:count=1.")
    return fault


def _pass(name: str, step: int | None) -> None:
    if not _asked:
        arm_from_env()
    fault = _fault
    if fault is None or fault.point != name or fault.step not in (None, step):
        return
    fault.count -= 1
    if fault.count > 0:
        return
    arm(None)
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.action == "enospc":
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (fault at {name})")
    raise RuntimeError(f"fault at {name}")
