"""A checkpoint comes back as the model that was saved, with its tokenizer, its length and its facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmtrain.batch import Batch
from lmtrain.checkpoint.save.background_writer import CheckpointWriter
from lmtrain.checkpoint.unopened_model_on_disk import checkpoint_source
from lmtrain.errors import CheckpointError, MissingInputError, UsageError
from lmtrain.eval.load_model import load_for_eval, load_source
from lmtrain.eval.read_texts import TextInput
from lmtrain.eval.run_task import run as run_task
from lmtrain.eval.task import find_task
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> ParallelModel:
    settings = GPTSettings(num_layers=2, width=16, num_heads=2, vocab_size=tokenizer.vocab_size, seq_len=16)
    return build_parallel(settings, Fp32Settings(), ComputeSettings(), CPU, seed=3, training=False)


def save(folder: Path, model: ParallelModel, tokenizer: Tokenizer, state: dict[str, Any] | None = None) -> Path:
    if state is None:
        state = {"step": 7, "seq_len": 16, "model": model.settings.to_dict()}
    with CheckpointWriter(folder / "checkpoints", keep_last=1, asynchronous=False) as writer:
        writer.save(7, model.pieces(), state, {"tokenizer.json": tokenizer.to_bytes()})
    return folder


def logits(model: Any) -> torch.Tensor:
    tokens = torch.from_numpy(np.arange(12)[None])
    found: torch.Tensor = model.logits(Batch(tokens_BT=tokens, labels_BT=tokens))
    return found


def test_the_same_logits_come_back(tmp_path: Path, model: ParallelModel, tokenizer: Tokenizer) -> None:
    run = save(tmp_path, model, tokenizer)
    for path in (run, run / "checkpoints", run / "checkpoints" / "step_00000007"):
        loaded = load_for_eval(path, CPU, "fp32")
        assert torch.equal(logits(loaded.subject.model), logits(model))
    assert loaded.subject.tokenizer.fingerprint == tokenizer.fingerprint
    assert (loaded.subject.seq_len, loaded.subject.vocab_size) == (16, tokenizer.vocab_size)
    assert loaded.facts["step"] == 7
    assert loaded.facts["parameters"] == sum(p.numel() for p in model.parameters.values()) - 16 * padding(model)


def padding(model: ParallelModel) -> int:
    return model.settings.padded_vocab_size - model.settings.shape.vocab_size


def test_half_precision_computes_with_the_loaded_weights(
    tmp_path: Path, model: ParallelModel, tokenizer: Tokenizer
) -> None:
    loaded = load_for_eval(save(tmp_path, model, tokenizer), CPU, "bf16")
    assert loaded.subject.dtype == "bf16"
    difference = (logits(loaded.subject.model) - logits(model)).abs().max()
    assert 0 < difference < 0.05


def test_a_model_that_predicts_masked_tokens_loads_and_says_so(tmp_path: Path, tokenizer: Tokenizer) -> None:
    settings = BertSettings(num_layers=2, width=16, num_heads=2, vocab_size=tokenizer.vocab_size, seq_len=16)
    bert = build_parallel(settings, Fp32Settings(), ComputeSettings(), CPU, seed=3, training=False)
    run = save(tmp_path, bert, tokenizer)
    loaded = load_source(checkpoint_source(run), CPU, "fp32")
    assert not loaded.subject.causal
    assert torch.equal(logits(loaded.subject.model), logits(bert))
    with pytest.raises(CheckpointError, match="predicts masked tokens and cannot continue a text"):
        load_for_eval(run, CPU, "fp32")
    with pytest.raises(UsageError, match="--task=perplexity does not fit the model: it scores the next token"):
        run_task(find_task("perplexity"), loaded.subject, TextInput("text", ["some text"], "", "it"))


def test_refusals(tmp_path: Path, model: ParallelModel, tokenizer: Tokenizer) -> None:
    with pytest.raises(MissingInputError):
        load_for_eval(tmp_path / "absent", CPU, "fp32")
    wider = {"step": 7, "seq_len": 16, "model": model.settings.to_dict() | {"width": 32}}
    with pytest.raises(CheckpointError, match="has shape"):
        load_for_eval(save(tmp_path / "wider", model, tokenizer, wider), CPU, "fp32")
    with pytest.raises(CheckpointError, match="does not state its model, seq_len"):
        load_for_eval(save(tmp_path / "foreign", model, tokenizer, {"step": 7}), CPU, "fp32")
