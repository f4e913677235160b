"""Faults on purpose, so that tests can break a run at an exact place. Called at the points named below.

LMTRAIN_FAULT="kill:point=ckpt.mid_write:count=2" dies when that point is passed for the second time. Further
conditions: `step=7`, the step that is being computed, from 0; `rank=1`; `restart=1`, how often the launcher has begun
again. Several faults are divided by commas. Without LMTRAIN_ALLOW_FAULTS=1 the variable is refused, so that no fault
that was left behind in a shell can end a real run.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import deque
from dataclasses import dataclass
from itertools import repeat

from lmtrain.errors import UsageError, spelling_hint
from lmtrain.runtime.processes.process import ProcessEnv, fault_request

_SIGNALS = {
    "kill": signal.SIGKILL, "stop": signal.SIGSTOP, "abort": signal.SIGABRT, "segv": signal.SIGSEGV,
    "term": signal.SIGTERM, "int": signal.SIGINT, "usr1": signal.SIGUSR1, "usr2": signal.SIGUSR2,
}  # fmt: skip
ACTIONS = (*_SIGNALS, "exc", "enospc", "exit", "loop", "gil", "skip")
POINTS = (
    "start.imports", "start.rendezvous", "start.folder", "start.build", "start.load", "start.loop",
    "data.next", "step", "forward", "backward", "pipeline.message", "grad_reduce", "collective", "opt_step",
    "valid.batch", "eval.batch", "eval.journal", "shutdown",
    "ckpt.begin", "ckpt.mid_write", "ckpt.read_back", "ckpt.before_manifest", "ckpt.before_rename", "ckpt.mid_replace",
    "ckpt.after_rename", "ckpt.prune", "data.slice", "data.journal", "data.finish", "data.publish",
    "reshard.segment", "reshard.journal", "reshard.finish", "reshard.publish", "reshard.cleanup",
)  # fmt: skip
SKIPPED = ("collective", "pipeline.message")  # where `skip` is heeded


@dataclass
class Fault:
    """One fault that strikes once, at the `count`-th passing of its point."""

    action: str
    point: str
    count: int = 1
    step: int | None = None
    rank: int | None = None
    restart: int | None = None


_faults: list[Fault] = []
_asked = False  # whether the environment has been read
_step: int | None = None  # that is being computed


def fault_point(name: str, step: int | None = None) -> bool:
    """Mark a place where a fault may strike; costs next to nothing when none is asked for.

    True where the caller is to leave out what it is about to do, as a faulty rank would.
    """
    return bool(_faults or not _asked) and _pass(name, step)


def arm(*faults: Fault | None) -> None:
    """Set or clear the faults, whatever the environment says."""
    global _faults, _asked, _step
    _faults, _asked, _step = [fault for fault in faults if fault is not None], True, None


def arm_from_env() -> None:
    """Read the environment now: called at the start of a run, so that a wrong request is refused before step 0."""
    text, allowed = fault_request()
    if text is None:
        return arm()
    if not allowed:
        raise UsageError(
            f"LMTRAIN_FAULT={text} asks for a fault and faults are not allowed here. "
            "Unset LMTRAIN_FAULT, or set LMTRAIN_ALLOW_FAULTS=1 in a test."
        )
    here = ProcessEnv.detect()
    return arm(*(
        one for one in map(parse_fault, text.split(","))
        if one.rank in (None, here.rank) and one.restart in (None, here.num_restarts)
    ))  # fmt: skip


def parse_fault(text: str) -> Fault:
    action, *conditions = text.split(":")
    if action not in ACTIONS:
        raise UsageError(f"LMTRAIN_FAULT={text} has no known action {action!r}. {spelling_hint(action, ACTIONS)}")
    points = SKIPPED if action == "skip" else POINTS
    fault = Fault(action, "")
    for condition in conditions:
        key, _, value = condition.partition("=")
        if key == "point" and value in points:
            fault.point = value
        elif key in ("count", "step", "rank", "restart") and value.isdecimal():
            setattr(fault, key, int(value))
        else:
            known = ("point=NAME", "count=N", "step=N", "rank=N", "restart=N")
            way_out = spelling_hint(value, points) if key == "point" else spelling_hint(condition, known)
            raise UsageError(f"LMTRAIN_FAULT={text} has the wrong condition {condition!r}. {way_out}")
    if not fault.point or fault.count < 1:
        raise UsageError(
            f"LMTRAIN_FAULT={text} names no point or a count below 1. Use {action}:point={points[-1]}:count=1."
        )
    return fault


def _pass(name: str, step: int | None) -> bool:
    global _step
    if not _asked:
        arm_from_env()
    if name == "step":
        _step = step
    passed = [one for one in _faults if one.point == name and one.step in (None, _step if step is None else step)]
    for fault in passed:
        fault.count -= 1
    for fault in passed:
        if fault.count == 0:
            _faults.remove(fault)
            return _strike(fault.action, name)
    return False


def _strike(action: str, name: str) -> bool:
    os.write(2, f"fault: {action} at {name}\n".encode())  # because: what is buffered would not survive it
    if action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[action])
        return False
    if action == "exit":
        os._exit(1)  # because: in a thread SystemExit would end that thread alone
    while action == "loop":
        pass
    if action == "gil":
        # because: a loop of C without an end, which neither yields the interpreter's lock nor hears signals
        deque(repeat(None), maxlen=0)
    if action == "enospc":
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (fault at {name})")
    if action == "exc":
        raise RuntimeError(f"fault at {name}")
    return True
