"""`pretrain -m`: folders that can be typed back, a table in the end, and a sweep that goes on where it stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmtrain.cli.pretrain.print_sweep import sweep_views
from lmtrain.config.compose_run_settings import compose_plain
from lmtrain.config.settings_file import expand_settings_file
from lmtrain.errors import StoppedEarly
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.runtime.processes.stop_signals import STOPS, install_stop_handlers
from lmtrain.start.settings_from_earlier_run import RunRequest
from lmtrain.start.sweep_runs import SweepRun, is_finished, options_for_runs, plan_runs, run_folder_name, run_sweep
from tests.cli.harness import Toy, lmtrain, start

NAMES: dict[str, dict[str, str]] = {
    "optim.lr_1e-06__train.seed_2": {"optim.lr": "1e-06", "train.seed": "2"},
    "model_gpt_tiny": {"model": "gpt_tiny"},
    "optim.betas_0.9_0.95__data.path_data_a_b": {"optim.betas": "[0.9,0.95]", "data.path": "data/a b"},
    "data.index_dir_empty": {"data.index_dir": "''"},
    "optim.lr_-1": {"optim.lr": "-1"},
}
# of every group that decides what is trained, a setting that is not as it was
OTHERS = {
    "train.steps": 5, "schedule.warmup_steps": 7, "precision.kind": "bf16", "parallel.dp_shard": 2, "model.width": 64,
    "optim.weight_decay": 0.3, "data.split": [9, 1], "recompute.kind": "full", "compute.deterministic": True,
}  # fmt: skip


def test_names_can_be_typed_back() -> None:
    assert {name: run_folder_name(changed) for name, changed in NAMES.items()} == {name: name for name in NAMES}
    path = "/".join(NAMES)
    assert compose_plain([f"run.dir={path}"])["run"]["dir"] == path


def test_long_names_are_cut_and_stay_apart() -> None:
    names = {run_folder_name({"data.path": "x" * 300 + end}) for end in "ab"}
    assert len(names) == 2
    assert max(map(len, names)) < 140


def jobs(*overrides: str) -> list[SweepRun]:
    return plan_runs(RunRequest(["data.path=x", *overrides]))


@pytest.mark.wide
def test_each_combination_once_in_a_folder_of_its_own(tmp_path: Path) -> None:
    made = jobs(f"run.dir={tmp_path}", "optim.lr=1e-4", "model.width=128,256,128", "train.seed=1,2")
    assert [job.folder.name for job in made] == [
        f"model.width_{width}__train.seed_{seed}" for width in (128, 256) for seed in (1, 2)
    ]


def test_runs_get_the_settings_of_a_file_and_not_the_file(tmp_path: Path) -> None:
    """because: the file may be changed before the last run starts"""
    file = tmp_path / "mine.yaml"
    file.write_text("train.seed: 3\noptim: {lr: 1}\n")
    typed = [str(file), "optim.lr=2,3", "data.path=x", f"run.dir={tmp_path}/runs"]
    words = expand_settings_file(typed) or []
    assert options_for_runs(["pretrain", "-m", *typed, "--json"], words) == ["--json"]
    made = plan_runs(RunRequest(words))
    assert [job.folder.name for job in made] == ["optim.lr_2", "optim.lr_3"]
    assert [job.overrides[:2] for job in made] == [["train.seed=3", f"optim.lr={lr}"] for lr in (2, 3)]


def test_names_that_would_be_one_are_numbered(tmp_path: Path) -> None:
    made = jobs(f"run.dir={tmp_path}", "data.tokenizer=a/b,a_b,a:b")
    assert [job.folder.name for job in made] == [f"data.tokenizer_a_b{end}" for end in ("", "__2", "__3")]


@pytest.mark.wide
def test_one_folder_for_one_run_and_those_that_are_given() -> None:
    assert [job.folder for job in jobs("run.dir=a,b")] == [Path("a"), Path("b")]
    assert jobs("run.dir=a", "optim.lr=1e-4")[0].folder == Path("a")


def test_a_sweep_of_an_earlier_version_goes_on_in_its_folders(tmp_path: Path) -> None:
    (tmp_path / "optim.lr=0.0001").mkdir()
    made = jobs(f"run.dir={tmp_path}", "optim.lr=1e-4,2e-4")
    assert made[0].folder.name == "optim.lr=0.0001"
    assert made[1].folder.name == "optim.lr_0.0002"
    assert made[0].overrides[-1] == f"run.dir='{made[0].folder}'"


def test_done_is_what_has_ended_with_these_settings(tmp_path: Path) -> None:
    (job, _) = jobs(f"run.dir={tmp_path}", "optim.lr=1e-4,2e-4")
    assert not is_finished(job)
    job.folder.mkdir()
    then = job.config.to_dict() | {"run": {"dir": str(job.folder)}}
    then["model"]["vocab_size"] = 400
    (job.folder / "config.json").write_text(json.dumps(then))
    (job.folder / "stop.json").write_text(json.dumps({"cause": "SIGTERM", "exit_code": 75}))
    assert not is_finished(job)
    (job.folder / "stop.json").write_text(json.dumps({"cause": "done", "exit_code": 0}))
    assert is_finished(job)
    for key, value in OTHERS.items():
        group, _, name = key.partition(".")
        (job.folder / "config.json").write_text(json.dumps(then | {group: then[group] | {name: value}}))
        assert not is_finished(job), key


@pytest.mark.wide
def test_all_are_refused_before_one_starts(tmp_path: Path) -> None:
    words = ["pretrain", "-m", "data.path=x", f"run.dir={tmp_path / 'a'}", "optim.lr=1,-1"]
    assert "optim.lr=-1" in lmtrain(*words, code=2)
    assert not (tmp_path / "a").exists()


@pytest.mark.wide
def test_a_dry_run_tells_of_other_runs_what_sets_them_apart(toy: Toy, tmp_path: Path) -> None:
    words = ["pretrain", "-m", *toy.settings(tmp_path / "s"), "--dry-run", "model.width=32,64", "optim.lr=1e-3,2e-3"]
    with start(*words) as process:
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    _, one, same, wide, _ = re.split(r"run \d of 4: .*\n", output)
    assert all(part in one for part in ("training samples", "layout", "rank host layers params weights"))
    assert same == "in numbers as the first one\n"
    assert re.findall(r"^parameters|^model flops|^rank", wide, re.MULTILINE) == ["parameters", "model flops", "rank"]
    assert "training samples" not in wide
    assert not (tmp_path / "s").exists()


@pytest.mark.wide
def test_a_sweep_with_a_failure_its_table_and_its_second_try(toy: Toy, tmp_path: Path) -> None:
    settings = toy.settings(tmp_path / "s", train__steps=4, train__valid_interval_steps=2, train__valid_samples=2)
    settings = [one for one in settings if not one.startswith("optim.lr")]
    sweep = ["pretrain", "-m", *settings, "optim.clip_norm=null"]
    with start(*sweep, "optim.lr=1e-3,1e18", "--json") as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 86
    rows = json.loads(next(line for line in output.splitlines() if line.startswith('{"runs"')))["runs"]
    assert rows == json.loads((tmp_path / "s/sweep.json").read_text())["runs"]
    assert [row["state"] for row in rows] == ["done", "failed, exit code 86"]
    assert rows[0]["settings"] == {"optim.lr": "0.001"}
    assert rows[0]["steps"] == 4
    assert 0 < rows[0]["best_valid_loss"] < 7
    assert rows[0]["tokens_per_s"] > 0
    assert "1 of 2 runs failed" in output
    with start(*sweep, "optim.lr=1e-3,2e-3") as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert output.count("which is done") == 1
    assert "best validation: " in output
    assert "optim.lr  state" in output


@pytest.mark.wide
def test_ctrl_c_lets_the_run_save_and_ends_the_sweep(toy: Toy, tmp_path: Path) -> None:
    settings = toy.settings(tmp_path / "s", train__steps=100_000, checkpoint__interval_steps=0)
    with start("pretrain", "-m", *settings, "train.seed=1,2") as process:
        deadline = time.monotonic() + 120
        first = tmp_path / "s/train.seed_1/metrics.jsonl"
        while time.monotonic() < deadline and not (first.exists() and '"step": 3' in first.read_text()):
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert list((tmp_path / "s/train.seed_1/checkpoints").glob("step_*"))
    assert not (tmp_path / "s/train.seed_2").exists()
    assert "not begun" in output


class Asks(list[str]):
    """Words: whoever reads them is asked to stop by then."""

    def __iter__(self) -> Iterator[str]:
        os.kill(os.getpid(), signal.SIGUSR1)
        return super().__iter__()


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals that would have ended the process."""
    got: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: got.append(number)) for number in STOPS}
    yield got
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_layout_that_does_not_fit_is_refused_once_before_the_first_run(tmp_path: Path) -> None:
    words = ["data.path=nowhere", f"run.dir={tmp_path / 's'}", "parallel.dp_shard=2", "train.seed=1,2"]
    said = lmtrain("pretrain", "-m", *words, code=78)
    assert said.count("1 process was started but parallel.dp_shard=2 needs 2.") == 1
    assert "run 1 of 2" not in said


def test_a_stop_before_the_first_run_is_one(tmp_path: Path, heard: list[int]) -> None:
    words = [f"run.dir={tmp_path / 's'}", "data.path=nowhere", "train.seed=1,2"]
    with pytest.raises(StoppedEarly, match="The sweep was stopped by SIGUSR1"):
        run_sweep(["pretrain"], RunRequest(Asks(words)), ProcessEnv.detect(), sweep_views(as_json=False))
    install_stop_handlers()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert "The sweep was stopped by SIGUSR1" in lmtrain("pretrain", "-m", *words, code=75)
    assert heard == []
    assert not (tmp_path / "s").exists()
