"""A GPT and a BERT on disk, as runs leave them: tiny, with weights that no training has seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmtrain.checkpoint.save.background_writer import CheckpointWriter
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings
from lmtrain.parallel.build_parallel import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from lmtrain.tokenizer import base
from lmtrain.tokenizer.train import train_bpe

TEXT = "The old mill was a well-known house by the river, cold in winter; nobody in it dared to speak.\n"


@pytest.fixture(scope="session")
def tokenizer() -> base.Tokenizer:
    return train_bpe([TEXT], 300)


def save(folder: Path, settings: ModelSettings, tokenizer: base.Tokenizer) -> Path:
    model = build_parallel(
        settings, Fp32Settings(), ComputeSettings(), torch.device("cpu"), seed=3, training=False
    )
    state = {"step": 7, "seq_len": settings.shape.seq_len, "model": settings.to_dict()}
    with CheckpointWriter(folder / "checkpoints", keep_last=1, asynchronous=False) as writer:
        writer.save(7, model.pieces(), state, {"tokenizer.json": tokenizer.to_bytes()})
    return folder


@pytest.fixture(scope="session")
def gpt_run(tmp_path_factory: pytest.TempPathFactory, tokenizer: base.Tokenizer) -> Path:
    settings = GPTSettings(
        num_layers=2, width=16, num_heads=2, vocab_size=tokenizer.vocab_size, vocab_multiple=64, seq_len=16,
        init_std=0.3,
    )  # fmt: skip
    return save(tmp_path_factory.mktemp("gpt"), settings, tokenizer)


@pytest.fixture(scope="session")
def bert_run(tmp_path_factory: pytest.TempPathFactory, tokenizer: base.Tokenizer) -> Path:
    settings = BertSettings(num_layers=2, width=16, num_heads=2, vocab_size=tokenizer.vocab_size, seq_len=16)
    return save(tmp_path_factory.mktemp("bert"), settings, tokenizer)
