"""`lmtrain pretrain` as a user meets it: what a run leaves behind, how it stops, how it goes on."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.metrics import read_metrics
from lmtrain.runtime.files.atomic_files import folder_lock
from tests.cli.harness import Toy, lmtrain, start
from tests.marks import wide


def steps(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]


@pytest.fixture(scope="module")
def run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    lmtrain(
        "pretrain",
        *toy.settings(folder, train__valid_interval_steps=6, train__valid_samples=5, observe__tensorboard="true"),
    )
    return folder


def test_a_run_folder_holds_all_that_is_promised(run: Path) -> None:
    made = {p.name for p in run.iterdir()}
    assert {"config.json", "environment.json", "metrics.jsonl", "log.txt", "tensorboard", "checkpoints",
            "tokenizer.json", "stop.json"} <= made  # fmt: skip
    stop = json.loads((run / "stop.json").read_text())
    newest = str(run / "checkpoints/step_00000012")
    assert stop == {"cause": "done", "step": 12, "exit_code": 0, "requeue": False, "resume": newest}
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["step_00000008", "step_00000012"]
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    rows = steps(run)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["samples"] == 48
    assert rows[-1]["tokens"] == 48 * 32
    valid = [row for row in read_metrics(run / "metrics.jsonl") if row["event"] == "valid"]
    assert [row["step"] for row in valid] == [6, 12]
    assert valid[1]["loss"] < valid[0]["loss"]


def test_a_finished_run_started_again_changes_nothing(toy: Toy, run: Path) -> None:
    before = steps(run)
    again = toy.settings(run, train__valid_interval_steps=6, train__valid_samples=5, observe__tensorboard="true")
    output = lmtrain("pretrain", *again)
    assert f"nothing is left to do: {run}/checkpoints/step_00000012 is step 12 of 12" in output
    assert "done: 12 steps" in output
    assert steps(run) == before


def test_the_last_line_says_how_often_the_data_was_gone_through(toy: Toy, tmp_path: Path) -> None:
    page = tmp_path / "page"
    lmtrain("preprocess", toy.text / "page_000.txt", "--tokenizer", toy.tokenizer, "--output", page)
    words = toy.settings(tmp_path / "run", train__steps=4, train__global_batch=64, data__path=page)
    epochs = json.loads(lmtrain("pretrain", *words, "--dry-run", "--json"))["epochs"]
    assert f", {epochs:.1f} times through the data, " in lmtrain("pretrain", *words).splitlines()[-1]


def test_a_run_shorter_than_its_checkpoint_is_refused(toy: Toy, run: Path) -> None:
    output = lmtrain("pretrain", *toy.settings(run, train__steps=9), "--dry-run", code=2)
    assert f"ends before step 12, which the checkpoint {run}/checkpoints/step_00000012 has reached." in output
    assert "Use train.steps=13 or more to go on, or another run.dir for a new run, such as" in output
    tokens = toy.settings(run, train__steps="null", train__tokens=1000)
    output = lmtrain("pretrain", *tokens, code=2)
    assert "train.tokens=1000, 8 steps, ends before step 12" in output
    assert "parameters" in lmtrain("pretrain", *tokens, "train.tokens=null", "train.steps=13", "--dry-run")


def test_the_microbatch_does_not_change_the_curve(toy: Toy, run: Path, tmp_path: Path) -> None:
    lmtrain("pretrain", *toy.settings(tmp_path / "run", train__micro_batch=4))
    for ours, theirs in zip(steps(tmp_path / "run"), steps(run), strict=True):
        assert ours["samples_hash"] == theirs["samples_hash"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", *wide("fp16")])
def test_half_precision_follows_fp32(toy: Toy, run: Path, tmp_path: Path, precision: str) -> None:
    lmtrain("pretrain", *toy.settings(tmp_path / "run"), f"precision={precision}")
    ours, theirs = ([row["loss"] for row in steps(folder)] for folder in (tmp_path / "run", run))
    assert ours == pytest.approx(theirs, rel=2e-2)
    assert ours != theirs


def test_fp16_overflow_skips_steps_and_the_scale_is_resumed(toy: Toy, tmp_path: Path) -> None:
    """A scale far too large overflows and halves until it fits; going on from a checkpoint keeps it."""
    # because: 2^30 x a mean gradient of this toy is far above fp16's 65504
    settings = [*toy.settings(tmp_path / "a"), "precision=fp16", "precision.initial_scale=1073741824"]
    lmtrain("pretrain", *settings)
    rows = steps(tmp_path / "a")
    assert rows[-1]["skipped"] > 0
    manifest = json.loads((tmp_path / "a/checkpoints/step_00000008/manifest.json").read_text())
    skipped = manifest["state"]["skipped"]
    assert manifest["state"]["precision"]["loss_scale"] == 2.0 ** (30 - skipped)
    other = [*toy.settings(tmp_path / "b", checkpoint__resume=tmp_path / "a/checkpoints/step_00000008"),
             "precision=fp16", "precision.initial_scale=1073741824"]  # fmt: skip
    lmtrain("pretrain", *other)
    assert [row["loss"] for row in steps(tmp_path / "b")] == [row["loss"] for row in rows[8:]]


def test_batch_ramp_up_and_a_token_budget(toy: Toy, tmp_path: Path) -> None:
    settings = [s for s in toy.settings(tmp_path / "run") if not s.startswith("train.steps")]
    lmtrain("pretrain", *settings, "train.steps=null", "train.tokens=1024",
            "train.rampup={start: 2, increment: 2, samples: 8}")  # fmt: skip
    rows = steps(tmp_path / "run")
    sizes = [b["samples"] - a["samples"] for a, b in zip([{"samples": 0}, *rows], rows, strict=False)]
    assert sizes[0] == 2
    assert sizes[-1] == 4
    assert sizes == sorted(sizes)
    assert rows[-2]["tokens"] < 1024 <= rows[-1]["tokens"]


@pytest.mark.wide
def test_document_mask_and_sliding_window_train(toy: Toy, tmp_path: Path) -> None:
    changed = {"data__document_mask": "true", "model__window": 8, "model__positions": "rotary"}
    lmtrain("pretrain", *toy.settings(tmp_path / "run", **changed))
    rows = steps(tmp_path / "run")
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.wide
def test_compiled_blocks_give_the_same_curve(toy: Toy, run: Path, tmp_path: Path) -> None:
    lmtrain("pretrain", *toy.settings(tmp_path / "run", train__steps=3, compute__compile="true"))
    for ours, theirs in zip(steps(tmp_path / "run"), steps(run), strict=False):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.wide
def test_a_signal_stops_after_the_step_with_a_checkpoint(toy: Toy, tmp_path: Path) -> None:
    settings = toy.settings(tmp_path / "run", train__steps=100_000, checkpoint__interval_steps=0)
    process = start("pretrain", *settings)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            process.send_signal(signal.SIGTERM)
            break
    rest = process.communicate()[0]
    assert process.returncode == 75, rest
    assert "SIGTERM: stopping after this step\n" in rest
    stop = json.loads((tmp_path / "run/stop.json").read_text())
    assert stop["cause"] == "SIGTERM"
    assert stop["requeue"] is True
    last = steps(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run/checkpoints" / f"step_{last:08d}").is_dir()
    assert f"step_{last:08d}. Run the same command again to go on." in rest
    assert re.search(r"stopped by SIGTERM .* ago; the same command goes on", lmtrain("inspect", tmp_path / "run"))
    settings = toy.settings(tmp_path / "run", train__steps=last + 2, checkpoint__interval_steps=0)
    assert f"at step {last}" in lmtrain("pretrain", *settings)


def test_a_loss_that_is_not_finite_stops_before_the_update(toy: Toy, tmp_path: Path) -> None:
    output = lmtrain("pretrain", *toy.settings(tmp_path / "run", optim__lr="1e30", optim__clip_norm="null"), code=86)
    assert "microbatch" in output
    [command] = re.findall(r"`lmtrain (data show .*?)`", output)
    assert "32 tokens, 32 with a label" in lmtrain(*shlex.split(command))
    assert json.loads((tmp_path / "run/stop.json").read_text())["exit_code"] == 86


def test_two_runs_cannot_share_a_folder(toy: Toy, tmp_path: Path) -> None:
    with folder_lock(tmp_path / "run"):
        assert "is in use by" in lmtrain("pretrain", *toy.settings(tmp_path / "run"), code=73)


def test_a_resume_that_is_not_there_is_an_error(toy: Toy, tmp_path: Path) -> None:
    output = lmtrain("pretrain", *toy.settings(tmp_path / "run", checkpoint__resume=tmp_path / "nowhere"), code=66)
    assert str(tmp_path / "nowhere") in output


def test_starting_over_on_top_of_checkpoints_is_refused(toy: Toy, run: Path) -> None:
    assert "already holds checkpoints" in lmtrain("pretrain", *toy.settings(run, checkpoint__resume="none"), code=73)


def test_a_checkpoint_of_another_run_is_refused_with_all_that_differs(toy: Toy, run: Path) -> None:
    others = {"model__width": 64, "train__seed": 7, "train__global_batch": 8}
    output = lmtrain("pretrain", *toy.settings(run, train__steps=20, **others), code=65)
    for words in ("model.width is 64, and was 32", "train.seed is 7, and was 1234"):
        assert words in output
    assert "train.global_batch is 8, and was 4" in output


def test_a_damaged_checkpoint_is_named(toy: Toy, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run/checkpoints/step_00000012/rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 16
    file.write_bytes(data)
    output = lmtrain("pretrain", *toy.settings(tmp_path / "run", train__steps=20), code=65)
    assert str(file) in output or file.name in output
    assert file.name in lmtrain("inspect", file.parent, "--verify", code=65)


def test_dry_run_says_what_would_run(toy: Toy, tmp_path: Path) -> None:
    plan = json.loads(lmtrain("pretrain", *toy.settings(tmp_path / "run"), "--dry-run", "--json"))
    assert plan["steps"] == 12
    assert plan["tokens"] == 12 * 4 * 32
    assert len(plan["ranks"]) == 1
    assert not (tmp_path / "run").exists()
    done = json.loads(lmtrain("pretrain", *toy.settings(tmp_path / "run"), "--json").splitlines()[-1])
    assert done["step"] == 12
    assert json.loads(lmtrain("inspect", tmp_path / "run", "--json"))["last_step"]["step"] == 12


def test_a_foreign_dataset_trains_when_the_user_names_its_tokenizer(toy: Toy, tmp_path: Path) -> None:
    """Files as another tool writes them: .bin and .idx alone."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"foreign{suffix}").write_bytes(toy.data.with_name(toy.data.name + suffix).read_bytes())
    settings = toy.settings(tmp_path / "run", data__path=tmp_path / "foreign", train__steps=3)
    assert "Give data.tokenizer=PATH" in lmtrain("pretrain", *settings, code=2)
    lmtrain("pretrain", *settings, f"data.tokenizer={toy.tokenizer}")
    assert len(steps(tmp_path / "run")) == 3


