"""`lmtrain eval` on several processes: the numbers of one, said once, whatever layout the checkpoint came from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.checkpoint.save.background_writer import CheckpointWriter
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from lmtrain.tokenizer.train import train_bpe
from tests.cli.harness import lmtrain, start
from tests.marks import slow
from tests.mistakes.runner import Runner

TEXT = "The miller opened the sluice, and the wheel began to turn. Nobody in the house had slept.\n"
SIZES: dict[str, Any] = {"num_layers": 2, "width": 24, "num_heads": 4, "vocab_size": 300, "seq_len": 16}


def save(folder: Path, settings: ModelSettings) -> Path:
    model = build_parallel(settings, Fp32Settings(), ComputeSettings(), torch.device("cpu"), seed=1, training=False)
    state = {"step": 1, "seq_len": 16, "model": settings.to_dict()}
    with CheckpointWriter(folder, keep_last=1, asynchronous=False) as writer:
        writer.save(1, model.pieces(), state, {"tokenizer.json": train_bpe([TEXT], 300).to_bytes()})
    return folder / "step_00000001"


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("gpt"), GPTSettings(**SIZES, init_std=0.3))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": TEXT[:length]}) + "\n" for length in (3, 40, 89, 5, 60, 22, 11)))
    return path


def asked(subject: Path, text: Path, *words: object) -> list[str]:
    return [*map(str, ("eval", subject, *words, "--task", "perplexity", "--data", text, "--device", "cpu"))]


def measured(subject: Path, text: Path, *words: object) -> dict[str, Any]:
    """In processes of its own; all that stands on standard output is one document."""
    done = subprocess.run(
        [sys.executable, "-m", "lmtrain", *asked(subject, text, *words, "--json")], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


REFUSED: list[tuple[list[str], int, str]] = [
    (["parallel.tp=3", "--nproc", "3"], 78, "parallel.tp=3 does not divide model.num_heads=4. Use 1, 2 or 4."),
    (["parallel.pp=3", "--nproc", "3"], 78, "makes 3 stages, more than model.num_layers=2. Use 2 or less."),
    (["parallel.tp=2", "--nproc", "3"], 78, "3 processes were started but parallel.tp=2 needs 2."),
    (["parallel.dp_replicate=3", "--nproc", "2"], 78, "2 processes were started but parallel.dp_replicate=3 needs 3"),
    (["parallel.tpp=2", "--nproc", "2"], 2, "parallel.tpp=2 is not a setting of an evaluation. Did you mean"),
    (["parallel.zero=2", "--nproc", "2"], 2, "parallel.zero=2 is about training, and an evaluation has no gradients."),
    (["model.width=8"], 2, "model.width=8 is not a setting of an evaluation."),
]


def test_a_layout_that_cannot_be_is_refused_without_torch(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    theirs = {"model_type": "gpt2", "n_layer": 2, "n_embd": 24, "n_head": 4, "n_positions": 16, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    (tmp_path / "model.safetensors").touch()
    with Runner() as run:
        for subject, (words, code, says) in [(tmp_path, REFUSED[0]), *((checkpoint, refused) for refused in REFUSED)]:
            said = run(asked(subject, text, *words))
            assert (said.code, said.torch) == (code, False), said.text
            assert says in said.text
        said = run([*asked(checkpoint, text, "--nproc", 2), "--task", "perplexity", "--data", "-"])
        assert (said.code, said.torch) == (2, False)
        assert "--data=- is standard input, which only one process can read, and the evaluation has 2 " in said.text


def test_a_model_of_another_kind_is_refused_before_its_weights_are_read(tmp_path: Path, text: Path) -> None:
    bert = save(tmp_path, BertSettings(**SIZES))
    damage(next(bert.glob("*.safetensors")))
    said = lmtrain(*asked(bert, text), code=2)
    assert "--task=perplexity does not fit the model: it scores the next token, but this model sees" in said
    assert "predicts masked tokens and cannot continue a text" in lmtrain("generate", bert, "--prompt", "x", code=65)


@pytest.fixture(scope="module")
def one(checkpoint: Path, text: Path) -> dict[str, Any]:
    """The result of one process."""
    result: dict[str, Any] = measured(checkpoint, text)["results"][0]
    return result


@pytest.mark.wide
@pytest.mark.parametrize(
    ("saved", "count", "words", "layout"),
    [
        *slow(("tp=2,pp=2", 2, [], "dp_replicate 2")),
        ("pp=2", 4, ["dp_shard=2", "tp=2", "sequence_parallel=false"], "dp_shard 2 x tp 2"),
        ("hf", 8, ["pp=2", "tp=2"], "pp 2 x dp_replicate 2 x tp 2"),
    ],
)
def test_the_numbers_of_one_process(
    checkpoint: Path, text: Path, tmp_path: Path, one: dict[str, Any],
    saved: str, count: int, words: list[str], layout: str,
) -> None:  # fmt: skip
    subject, output = tmp_path / "step_00000001", tmp_path / "o.json"
    lmtrain("export" if saved == "hf" else "reshard", checkpoint, "--to", saved, "--output", subject)
    settings = [f"parallel.{word}" for word in words]
    document = measured(subject, text, *settings, "--nproc", count, "--batch-size", 3, "--output", output)
    assert document == json.loads(output.read_text())
    (result,) = document["results"]
    assert result["layout"] == layout
    assert result["nll_sum_nats"] == pytest.approx(one["nll_sum_nats"], rel=1e-6)
    for key in ("num_targets", "tokenizer_fingerprint"):
        assert result[key] == one[key]


@pytest.mark.wide
def test_a_process_that_fails_ends_all_and_is_heard(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    """It reads what the others do not: only its own share is damaged."""
    cut = tmp_path / "cut" / "step_00000001"
    lmtrain("reshard", checkpoint, "--to", "pp=2", "--output", cut)
    file = cut / "rank_00001.safetensors"
    damage(file)
    process = start(*asked(cut, text, "parallel.pp=2", "--nproc", 2), fresh=True)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 65, output
    assert "error: rank 1 of 2 failed with exit code 65" in output
    assert f"{file} is damaged" in output
    assert "nll" not in output


@pytest.mark.wide
def test_torchrun_starts_the_processes_too(checkpoint: Path, text: Path, one: dict[str, Any]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "lmtrain",
         *asked(checkpoint, text, "parallel.tp=2", "--json")],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["results"][0]["nll_sum_nats"]
    assert found == pytest.approx(one["nll_sum_nats"], rel=1e-6)


@pytest.mark.wide
def test_half_precision_works_on_several_processes(checkpoint: Path, text: Path, one: dict[str, Any]) -> None:
    found = measured(checkpoint, text, "parallel.tp=2", "--nproc", 2, "--precision", "bf16")["results"][0]
    assert found["dtype"] == "bf16"
    assert found["nll_sum_nats"] == pytest.approx(one["nll_sum_nats"], rel=1e-2)
