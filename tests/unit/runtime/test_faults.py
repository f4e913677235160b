"""Faults on purpose: they strike where and when they are asked to, and never unasked."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmtrain.errors import UsageError
from lmtrain.runtime.processes import fault_injection
from lmtrain.runtime.processes.fault_injection import POINTS, Fault, arm, arm_from_env, fault_point, parse_fault
from tests.marks import wide

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    arm()
    yield
    arm()


def test_requests_are_read() -> None:
    assert parse_fault("kill:point=ckpt.mid_write:count=2") == Fault("kill", "ckpt.mid_write", 2)
    assert parse_fault("exc:point=step:step=7:rank=1") == Fault("exc", "step", 1, 7, 1)
    assert parse_fault("skip:point=collective:restart=0") == Fault("skip", "collective", restart=0)


def test_every_point_is_passed_somewhere() -> None:
    code = "".join(file.read_text() for room in ("lmtrain", "data_tools") for file in (ROOT / room).rglob("*.py"))
    code = code.replace((ROOT / "lmtrain/runtime/processes/fault_injection.py").read_text(), "")
    assert [point for point in POINTS if f'"{point}"' not in code] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kil:point=step", r"the unknown action 'kil'\. Did you mean kill\?"),
        ("kill", "needs a point"),
        ("kill:point=ckpt.mid_writ", r"Did you mean ckpt\.mid_write\?"),
        ("kill:point=step:count=0", "a count of at least 1"),
        ("kill:point=step:count=-1", "wrong condition"),
        ("kill:point=step:when=now", "wrong condition 'when=now'"),
        ("skip:point=step", r"'point=step'\. Known: collective, pipeline\.message"),
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


def test_points_within_a_step_know_which_it_is() -> None:
    arm(Fault("exc", "forward", step=2), Fault("skip", "collective", count=2, step=1))
    skipped = []
    for step in (0, 1):
        fault_point("step", step)
        fault_point("forward")
        skipped += [fault_point("collective") for _ in range(3)]
    assert skipped == [False, False, False, False, True, False]
    fault_point("step", 2)
    with pytest.raises(RuntimeError, match="fault at forward"):
        fault_point("forward")


def test_each_start_of_a_launcher_can_have_a_fault_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMTRAIN_ALLOW_FAULTS", "1")
    monkeypatch.setenv("LMTRAIN_FAULT", "exc:point=step:restart=1,enospc:point=backward:restart=0")
    arm_from_env()
    fault_point("step")
    with pytest.raises(OSError, match="fault at backward"):
        fault_point("backward")


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
    monkeypatch.setattr(fault_injection, "_is_env_read", False)
    with pytest.raises(UsageError):
        fault_point("step")


SCRIPT = """
from lmtrain.runtime.processes.fault_injection import fault_point
for i in range(9): print(i, flush=True); fault_point('step')
"""


def struck_by(action: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "LMTRAIN_FAULT": f"{action}:point=step:count=3", "LMTRAIN_ALLOW_FAULTS": "1"}
    return subprocess.Popen([sys.executable, "-c", SCRIPT], env=environ, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("action", "code"),
    [
        ("kill", -signal.SIGKILL),
        ("exit", 1),
        *wide(
            ("segv", -signal.SIGSEGV),
            ("abort", -signal.SIGABRT),
            ("term", -signal.SIGTERM),
            ("usr1", -signal.SIGUSR1),
            ("usr2", -signal.SIGUSR2),
        ),
    ],
)
def test_a_process_ends_at_its_point(action: str, code: int) -> None:
    process = struck_by(action)
    assert process.communicate(timeout=60)[0].split() == ["0", "1", "2"]
    assert process.returncode == code


@pytest.mark.parametrize("action", ["gil", *wide("loop", "stop")])
def test_a_process_stands_still_at_its_point(action: str) -> None:
    process = struck_by(action)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
    if action == "stop":
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    process.kill()
    assert process.communicate(timeout=60)[0] == ""