def test_inspect_env_and_version(toy: Toy, run: Path) -> None:
    assert json.loads(lmtrain("inspect", toy.data, "--verify", "--json"))["verified"] is True
    checkpoint = json.loads(lmtrain("inspect", run / "checkpoints/step_00000012", "--verify", "--json"))
    assert checkpoint["step"] == 12
    assert "model.blocks.0.attention.qkv.weight" in checkpoint["tensors"]
    assert "torch" in json.loads(lmtrain("env", "--json"))["packages"]
    assert lmtrain("--version").startswith("lmtrain ")
    assert "nothing does not exist" in lmtrain("inspect", run.parent / "nothing", code=66)


def test_a_named_checkpoint_is_only_the_beginning(toy: Toy, run: Path, tmp_path: Path) -> None:
    """The same command goes on from the run's own checkpoints; going back within a run is refused."""
    settings = toy.settings(tmp_path / "new", train__steps=16, checkpoint__resume=run)
    assert f"continuing from {run}" in lmtrain("pretrain", *settings)
    assert [row["step"] for row in steps(tmp_path / "new")] == [13, 14, 15, 16]
    more = toy.settings(tmp_path / "new", train__steps=18, checkpoint__resume=run)
    assert f"continuing from {tmp_path / 'new'}" in lmtrain("pretrain", *more)
    (tmp_path / "new/lineage.json").unlink()  # what a run of an earlier version lacks; config.json names its beginning
    assert f"continuing from {tmp_path / 'new'}" in lmtrain("pretrain", *more, "train.steps=19")
    back = toy.settings(run, train__steps=18, checkpoint__resume=run / "checkpoints/step_00000008")
    assert "is not the newest checkpoint of run.dir=" in lmtrain("pretrain", *back, code=73)
    other = toy.settings(run, train__steps=18, checkpoint__resume=tmp_path / "new")
    assert "already holds checkpoints of a run that did not begin there" in lmtrain("pretrain", *other, code=73)


