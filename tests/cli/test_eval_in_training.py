"""Evaluations of a run in progress: the same bits with them as without, at any layout; rows, stops, and refusals."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import Toy, lmtrain, start
from tests.cli.test_parallel_runs import run
from tests.marks import slow
from tests.toytext import write_toy_last_words

EXACT = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "samples_hash", "skipped")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp2-pp2": (4, ("parallel.tp=2", "parallel.pp=2")),
    "dp2-tp2-pp2": (8, ("parallel.dp_shard=2", "parallel.zero=1", "parallel.tp=2", "parallel.pp=2")),
    "zero3": (2, ("parallel.dp_shard=2", "parallel.zero=3")),
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences whose last word is asked for."""
    file = tmp_path_factory.mktemp("lambada") / "lambada_test.jsonl"
    write_toy_last_words(file, 12)
    return file


def tasks(toy: Toy, lines: Path, interval: int = 10) -> list[str]:
    text = toy.text / "page_001.txt"
    words = f"[{{task: lambada/megatron-strict, data: {lines}}}, {{task: perplexity, data: {text}, name: code}}]"
    return [f"eval.tasks={words}", f"eval.interval_steps={interval}"]


def settings(toy: Toy, folder: Path, **overrides: object) -> list[str]:
    values = {"train__steps": 24, "checkpoint__interval_steps": 12, "model__dropout": 0.1, "model__num_layers": 2}
    return toy.settings(folder, **(values | overrides))


def rows(folder: Path, *events: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] in events]


def trained(folder: Path) -> tuple[list[tuple[Any, ...]], Mapping[str, str]]:
    """Losses and gradients of every step, and the hashes of weights and optimizer at the end."""
    last = sorted((folder / "checkpoints").iterdir())[-1]
    files = json.loads((last / "manifest.json").read_text())["files"]
    roots = {name: entry["root"] for name, entry in files.items() if name.endswith(".safetensors")}
    return [tuple(row[key] for key in EXACT) for row in rows(folder, "step")], roots


def alone(toy: Toy, folder: Path) -> dict[str, Any]:
    """What `lmtrain eval` finds in the run's last checkpoint."""
    text, out = toy.text / "page_001.txt", folder.with_suffix(".json")
    lmtrain("eval", folder, "--task", "perplexity", "--data", text, "--output", out)
    (found,) = json.loads(out.read_text())["results"]
    return dict(found)


