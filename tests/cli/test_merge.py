"""`lmtrain merge` as users type it: a run's checkpoints become one, which is used like any other; what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.observe.metrics import read_metrics
from lmtrain.runfolder.lineage import read_lineage
from tests.cli.harness import Toy, lmtrain, start

LONGER: dict[str, Any] = {"train__steps": 16}


@pytest.fixture(scope="module")
def run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 4, 8 and 12, of which the last has a lower learning rate."""
    folder = tmp_path_factory.mktemp("trunk") / "run"
    lmtrain("pretrain", *toy.settings(folder, checkpoint__keep_last=3))
    return folder


@pytest.fixture(scope="module")
def merged(run: Path) -> Path:
    output = lmtrain("merge", "--last", 3, "--of", run, "--output", run.parent / "merged", "--mean", "linear")
    assert "warning: the learning rates of the checkpoints differ: 0.00" in output
    assert f"parent 1        weight 0.1667, step 4, {run}/checkpoints/step_00000004" in output
    return run.parent / "merged"


@pytest.mark.wide
def test_the_result_is_used_like_any_checkpoint(run: Path, merged: Path, tmp_path: Path) -> None:
    assert "all is well: step 12" in lmtrain("verify", merged)
    lmtrain("reshard", merged, "--to", "tp=2", "--output", tmp_path / "two")
    assert json.loads(lmtrain("inspect", merged, "--diff", tmp_path / "two", "--json"))["same_tensors"]
    lmtrain("generate", merged, "--prompt", "The", "--max-new-tokens", 4)
    lmtrain("export", merged, "--to", "hf", "--output", tmp_path / "hf")
    text = tmp_path / "held.txt"
    text.write_text("All of it was read before.\n" * 20)
    lmtrain("eval", merged, "--task", "perplexity", "--data", text)


@pytest.mark.wide
def test_a_run_goes_on_from_it(toy: Toy, run: Path, merged: Path, tmp_path: Path) -> None:
    """The run takes the newest checkpoint's moments and count of updates, so that Adam's bias correction goes on."""
    settings = toy.settings(tmp_path / "next", **LONGER)
    lmtrain("pretrain", *settings, f"checkpoint.resume={merged}")
    steps = [row["step"] for row in read_metrics(tmp_path / "next" / "metrics.jsonl") if row["event"] == "step"]
    assert steps == [13, 14, 15, 16]
    assert [(parent.kind, parent.step) for parent in read_lineage(tmp_path / "next")] == [("merge", 12), ("run", 12)]
    state = CheckpointReader(tmp_path / "next" / "checkpoints" / "step_00000016").state
    assert state["optimizer"]["num_updates"] == 16
    assert "merged" not in state
    # a merge of the run and of the checkpoint that it began from has a common ancestor
    paths = run / "checkpoints" / "step_00000008", tmp_path / "next"
    output = lmtrain("merge", *paths, "--output", tmp_path / "both", "--json")
    facts = json.loads(output[output.index("{") :])
    assert [parent["step"] for parent in facts["parents"]] == [8, 16]


@pytest.mark.wide
def test_a_branch_begins_from_a_merge_in_the_runs_folder(run: Path, tmp_path: Path) -> None:
    lmtrain("merge", "--last", 2, "--of", run, "--output", run / "merged")
    assert "all is well: step 12" in lmtrain("verify", run / "merged")
    lmtrain("pretrain", "--from-run", run / "merged", f"run.dir={tmp_path}/next", "train.steps=14")
    assert [parent.kind for parent in read_lineage(tmp_path / "next")] == ["merge", "run"]


@pytest.mark.wide
def test_imports_merge_by_force_and_have_no_moments(toy: Toy, run: Path, tmp_path: Path) -> None:
    imports = []
    for step in (8, 12):
        lmtrain("export", run / "checkpoints" / f"step_{step:08d}", "--to", "hf", "--output", tmp_path / f"hf{step}")
        lmtrain("import", tmp_path / f"hf{step}", "--output", tmp_path / f"imported{step}")
        imports.append(tmp_path / f"imported{step}")
    assert "have no common ancestor" in lmtrain("merge", *imports, "--output", tmp_path / "merged", code=65)
    assert "moments         none" in lmtrain("merge", *imports, "--output", tmp_path / "merged", "--force")
    lmtrain("pretrain", *toy.settings(tmp_path / "next"), f"checkpoint.init_from={tmp_path}/merged")
    assert [parent.kind for parent in read_lineage(tmp_path / "next")] == ["merge", "weights"]


