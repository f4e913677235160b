"""What `start` gives is `python -m lmtrain`, though it is forked: output, exit codes, signals and the environment."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.forking import Forked, forked
from tests.cli.harness import Toy, start
from tests.conftest import ENVIRONMENT, restore_environment

pytestmark = pytest.mark.wide  # because: a server of forks takes seconds to start, and many tests of kills rely on it


@pytest.mark.parametrize("words", [["--version"], ["pretrain", "optim.lrr=1"], ["eval", "nowhere"]])
def test_a_fork_says_and_ends_with_what_a_process_of_its_own_does(words: list[str]) -> None:
    found = []
    for fresh in (False, True):
        process = start(*words, fresh=fresh)
        assert isinstance(process, Forked) is not fresh
        found.append((process.communicate(timeout=120), process.returncode))
    assert found[0] == found[1]


def test_a_signal_ends_it(toy: Toy, tmp_path: Path) -> None:
    fault = {"LMTRAIN_FAULT": "stop:point=start.imports", "LMTRAIN_ALLOW_FAULTS": "1"}
    process = start("pretrain", *toy.settings(tmp_path / "run"), env=fault)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "OMP_NUM_THREADS", "TMPDIR"])
def test_what_is_read_before_the_command_starts_needs_a_process_of_its_own(name: str, tmp_path: Path) -> None:
    value = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2", "TMPDIR": str(tmp_path)}[name]
    assert forked(["--version"], {**os.environ, name: value}, subprocess.PIPE) is None


def test_variables_that_a_command_or_an_import_sets_cost_later_tests_no_fork() -> None:
    names = next(iter(ENVIRONMENT)), "TORCHINDUCTOR_CACHE_DIR"
    del os.environ[names[0]]
    os.environ |= {names[1]: "set when torch's compiler is imported, as collection does"}
    assert any(os.environ.get(name) != ENVIRONMENT.get(name) for name in names)
    restore_environment()
    assert {name: os.environ.get(name) for name in names} == {name: ENVIRONMENT.get(name) for name in names}


def test_another_folder_needs_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start("--version").communicate(timeout=60)
    monkeypatch.chdir(tmp_path)
    assert forked(["--version"], os.environ, subprocess.PIPE) is None
