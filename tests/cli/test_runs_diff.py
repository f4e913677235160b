"""`lmtrain runs diff` names what was planted: 20 pairs of real runs with one difference each, by its step and cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lmtrain.cli.runs.print_difference import _describe_rows
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.observe.metrics import read_metrics
from lmtrain.runtime.processes.process_environment import environment_report
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.train import loop, set_up_run
from lmtrain.train.record import metrics_writer
from lmtrain.train.record.metrics_writer import report_step
from lmtrain.train.step import train_step
from tests.cli.harness import Toy, lmtrain

STEPS, SHARED = 12, {"checkpoint__interval_steps": "null"}
SETTINGS = {
    "optim.lr": "2e-3", "train.seed": 7, "optim.weight_decay": 0.2, "optim.betas": "[0.9,0.99]",
    "schedule.warmup_steps": 5, "model.init_std": 0.03, "train.global_batch": 8, "optim.clip_norm": 0.05,
}  # fmt: skip
TEXTS = (2, 3, 5, 8, 11)  # the step that reads the token
BITS = ((0, 29), (3, 29), (5, 24), (7, 23))  # which weight, which bit of its exponent: less may be rounded away
LIBRARIES = {"torch": ("2.12.0", 1), "numpy": ("1.26.4", 5), "tokenizers": ("0.19.0", 9)}  # version, from which step

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def base(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[NDArray[Any]]]]:
    """The run that all others are compared with, and the samples of each of its steps."""
    folder, seen = tmp_path_factory.mktemp("planted") / "base", {}
    keep = report_step
    with pytest.MonkeyPatch.context() as patch:

        def spy(run: Any, batches: Any, *rest: Any) -> None:
            seen[batches.step + 1] = [row.numpy().copy() for batch in batches.microbatches for row in batch.tokens_BT]
            keep(run, batches, *rest)

        patch.setattr(loop, "report_step", spy)
        lmtrain("pretrain", *toy.settings(folder, **SHARED))
    return folder, seen


def compared(base: Path, other: Path) -> dict[str, Any]:
    """The facts, with the first differing step checked against the rows themselves."""
    facts: dict[str, Any] = json.loads(lmtrain("runs", "diff", base, other, "--json"))
    keys = ("samples", "tokens", "lr", "loss", "grad_norm", "samples_hash", "batch_digest")
    ours, theirs = (
        {
            row["step"]: [row[key] for key in keys]
            for row in read_metrics(run / "metrics.jsonl")
            if row["event"] == "step"
        }
        for run in (base, other)
    )
    assert facts["first_step"] == min(step for step in ours if ours[step] != theirs[step])
    assert lmtrain("runs", "diff", base, other).count("\ncause") == len(facts["causes"]) == 1
    return facts


@pytest.mark.parametrize(
    ("shared", "steps", "first", "said"),
    [
        (2, 20, None, "2 steps of both, the last 20: all equal, bit for bit; 2 of 20 steps were logged, and "
                      "observe.log_interval_steps=1 logs each"),
        (20, 20, None, "20 steps of both, the last 20: all equal, bit for bit"),
        (2, 20, 10, "2 steps of both, the last 20: the first that differs is step 10; 2 of 20 steps were logged, and "
                    "observe.log_interval_steps=1 logs each"),
        (0, 0, None, "no step of which both have a row"),
    ],
)  # fmt: skip
def test_how_many_of_the_steps_were_compared(shared: int, steps: int, first: int | None, said: str) -> None:
    rows = {"shared": shared, "last_step": 20, "steps": steps}
    assert _describe_rows({"rows": rows, "first_step": first}) == said


@pytest.mark.wide
@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting(key: str, toy: Toy, base: tuple[Path, Any], tmp_path: Path) -> None:
    lmtrain("pretrain", *toy.settings(tmp_path / "b", **SHARED | {key.replace(".", "__"): SETTINGS[key]}))
    (cause,) = compared(base[0], tmp_path / "b")["causes"]
    assert cause.startswith(f"the setting {key} is ")


@pytest.mark.wide
@pytest.mark.parametrize("step", TEXTS)
def test_one_sample(step: int, toy: Toy, base: tuple[Path, dict[int, list[NDArray[Any]]]], tmp_path: Path) -> None:
    lmtrain("pretrain", *toy.settings(tmp_path / "b", **SHARED, data__path=changed(toy, base[1][step], tmp_path)))
    facts = compared(base[0], tmp_path / "b")
    assert (facts["first_step"], facts["first"]["batch_digest"]) == (step, step)
    assert "samples_hash" not in facts["first"]
    assert f"other text, first seen at step {step}: the data is not the same" in facts["causes"][0]


def changed(toy: Toy, samples: list[NDArray[Any]], folder: Path) -> Path:
    """The dataset with the second token of one of these samples changed: of one whose text stands there once."""
    dataset = IndexedDataset.open(toy.data)
    documents = [np.array(dataset.document(d)) for d in range(dataset.num_documents)]
    tokens = np.concatenate(documents)
    places = [
        [i for i in np.flatnonzero(tokens == sample[0]) if np.array_equal(tokens[i : i + len(sample)], sample)]
        for sample in samples
    ]
    at = next(found[0] for found in places if len(found) == 1)
    tokens[at + 1] = tokens[at + 1] % 300 + 1
    lengths = np.array([len(one) for one in documents])
    tokenizer = Tokenizer.load(toy.tokenizer)
    with DatasetWriter(folder / "changed", tokens.dtype) as writer:
        writer.add_documents(tokens, lengths, np.ones_like(lengths))
        writer.describe(
            tokenizer=tokenizer.to_bytes(), fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id, num_bytes=1,
        )  # fmt: skip
    return folder / "changed"


@pytest.mark.wide
@pytest.mark.parametrize(("which", "bit"), BITS)
def test_one_weight_bit(
    which: int, bit: int, toy: Toy, base: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = set_up_run.build_optimizer

    def flip(settings: Any, model: Any) -> Any:
        weights = [one for one in model.parameters.values() if one.dim() == 2]  # because: others begin as 0 or 1
        weight = weights[which].detach().view(torch.int32).view(-1)
        weight[weight.numel() // 2] ^= 1 << bit
        return keep(settings, model)

    monkeypatch.setattr(set_up_run, "build_optimizer", flip)
    lmtrain("pretrain", *toy.settings(tmp_path / "b", **SHARED))
    facts = compared(base[0], tmp_path / "b")
    assert facts["causes"] == ["the first weights are not the same"]
    assert not {"samples_hash", "batch_digest"} & facts["first"].keys()


@pytest.mark.wide
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library(
    name: str, toy: Toy, base: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, begins = LIBRARIES[name]
    keep, report = train_step, environment_report

    def other(model: Any, optimizer: Any, batches: Any, lr: float, *rest: Any) -> Any:
        """What another library does a little differently."""
        return keep(model, optimizer, batches, lr * (1 + (batches.step + 1 >= begins) * 1e-3), *rest)

    monkeypatch.setattr(loop, "train_step", other)
    changed = (found := report()) | {"packages": found["packages"] | {name: version}}
    monkeypatch.setattr(metrics_writer, "environment_report", lambda: changed)
    lmtrain("pretrain", *toy.settings(tmp_path / "b", **SHARED))
    facts = compared(base[0], tmp_path / "b")
    assert facts["first_step"] == begins + 1  # because: a step's loss comes before its update
    assert facts["causes"][0].startswith(f"{name} is ")
    assert facts["causes"][0].endswith(f"and {version} in B")
