"""A run's settings as the planner takes them. Called by the verbs that plan a run before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmtrain.models.model_settings import ModelSettings
    from lmtrain.plan.ours import Planned
    from lmtrain.train.config import RunConfig


def planned_of(config: RunConfig, model: ModelSettings) -> Planned:
    """`model` is the config's with the tokenizer's vocabulary."""
    from lmtrain.plan.ours import Planned

    return Planned(
        model=model, parallel=config.parallel, precision=config.precision, compute=config.compute, optim=config.optim,
        recompute=config.recompute, micro_batch=config.train.micro_batch, global_batch=config.train.global_batch,
        document_mask=getattr(config.data, "document_mask", False),
    )  # fmt: skip
