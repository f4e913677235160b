"""Fault injection: tests break a run at an exact place. Called at the points listed below.

LMTRAIN_FAULT="kill:point=ckpt.mid_write:count=2" kills the process when it passes that point for the second time.
Further conditions: `step=7`, the step being computed, from 0; `rank=1`; `restart=1`, how often the launcher has
restarted the ranks. Commas separate several faults. Without LMTRAIN_ALLOW_FAULTS=1 the variable is refused, so that a
variable left over in a shell cannot end a real run.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import deque
from dataclasses import dataclass
from itertools import repeat

from lmtrain.errors import UsageError, spelling_hint
from lmtrain.runtime.processes.process_environment import ProcessEnv, fault_request

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
    "text.tokenizer", "text.dataset", "text.record",
    "exchange.part", "exchange.publish",
    "reshard.segment", "reshard.journal", "reshard.finish", "reshard.publish", "reshard.cleanup",
)  # fmt: skip
SKIPPABLE_POINTS = ("collective", "pipeline.message")  # the points at which the action `skip` has an effect


@dataclass
class Fault:
    """A fault that a test injects once: at the `count`-th time that its point is reached and its conditions hold."""

    action: str
    point: str
    count: int = 1
    step: int | None = None
    rank: int | None = None
    restart: int | None = None


_faults: list[Fault] = []
_is_env_read = False
_current_step: int | None = None  # the step that is being computed


def fault_point(name: str, step: int | None = None) -> bool:
    """Mark a place where an injected fault may strike; nearly free if none is set.

    Return True if the caller must skip its next action, as a faulty rank would (the action `skip`). `step` is the step
    that the place belongs to, by default the one being computed.
    """
    return bool(_faults or not _is_env_read) and _count_pass(name, step)


def arm(*faults: Fault) -> None:
    """Replace the faults of this process by these; without arguments, clear them. LMTRAIN_FAULT is ignored from now on.
    """
    global _faults, _is_env_read, _current_step
    _faults, _is_env_read, _current_step = list(faults), True, None


def arm_from_env() -> None:
    """Set the faults that a test wants injected into this process: those of the variable LMTRAIN_FAULT that are meant
    for this rank and this restart, none if it is not set. Raise UsageError if it is malformed, or if faults are not
    allowed.

    Called at the start of a run, so that a wrong variable fails before step 0.
    """
    text, allowed = fault_request()
    if text is None:
        return arm()
    if not allowed:
        raise UsageError(
            f"LMTRAIN_FAULT={text} asks for an injected fault, but faults are not allowed here. "
            "Unset LMTRAIN_FAULT, or set LMTRAIN_ALLOW_FAULTS=1 in a test."
        )
    process = ProcessEnv.detect()
    return arm(*(
        fault for fault in map(parse_fault, text.split(","))
        if fault.rank in (None, process.rank) and fault.restart in (None, process.num_restarts)
    ))  # fmt: skip


def parse_fault(text: str) -> Fault:
    """Parse a fault to inject, such as "kill:point=step:count=2" in LMTRAIN_FAULT; raise UsageError if it is malformed.
    """
    action, *conditions = text.split(":")
    if action not in ACTIONS:
        raise UsageError(f"LMTRAIN_FAULT={text} has the unknown action {action!r}. {spelling_hint(action, ACTIONS)}")
    points = SKIPPABLE_POINTS if action == "skip" else POINTS
    fault = Fault(action, "")
    for condition in conditions:
        key, _, value = condition.partition("=")
        if key == "point" and value in points:
            fault.point = value
        elif key in ("count", "step", "rank", "restart") and value.isdecimal():
            setattr(fault, key, int(value))
        else:
            forms = ("point=NAME", "count=N", "step=N", "rank=N", "restart=N")
            way_out = spelling_hint(value, points) if key == "point" else spelling_hint(condition, forms)
            raise UsageError(f"LMTRAIN_FAULT={text} has the wrong condition {condition!r}. {way_out}")
    if not fault.point or fault.count < 1:
        raise UsageError(
            f"LMTRAIN_FAULT={text} needs a point and a count of at least 1. Use {action}:point={points[-1]}:count=1."
        )
    return fault


def _count_pass(name: str, step: int | None) -> bool:
    """Count that this process reaches the fault point `name` (see POINTS), and inject a fault whose count this reaches.
    `step` is the training step of the point, None for the current step. Return True if the caller must skip its next
    action.
    """
    global _current_step
    if not _is_env_read:
        arm_from_env()
    if name == "step":
        _current_step = step
    step = _current_step if step is None else step
    matching = [fault for fault in _faults if fault.point == name and fault.step in (None, step)]
    for fault in matching:
        fault.count -= 1
    for fault in matching:
        if fault.count == 0:
            _faults.remove(fault)
            return _trigger(fault.action, name)
    return False


def _trigger(action: str, name: str) -> bool:
    """Inject a fault: carry out `action`, one of ACTIONS, at the fault point `name`. Return True for the action `skip`,
    and False after a signal that this process survives; the other actions raise or never return.
    """
    os.write(2, f"fault: {action} at {name}\n".encode())  # because: buffered output would be lost with the process
    if action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[action])
        return False
    if action == "exit":
        os._exit(1)  # because: in a thread SystemExit would end that thread alone
    while action == "loop":
        pass
    if action == "gil":
        # because: an endless loop in C neither yields the interpreter's lock nor lets Python handle signals
        deque(repeat(None), maxlen=0)
    if action == "enospc":
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (fault at {name})")
    if action == "exc":
        raise RuntimeError(f"fault at {name}")
    return True
