"""`lmtrain.pretrain` is the command in a process of its own: its run, its lines, its errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import assert_type

import pytest

import lmtrain
from lmtrain.api.pretrain import _error_of
from lmtrain.errors import DataError, MissingInputError, NonFiniteLossError, SettingsError, StoppedEarly
from tests.cli.harness import Toy


@pytest.mark.wide
def test_it_trains_goes_on_and_says_what_fails(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(word) for word in toy.settings(tmp_path / "run", train__steps=4)]
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    metrics = lmtrain.pretrain(*words)
    assert_type(metrics, lmtrain.Metrics)
    assert metrics.path == tmp_path / "run"
    assert metrics["step"].tolist() == [1, 2, 3, 4]
    assert "done: 4 steps" in capsys.readouterr().out
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert lmtrain.pretrain("train.steps=6", from_run=tmp_path / "run")["step"].tolist()[-1] == 6
    assert json.loads((tmp_path / "run" / "config.json").read_text())["train"]["steps"] == 6
    with pytest.raises(MissingInputError, match="nowhere") as missing:
        lmtrain.pretrain(
            *(word for word in words if not word.startswith(("data.path=", "run.dir="))),
            f"data.path={tmp_path / 'nowhere'}", f"run.dir={tmp_path / 'other'}",
        )  # fmt: skip
    assert "Type:" not in str(missing.value)
    assert not (tmp_path / "other").exists()


@pytest.mark.wide
def test_an_interrupt_ends_a_run_that_has_saved(toy: Toy, tmp_path: Path) -> None:
    words = [str(word) for word in toy.settings(tmp_path / "run", train__steps=100_000)]
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"import lmtrain; lmtrain.pretrain(*{words})"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True) as run:
        assert run.stdout is not None
        next(line for line in run.stdout if line.startswith("step "))
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
    assert said.rstrip().endswith("KeyboardInterrupt")
    stopped = json.loads((tmp_path / "run" / "stop.json").read_text())
    assert (stopped["exit_code"], Path(stopped["resume"]).is_dir()) == (75, True)


def test_wrong_settings_are_refused_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(SettingsError) as error:
        lmtrain.pretrain("data.path=x", "optim.lrr=1", "model.num_heads=5")
    assert len(error.value.problems) == 2


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (65, DataError), (66, MissingInputError), (75, StoppedEarly), (86, NonFiniteLossError),
        (-9, lmtrain.LmtrainError),
    ],
)  # fmt: skip
def test_the_exception_of_an_exit_code(code: int, kind: type[lmtrain.LmtrainError]) -> None:
    error = _error_of(code, "")
    assert type(error) is kind
    assert (error.exit_code, str(error)) == (code, f"The run ended with exit code {code}.")
