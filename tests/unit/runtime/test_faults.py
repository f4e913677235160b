"""Faults on purpose: they strike where and when they are asked to, and never unasked."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lmtrain.errors import UsageError
from lmtrain.runtime import faults
from lmtrain.runtime.faults import Fault, arm, arm_from_env, fault_point, parse_fault


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    arm(None)
    yield
    arm(None)


def test_requests_are_read() -> None:
    assert parse_fault("kill:point=ckpt.mid_write:count=2") == Fault("kill", "ckpt.mid_write", 2)
    assert parse_fault("exc:point=step:step=7:rank=1") == Fault("exc", "step", 1, 7, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kil:point=step", r"no known action 'kil'\. Did you mean kill\?"),
        ("kill", "names no point"),
        ("kill:point=ckpt.mid_writ", r"Did you mean ckpt\.mid_write\?"),
        ("kill:point=step:count=0", "count below 1"),
        ("kill:point=step:count=-1", "wrong condition"),
        ("kill:point=step:when=now", "wrong condition 'when=now'"),
    ],
)
def test_wrong_requests_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_fault(text)


def test_a_fault_strikes_once_at_its_count() -> None:
    arm(Fault("exc", "forward", count=3))
    for name in ("forward", "backward", "forward", "step"):
        fault_point(name)
    with pytest.raises(RuntimeError, match="fault at forward"):
        fault_point("forward")
    fault_point("forward")


def test_a_fault_waits_for_its_step() -> None:
    arm(Fault("enospc", "step", step=2))
    for step in (0, 1, 3):
        fault_point("step", step)
    with pytest.raises(OSError, match="fault at step") as caught:
        fault_point("step", 2)
    assert caught.value.errno == errno.ENOSPC


def test_a_fault_of_another_rank_is_not_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMTRAIN_ALLOW_FAULTS", "1")
    monkeypatch.setenv("LMTRAIN_FAULT", "exc:point=step:rank=1")
    arm_from_env()
    fault_point("step")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    arm_from_env()
    with pytest.raises(RuntimeError):
        fault_point("step")


def test_a_fault_that_is_not_allowed_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMTRAIN_FAULT", "kill:point=step")
    monkeypatch.delenv("LMTRAIN_ALLOW_FAULTS", raising=False)
    with pytest.raises(UsageError, match="faults are not allowed here"):
        arm_from_env()
    # a caller that never asked at the start meets the refusal at the first point
    monkeypatch.setattr(faults, "_asked", False)
    with pytest.raises(UsageError):
        fault_point("step")


def test_a_process_is_killed_at_its_point() -> None:
    script = (
        "from lmtrain.runtime.faults import fault_point\nfor i in range(9): print(i, flush=True); fault_point('step')"
    )
    environ = {**os.environ, "LMTRAIN_FAULT": "kill:point=step:count=3", "LMTRAIN_ALLOW_FAULTS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["0", "1", "2"]
