"""Bugs that pipelines have had elsewhere, each a patch inside a worker; bugs.py plants them.

CASES says on which layout each bug must show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lmtrain.batch import Batch
from lmtrain.models.block_stack import Stack
from lmtrain.models.objectives.causal_and_masked_objectives import CausalLM
from lmtrain.parallel import build_parallel_model
from lmtrain.parallel.blocks.dropout_random_numbers import DropoutSeeds
from lmtrain.parallel.pipeline.execute_schedule import Pipeline
from lmtrain.parallel.weights import reduce_and_clip_gradients
from lmtrain.placement import layers_and_shards_of_ranks

Patch = tuple[Any, str, Any]  # owner, name, what stands there instead
CASES = {
    "tied_copies_not_summed": "deep-pp2-dp1-fp32-micro4",
    "tied_weight_counted_twice": "deep-pp2-dp1-fp32-micro4",
    "labels_shifted_at_the_last_stage": "deepgqa-pp2-dp1-fp32-micro4",
    "pipeline_drops_the_last_microbatch": "deepgqa-pp2-dp1-fp32-micro4",
    "virtual_stages_swapped": "deepgqa-pp2-vp2-interleaved-dp1-fp32-micro4",
    "padding_unknown_to_later_stages": "deepbert-pp2-dp1-fp32-micro4",
    "documents_unknown_to_later_stages": "deepgqa-pp2-dp1-fp32-micro4-documents",
    "pairs_divided_by_tokens": "deeppost-pp2-dp1-fp32-micro4",
}
# because: with dropout a pipeline is not compared with one process; tests of masks notice these
DROPOUT = ("dropout_repeated_under_recompute", "dropout_repeated_over_microbatches", "dropout_repeated_over_stages")


def _tied_copies_not_summed() -> Iterator[Patch]:
    yield reduce_and_clip_gradients.TiedSums, "start", lambda *_: None


def _tied_weight_counted_twice() -> Iterator[Patch]:
    yield reduce_and_clip_gradients, "is_copy", lambda name, place: False


def _labels_shifted_at_the_last_stage() -> Iterator[Patch]:
    right = CausalLM.loss_sums

    def loss_sums(self: CausalLM, model: Any, hidden_BTD: Tensor, batch: Batch, *rest: Any) -> Tensor:
        labels_BT = batch.labels_BT.roll(1, dims=1) if model.embedding is None else batch.labels_BT
        return right(self, model, hidden_BTD, replace(batch, labels_BT=labels_BT), *rest)

    yield CausalLM, "loss_sums", loss_sums


def _pipeline_drops_the_last_microbatch() -> Iterator[Patch]:
    right = Pipeline.train

    def train(self: Pipeline, count: int, *rest: Any) -> dict[int, Tensor]:
        return right(self, count - 1, *rest)

    yield Pipeline, "train", train


def _virtual_stages_swapped() -> Iterator[Patch]:
    right = layers_and_shards_of_ranks.stages_of_rank

    def stages_of_rank(*args: Any) -> list[layers_and_shards_of_ranks.Stage]:
        one, other = right(*args)
        return [replace(one, layers=other.layers), replace(other, layers=one.layers)]

    yield build_parallel_model, "stages_of_rank", stages_of_rank


def _padding_unknown_to_later_stages() -> Iterator[Patch]:
    """Segments and padding, which every stage reads from its own batch."""
    right = Stack.block_contexts

    def block_contexts(self: Stack, batch: Batch) -> Any:
        if self.embedding is None and batch.not_padding_BT is not None:
            batch = replace(batch, segments_BT=None, not_padding_BT=torch.ones_like(batch.not_padding_BT))
        return right(self, batch)

    yield Stack, "block_contexts", block_contexts


def _documents_unknown_to_later_stages() -> Iterator[Patch]:
    right = Stack.block_contexts

    def block_contexts(self: Stack, batch: Batch) -> Any:
        return right(self, batch if self.embedding is not None else replace(batch, documents_BT=None))

    yield Stack, "block_contexts", block_contexts


def _dropout_repeated_under_recompute() -> Iterator[Patch]:
    """What is computed again draws what another microbatch drew."""

    def contexts(self: DropoutSeeds) -> Any:
        return nullcontext(), self.use_microbatch(replace(self.current, number=0))

    yield DropoutSeeds, "contexts", contexts


def _dropout_repeated_over_microbatches() -> Iterator[Patch]:
    right = DropoutSeeds.seed_forward
    yield DropoutSeeds, "seed_forward", lambda self, step, index, stage=0: right(self, step, 0, stage)


def _dropout_repeated_over_stages() -> Iterator[Patch]:
    right = DropoutSeeds.seed_forward
    yield DropoutSeeds, "seed_forward", lambda self, step, index, stage=0: right(self, step, index)


PATCHES: dict[str, Callable[[], Iterator[Patch]]] = {
    name: globals()[f"_{name}"]
    for name in (*CASES, *DROPOUT)
    if f"_{name}" in globals()  # or it is one of bugs.py
}
