"""--weights ema: the commands read the average that a checkpoint holds, and say so; what holds none is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import lmtrain as python
from lmtrain.checkpoint.find_and_prune import resolve_checkpoint
from lmtrain.checkpoint.save.commit import commit_checkpoint, write_rank
from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.errors import CheckpointError, UsageError
from lmtrain.layout import Piece
from lmtrain.runfolder.metrics_rows import read_metrics
from tests.cli.harness import Toy, lmtrain, on_terminal
from tests.unit.checkpoint.arrays import rank_data

pytestmark = pytest.mark.wide

SCALE = 0.5  # the planted average is the weights by this
ENTRY = {"decay": 0.99, "every_steps": 2, "from_step": 0, "since_step": 4}
SUMMARY = "exponential average of decay 0.99, updated every 2 steps since step 4"


@pytest.fixture(scope="module")
def run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose newest checkpoint holds an average, and the one before it none."""
    folder = tmp_path_factory.mktemp("average") / "run"
    lmtrain("pretrain", *toy.settings(folder, checkpoint__keep_last=2))
    write_copy(resolve_checkpoint(folder), SCALE, average=True)
    return folder


@pytest.fixture(scope="module")
def scaled(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint whose weights are what the average of the run is."""
    folder = tmp_path_factory.mktemp("scaled") / "step_00000012"
    shutil.copytree(resolve_checkpoint(run), folder)
    write_copy(folder, SCALE, average=False)
    return folder


def write_copy(path: Path, scale: float, *, average: bool) -> None:
    """Write the checkpoint anew, with `scale` times its weights in their place, or as their average beside them."""
    reader = CheckpointReader(path)
    tensors = {name: reader.read(name) for name in reader.manifest.tensors if not name.startswith("ema.")}
    prefix = "ema." if average else "model."
    scaled = {name.replace("model.", prefix, 1): tensors[name] * scale for name in tensors if name.startswith("model.")}
    pieces = [
        Piece(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor.numpy())
        for name, tensor in (tensors | scaled).items()
    ]
    attempt = path.with_name(f"{path.name}.tmp-{os.getpid()}-0")
    attempt.mkdir()
    records = [write_rank(attempt, 0, rank_data(pieces))]
    state = {key: value for key, value in reader.state.items() if key != "ema"} | ({"ema": ENTRY} if average else {})
    commit_checkpoint(attempt, reader.step, records, state, reader.read_extra_files())


def scores(output: Path, *words: object) -> dict[str, Any]:
    lmtrain("eval", *words, "--output", output)
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_an_evaluation_of_the_average_is_that_of_a_model_with_its_weights(
    toy: Toy, run: Path, scaled: Path, tmp_path: Path
) -> None:
    task = ("--task", "perplexity", "--data", toy.text, "--limit", 3)
    average = scores(tmp_path / "average.json", run, *task, "--weights", "ema")
    assert average["results"][0]["measures"] == scores(tmp_path / "s.json", scaled, *task)["results"][0]["measures"]
    weights = scores(tmp_path / "weights.json", run, *task)
    assert weights["results"][0]["measures"] != average["results"][0]["measures"]
    assert (weights["model"]["weights"], average["model"]["weights"]) == ("model", "ema")
    assert average["model"]["average"] == SUMMARY
    assert "average" not in weights["model"]
    assert "step_00000012, the average of its weights" in lmtrain("eval", run, *task, "--weights", "ema")
    assert f"average {SUMMARY}" in " ".join(lmtrain("eval", run, *task, "--weights", "ema", "--full").split())


def test_answers_about_the_weights_are_not_taken_for_the_average(toy: Toy, run: Path, tmp_path: Path) -> None:
    """The journal that a killed evaluation leaves is of both, as one checkpoint holds both."""
    output, task = tmp_path / "out.json", ("--task", "perplexity", "--data", toy.text, "--limit", 3)
    fault = {"LMTRAIN_FAULT": "exc:point=eval.journal:count=2", "LMTRAIN_ALLOW_FAULTS": "1"}
    lmtrain("eval", run, *task, "--output", output, "--batch-size", 1, env=fault, code=1)
    words = (*task, "--batch-size", 1, "--weights", "ema")
    assert scores(output, run, *words, "--overwrite")["results"][0]["measures"] == (
        scores(tmp_path / "clean.json", run, *words)["results"][0]["measures"]
    )


def test_generated_text_and_exports_are_those_of_the_average(run: Path, scaled: Path, tmp_path: Path) -> None:
    words = ("--prompt", "the", "--max-new-tokens", 12, "--json")
    average = json.loads(lmtrain("generate", run, *words, "--weights", "ema"))
    assert average["samples"] == json.loads(lmtrain("generate", scaled, *words))["samples"]
    assert average["model"]["weights"] == "ema"
    text = lmtrain("export", run, "--to", "hf", "--output", tmp_path / "hf", "--weights", "ema")
    assert "the weights themselves: their average is exported; --weights model exports them" in text
    lmtrain("export", scaled, "--to", "hf", "--output", tmp_path / "scaled")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "scaled")]
    assert files[0] == files[1]
    assert f"| weights | the {SUMMARY} |" in (tmp_path / "hf" / "README.md").read_text()
    megatron = ("--to", "megatron", "--output", tmp_path / "m", "--weights", "ema", "--json")
    facts = json.loads(lmtrain("export", run, *megatron))
    assert facts["weights"] == "ema"
    lmtrain("export", scaled, "--to", "megatron", "--output", tmp_path / "m2")
    place = "release/mp_rank_00/model_optim_rng.pt"
    assert (tmp_path / "m" / place).read_bytes() == (tmp_path / "m2" / place).read_bytes()
    left_out = lmtrain("export", run, "--to", "hf", "--output", tmp_path / "weights")
    assert "tensors of the average: the weights are exported; --weights ema exports it" in left_out


def test_inspect_shows_the_average_and_reads_it(run: Path, scaled: Path) -> None:
    checkpoint = resolve_checkpoint(run)
    for columns in (80, 120):
        lines = on_terminal("inspect", checkpoint, columns=columns).splitlines()
        shown = " ".join(" ".join(lines).split())
        assert f"average {SUMMARY}; --weights ema reads it" in shown
        assert all(len(line) <= columns for line in lines[1:]), "the first has the path"
    shown = " ".join(lmtrain("inspect", checkpoint, "--weights", "ema").split())
    assert f"average {SUMMARY}; the tensors are the average's" in shown
    tensors = json.loads(lmtrain("inspect", checkpoint, "--weights", "ema", "--json"))["tensors"]
    assert not [name for name in tensors if not name.startswith("model.")]
    facts = json.loads(lmtrain("inspect", checkpoint, "--diff", checkpoint, "--weights", "ema", "--json"))
    assert facts["same_tensors"]
    assert "holds no average" in lmtrain("inspect", checkpoint, "--diff", scaled, "--weights", "ema", code=65)
    assert "is none. Leave --weights out" in lmtrain("inspect", run, "--weights", "ema", code=2)


def test_python_reads_the_average(toy: Toy, run: Path, scaled: Path) -> None:
    average, weights, same = python.load(run, weights="ema")[0], python.load(run)[0], python.load(scaled)[0]
    ids = [1, 2, 3, 4, 5]
    assert (average.logits(ids) == same.logits(ids)).all()
    assert not (average.logits(ids) == weights.logits(ids)).all()
    assert "from the average in " in repr(average)
    result = python.evaluate(run, "perplexity", toy.text, limit=2, weights="ema")
    assert result["results"][0]["measures"] == (
        python.evaluate(scaled, "perplexity", toy.text, limit=2)["results"][0]["measures"]
    )
    with pytest.raises(UsageError, match="weights=swa are not weights"):
        python.load(run, weights="swa")
    with pytest.raises(CheckpointError, match="holds no average"):
        python.load(scaled, weights="ema")


def test_what_holds_no_average_is_refused(run: Path, scaled: Path, tmp_path: Path) -> None:
    for command in (
        ("generate", scaled), ("export", scaled, "--to", "hf", "--output", tmp_path / "hf"), ("inspect", scaled),
    ):  # fmt: skip
        told = lmtrain(*command, "--weights", "ema", code=65)
        assert f"{scaled} holds no average of its weights" in told
        assert "Use weights model, which is the default, or give a checkpoint of such a run." in told
    assert not (tmp_path / "hf").exists()
    lmtrain("export", run, "--to", "hf", "--output", tmp_path / "hf")
    assert "is a Hugging Face folder" in lmtrain("generate", tmp_path / "hf", "--weights", "ema", code=65)
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/checkpoints/step_00000008/manifest.json").write_text("{}")
    assert "swa" in lmtrain("generate", run, "--weights", "swa", code=2)


def test_a_new_run_begins_with_the_average(toy: Toy, run: Path, scaled: Path, tmp_path: Path) -> None:
    losses = {}
    for name, words in {
        "average": (f"checkpoint.init_from={run}", "checkpoint.init_weights=ema"),
        "same": (f"checkpoint.init_from={scaled}",),
        "weights": (f"checkpoint.init_from={run}",),
    }.items():
        lmtrain("pretrain", *toy.settings(tmp_path / name, train__steps=2, schedule__warmup_steps=1), *words)
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        losses[name] = [row["loss"] for row in rows if row["event"] == "step"]
    assert losses["average"] == losses["same"] != losses["weights"]
    branch = ("--from-run", tmp_path / "average", f"run.dir={tmp_path / 'branch'}", f"checkpoint.init_from={scaled}")
    shown = " ".join(lmtrain("pretrain", *branch, "--dry-run").split())
    assert f"weights from {scaled}" in shown, "and not the average that the run of these settings read"
    shown = " ".join(lmtrain("inspect", tmp_path / "average").split())
    assert f"descends from the average in {run} at step 12" in shown
    settings = toy.settings(tmp_path / "new")
    told = lmtrain("pretrain", *settings, f"checkpoint.init_from={scaled}", "checkpoint.init_weights=ema", code=65)
    assert f"{scaled} holds no average" in told
    lmtrain("export", run, "--to", "hf", "--output", tmp_path / "hf")
    words = (f"checkpoint.init_from={tmp_path / 'hf'}", "checkpoint.init_weights=ema")
    assert "is another program's folder, which holds none" in lmtrain("pretrain", *settings, *words, code=2)
