"""Tiny models on disk, as runs leave them, with weights that no training has seen."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from lmtrain.checkpoint.save.background_writer import CheckpointWriter
from lmtrain.models.model_settings import ModelSettings
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_bpe

TEXT = "The old mill was a well-known house by the river, cold in winter; nobody in it dared to speak.\n"
VOCAB_SIZE = 300


@cache
def small_tokenizer() -> Tokenizer:
    return train_bpe([TEXT], VOCAB_SIZE)


def save_run(folder: Path, settings: ModelSettings) -> Path:
    """Save a model with drawn weights as a run's checkpoint of step 7; return the run's folder."""
    model = build_parallel(settings, Fp32Settings(), ComputeSettings(), torch.device("cpu"), seed=3, training=False)
    state = {"step": 7, "seq_len": settings.shape.seq_len, "model": settings.to_dict()}
    with CheckpointWriter(folder / "checkpoints", keep_last=1, asynchronous=False) as writer:
        writer.save(7, model.pieces(), state, {"tokenizer.json": small_tokenizer().to_bytes()})
    return folder
