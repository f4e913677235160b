"""Loading of a model on disk for scoring: on a device, in a precision, on the ranks of a layout.

Called by `lmtrain eval`, `lmtrain generate` and the Python interface. Each rank reads and holds only its shard of the
weights, once; the optimizer's state is not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmtrain.checkpoint.unopened_model_on_disk import ModelSource, check_causal, checkpoint_source
from lmtrain.checkpoint.view_with_ema_as_weights import WeightSet
from lmtrain.config.build_typed_settings import build_settings
from lmtrain.errors import DataError
from lmtrain.eval.score_targets import Subject
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, PrecisionSettings
from lmtrain.parallel.mesh import Mesh
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.runtime.machine.choose_device import device_name


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to be evaluated, with facts about it for the report."""

    subject: Subject
    model: ParallelModel  # that of the subject
    facts: dict[str, Any]  # checkpoint, step and device, printed under every result


def load_for_eval(
    path: Path, device: torch.device, precision: str, weights: WeightSet = "model"
) -> LoadedModel:
    """Load a causal model onto `device` of this process, in `precision` (such as "bf16"). `path` is a checkpoint, or a
    run or checkpoints folder, whose latest checkpoint is loaded. With `weights` "ema" the average of its weights is
    loaded. Raise CheckpointError if there is no average, or if the model is not causal.
    """
    source = checkpoint_source(path, weights)
    check_causal(source)
    return load_source(source, device, precision)


def load_source(
    source: ModelSource,
    device: torch.device,
    precision: str,
    mesh: Mesh | None = None,
    parallel: ParallelSettings = ParallelSettings(),
) -> LoadedModel:
    """Load the weights of the model `source` onto `device`, in `precision` (such as "bf16"). With `mesh`, load only
    this rank's shard by the layout `parallel`.
    """
    weights, tokenizer = source.open(), source.tokenizer()
    settings = weights.settings
    model = build_parallel(
        settings,
        build_settings(PrecisionSettings, {"kind": precision}, "precision"),
        ComputeSettings(compile=False),  # because: torch.compile would recompile for each length of text
        device, seed=None, training=False, mesh=mesh, parallel=parallel,
    )  # fmt: skip
    model.load(weights.load_into)
    subject = Subject(
        model=model,
        tokenizer=tokenizer,
        seq_len=settings.shape.seq_len,
        vocab_size=settings.shape.vocab_size,
        dtype=precision,
        causal=settings.shape.causal,
        pairs="pair" in settings.terms,
    )
    check_vocabulary(subject)
    facts = source.facts | {"parameters": settings.num_parameters, "device": device_name(device)}
    return LoadedModel(subject=subject, model=model, facts=facts)


def check_vocabulary(subject: Subject) -> None:
    """Raise DataError if the model's tokenizer has more tokens than the model's vocabulary."""
    if subject.tokenizer.vocab_size > subject.vocab_size:
        raise DataError(
            f"The tokenizer has {subject.tokenizer.vocab_size} tokens, but the model only {subject.vocab_size}. "
            "Evaluate a checkpoint with the tokenizer that it was trained with."
        )