def test_a_run_with_evaluations_is_the_same_run(toy: Toy, lines: Path, tmp_path: Path) -> None:
    short: dict[str, object] = {"train__steps": 6, "checkpoint__interval_steps": 0, "data__split": "[1.0]"}
    lmtrain("pretrain", *settings(toy, tmp_path / "plain", **short))
    more: dict[str, object] = {"observe__tensorboard": "true", "eval__interval_steps": 4}
    more |= {"train__valid_interval_steps": 4, "train__valid_samples": 5}
    more |= {"data__valid_paths": f"{{one: {toy.data}, two: {toy.data}}}"}
    output = lmtrain("pretrain", *settings(toy, tmp_path / "measured", **short, **more), tasks(toy, lines)[0])
    assert trained(tmp_path / "measured") == trained(tmp_path / "plain")
    found = rows(tmp_path / "measured", "eval")
    assert [(row["step"], row["name"], row["protocol"]) for row in found] == [
        (step, name, protocol)
        for step in (4, 6)
        for name, protocol in (("lambada/megatron-strict", "lambada/megatron-strict"), ("code", "perplexity"))
    ]
    there = alone(toy, tmp_path / "measured")
    assert found[-1]["nll_sum_nats"] == pytest.approx(there["nll_sum_nats"], rel=1e-6)
    assert {key: found[-1][key] for key in ("text_sha256", "num_targets", "dtype")} == {
        key: there[key] for key in ("text_sha256", "num_targets", "dtype")
    }
    assert f"eval at step 6  code  token perplexity {found[-1]['measures']['token_perplexity']:,.2f}" in output
    assert f"code: token perplexity {found[-1]['measures']['token_perplexity']:,.2f} at step 6" in lmtrain(
        "inspect", tmp_path / "measured"
    )
    (*_, last) = rows(tmp_path / "measured", "valid")
    assert (
        last["domains"]["one"]
        == last["domains"]["two"]
        == {key: last[key] // 2 if key in ("samples", "tokens") else last[key] for key in last["domains"]["one"]}
    )
    (events,) = (tmp_path / "measured/tensorboard").iterdir()
    assert b"eval/lambada/megatron-strict/whole_word_accuracy" in events.read_bytes()


@pytest.mark.wide
@pytest.mark.parametrize("layout", ["tp2-pp2", *slow("dp2-tp2-pp2", "zero3")])
def test_the_same_at_any_layout(toy: Toy, lines: Path, tmp_path: Path, layout: str) -> None:
    nproc, words = LAYOUTS[layout]
    for name, more in (("plain", []), ("measured", tasks(toy, lines))):
        run(nproc, *settings(toy, tmp_path / name, train__micro_batch=1), *words, "parallel.timeout_s=60", *more)
    assert trained(tmp_path / "measured") == trained(tmp_path / "plain")
    there = alone(toy, tmp_path / "measured")
    found = rows(tmp_path / "measured", "eval")
    assert [row["step"] for row in found] == [10, 10, 20, 20, 24, 24]
    assert found[-1]["measures"] == pytest.approx(there["measures"], rel=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("word", ["precision=bf16", "precision=fp16", "recompute=full", *slow("compute.compile=true")])
def test_the_same_however_it_computes(toy: Toy, lines: Path, tmp_path: Path, word: str) -> None:
    for name, more in (("plain", []), ("measured", tasks(toy, lines))):
        process = start("pretrain", *settings(toy, tmp_path / name, train__steps=12), word, *more)
        output = process.communicate(timeout=600)[0]
        assert process.returncode == 0, output
    assert trained(tmp_path / "measured") == trained(tmp_path / "plain")
    assert {row["dtype"] for row in rows(tmp_path / "measured", "eval")} == {
        word.removeprefix("precision=") if word.startswith("precision") else "fp32"
    }


@pytest.mark.wide
@pytest.mark.parametrize("nproc", [1, *slow(2)])
def test_a_stop_amid_an_evaluation_saves_at_once_and_the_run_goes_on(
    toy: Toy, lines: Path, tmp_path: Path, nproc: int
) -> None:
    """A long text is being scored when the signal comes; it is left there."""
    long = tmp_path / "long.txt"
    long.write_text("\n".join(file.read_text() for file in sorted(toy.text.iterdir())) * 4)
    words = settings(toy, tmp_path / "run", checkpoint__interval_steps=100)
    words += [f"eval.tasks=[{{task: perplexity, data: {long}}}]", "eval.interval_steps=3", "eval.batch_size=1"]
    words += ["parallel.dp_shard=2"] * (nproc > 1)
    process = start("pretrain", "--nproc", nproc, *words)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step  3/"):
            process.send_signal(signal.SIGTERM)
            break
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 75, output
    assert [row["step"] for row in rows(tmp_path / "run", "step")] == [1, 2, 3]
    assert rows(tmp_path / "run", "eval") == []
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000003"]
    shorter = [word for word in words if not word.startswith("eval.")] + tasks(toy, lines)
    run(nproc, *shorter)
    # because: what the stop has cut off is measured first, by the tasks of now
    assert [row["step"] for row in rows(tmp_path / "run", "eval")] == [3, 3, 10, 10, 20, 20, 24, 24]
    plain = settings(toy, tmp_path / "plain", checkpoint__interval_steps=100)
    run(nproc, *plain, *["parallel.dp_shard=2"] * (nproc > 1))
    assert trained(tmp_path / "run") == trained(tmp_path / "plain")


def test_what_cannot_be_measured_is_refused_before_it_starts(toy: Toy, lines: Path, tmp_path: Path) -> None:
    typed = ["pretrain", *settings(toy, tmp_path / "run"), "--dry-run"]
    both = "eval.tasks=[{task: perplexty, data: x}, {task: wikitext, data: y}]"
    said = lmtrain(*typed, both, code=2)
    assert "eval.tasks[0].task=perplexty is not an evaluation task. Did you mean perplexity?" in said
    assert "eval.tasks[1].task=wikitext stands for several tasks" in said
    said = lmtrain(*typed, "eval.tasks=[{task: perplexity-s64, data: x}]", code=2)
    assert "eval.tasks[0].task=perplexity-s64 needs a window of 64 tokens, more than model.seq_len=32. Use" in said
    said = lmtrain(*typed, f"eval.tasks=[{{task: perplexity, data: {tmp_path / 'none.txt'}}}]", code=66)
    assert f"eval.tasks[0].data={tmp_path / 'none.txt'} does not exist. Give whatever" in said
    (tmp_path / "empty.jsonl").write_text("{}\n")
    said = lmtrain(*typed, f"eval.tasks=[{{task: lambada/megatron-strict, data: {tmp_path / 'empty.jsonl'}}}]", code=65)
    assert "The data was read for eval.tasks[0], lambada/megatron-strict." in said
    said = lmtrain(*typed, *tasks(toy, lines))
    assert "every 10 steps and at the end: lambada/megatron-strict, " in said
    assert "is not lambada_test.jsonl as it was published" in said