@pytest.mark.wide
def test_without_moments_only_the_weights_begin_a_run(toy: Toy, run: Path, tmp_path: Path) -> None:
    lmtrain("merge", "--last", 2, "--of", run, "--moments", "none", "--output", tmp_path / "weights")
    settings = toy.settings(tmp_path / "next")
    refused = lmtrain("pretrain", *settings, f"checkpoint.resume={tmp_path}/weights", code=65)
    assert "merged without the optimizer's moments (--moments none), so no run can resume from it" in refused
    assert f"with a warm-up: checkpoint.init_from={tmp_path}/weights" in refused
    lmtrain("pretrain", *settings, f"checkpoint.init_from={tmp_path}/weights")
    assert [parent.kind for parent in read_lineage(tmp_path / "next")] == ["merge", "weights"]
    again = lmtrain("merge", tmp_path / "weights", "--moments", "newest", "--output", tmp_path / "out", code=2)
    assert "--moments newest has nothing to keep" in again


@pytest.mark.wide
def test_a_kill_and_the_same_command_again(run: Path, merged: Path, tmp_path: Path) -> None:
    fault = {"LMTRAIN_FAULT": "kill:point=reshard.publish", "LMTRAIN_ALLOW_FAULTS": "1"}
    command = ("merge", "--last", 3, "--of", run, "--mean", "linear", "--output", tmp_path / "again")
    process = start(*command, env=fault)
    process.communicate(timeout=600)
    assert process.returncode == -9
    assert os.listdir(tmp_path) == ["again.merging"]
    assert "done before" in lmtrain(*command)
    for file in merged.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_arguments_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run, output = tmp_path / "run", ("--output", tmp_path / "out")
    for arguments, message in (
        ((), "No checkpoints are given. Name them, or give --last N --of RUN"),
        ((run, "--mean", "linear", "--emulate-decay", "sqrt"), "--mean linear and --emulate-decay sqrt both say how"),
        ((run, "--last", 2), "--last 2 needs --of RUN. Use --of "),
        (("--of", run), f"--of {run} needs --last N. Add --last N"),
        ((run, "--last", 2, "--of", run), f"{run} and --last 2 --of {run} both say what to merge."),
        (("--last", 2, "--of", run), f"--last 2 asks for 2 checkpoints, and {run} holds none. Give another run."),
        (("--last", 2, "--of", tmp_path / "other"), f"--of {tmp_path}/other does not exist"),
        ((run, "--mean", "median"), "--mean median names no mean. Use uniform, linear"),
    ):
        code = 66 if "--of" in arguments and "--last" in arguments and run not in arguments[:1] else 2
        assert message in lmtrain("merge", *arguments, *output, code=code), arguments
    assert os.listdir(tmp_path) == ["run"]


def test_one_checkpoint_and_a_border_between_stages_are_said(toy: Toy, run: Path, tmp_path: Path) -> None:
    last = run / "checkpoints/step_00000012"
    said = lmtrain("merge", last, "--output", tmp_path / "one")
    assert f"warning: {last} is the only checkpoint, and the mean of one is itself: its weights are copied." in said
    border = ["stages.next.steps=2", "checkpoint.interval_steps=1"]
    lmtrain("pretrain", "--from-run", run, f"run.dir={tmp_path}/b", *border)
    said = lmtrain("merge", run, tmp_path / "b", "--output", tmp_path / "two")
    assert f"training stages: no stage at {last}, next at {tmp_path}/b/checkpoints/step_00000014." in said
    for number, names in enumerate((["--last", 2, "--of", run], ["--last", 2, "--of", tmp_path / "b"])):
        said = lmtrain("merge", *names, "--output", tmp_path / f"within{number}")
        assert "different training stages" not in said
        assert "only checkpoint" not in said
