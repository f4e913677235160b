"""A checkpoint as something to evaluate: the model on a device, its tokenizer, and what must be said of both.

Called by `lmtrain eval` and `lmtrain generate`. Only weights are read; the optimizer's state stays on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmtrain.checkpoint.disk.format import MANIFEST
from lmtrain.checkpoint.reader import CheckpointReader
from lmtrain.checkpoint.store import resolve
from lmtrain.config.build import build_settings
from lmtrain.errors import CheckpointError
from lmtrain.eval.runner import Subject, check_vocabulary
from lmtrain.parallel.apply import build_parallel
from lmtrain.parallel.compute_settings import ComputeSettings
from lmtrain.parallel.precision_settings import PrecisionSettings
from lmtrain.runtime.device import device_name
from lmtrain.tokenizer.base import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Loaded:
    subject: Subject
    facts: dict[str, Any]  # which checkpoint, on what; printed under every result


def load_for_eval(path: Path, device: torch.device, precision: str) -> Loaded:
    """From a checkpoint, a run folder or its checkpoints folder; of several the latest."""
    folder = resolve(path)
    reader = CheckpointReader(folder)
    missing = [key for key in ("model", "seq_len", "step") if key not in reader.state]
    if missing:
        raise CheckpointError(
            f"{folder} does not say its {', '.join(missing)}. Give a checkpoint that a run has written."
        )
    settings = reader.checked_model()  # because: nothing of a stated size is built before the tensors have that size
    for key, expected in (("seq_len", settings.shape.seq_len), ("step", reader.step)):
        if reader.state[key] != expected:
            raise CheckpointError(
                f"{folder / MANIFEST} contradicts itself: its state.{key} is {str(reader.state[key])[:100]} and by the "
                f"rest it is {expected}. Restore it from a copy."
            )
    if not settings.shape.causal:
        raise CheckpointError(
            f"{folder} is a {settings.kind} model, which sees both sides and cannot write on. Give a causal model; "
            "how well this one predicts masked tokens is in its run's validation rows."
        )
    numbers = build_settings(PrecisionSettings, {"kind": precision}, "precision")
    model = build_parallel(settings, numbers, ComputeSettings(), device, seed=None, training=False)
    model.load(reader.load_into)
    subject = Subject(
        model=model,
        tokenizer=Tokenizer.from_bytes(reader.read_file("tokenizer.json")),
        seq_len=settings.shape.seq_len,
        vocab_size=settings.shape.vocab_size,
        dtype=precision,
    )
    check_vocabulary(subject)
    facts = {
        "checkpoint": str(folder),
        "step": reader.step,
        "parameters": model.num_parameters,
        "device": device_name(device),
    }
    return Loaded(subject=subject, facts=facts)