def test_first_weights_are_only_the_beginning(toy: Toy, run: Path, tmp_path: Path) -> None:
    """The command goes on with the run that began from them; in the folder of another run they would not be read."""
    new, wanted = tmp_path / "new", {"checkpoint__init_from": run}
    lmtrain("pretrain", *toy.settings(new, train__steps=4, **wanted))
    (new / "lineage.json").unlink()  # as in a run that began from another program's model
    assert f"continuing from {new}" in lmtrain("pretrain", *toy.settings(new, train__steps=6))
    assert f"continuing from {new}" in lmtrain("pretrain", *toy.settings(new, train__steps=8, **wanted))
    before = (run / "metrics.jsonl").read_bytes()
    said = lmtrain("pretrain", *toy.settings(run, train__steps=16, checkpoint__init_from=new), code=73)
    assert f"checkpoint.init_from={new} begins a run, but run.dir={run} already holds checkpoints of a run that" in said
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_fault_that_was_left_behind_is_refused(toy: Toy, tmp_path: Path) -> None:
    env = {"LMTRAIN_FAULT": "kill:point=step"}
    assert "LMTRAIN_ALLOW_FAULTS" in lmtrain("pretrain", *toy.settings(tmp_path / "run"), code=2, env=env)


@pytest.mark.wide
def test_running_out_of_memory_names_what_to_make_smaller(toy: Toy, tmp_path: Path) -> None:
    batch = 1 << 17
    settings = toy.settings(tmp_path / "run", train__global_batch=batch, train__micro_batch=batch, train__steps=3)
    code = (
        "import resource, sys\n"
        "from lmtrain.cli.main import main\n"
        "import torch\n"
        "limit = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + (3 << 30)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "main(['pretrain', *sys.argv[1:]])"
    )
    done = subprocess.run([sys.executable, "-c", code, *settings], capture_output=True, text=True)
    assert done.returncode == 70, done.stderr
    assert "The host ran out of memory" in done.stderr
    assert f"Use train.micro_batch={batch // 2}" in done.stderr
    assert json.loads((tmp_path / "run/stop.json").read_text())["exit_code"] == 70
