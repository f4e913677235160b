"""Bugs that parallel training has had elsewhere, each planted by a patch inside a worker, to see that it is noticed.

`planted(name)` is in force inside a `with`; CASES says on which layout each bug must show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lmtrain.batch import Batch, StepBatches
from lmtrain.models.block_stack import Stack
from lmtrain.models.layers import flex_attention_block_masks, token_and_position_embedding
from lmtrain.models.model_settings import TransformerSettings
from lmtrain.models.objectives.causal_and_masked_objectives import MaskedLM
from lmtrain.parallel import (
    linear_forward_backward_products,
    parallel_model,
    tensor_parallel,
    tp_linears_and_collectives,
)
from lmtrain.parallel.blocks.dropout_random_numbers import DropoutSeeds
from lmtrain.parallel.mesh import Axis
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.parallel.tensor_parallel import VocabHead
from lmtrain.parallel.weights import reduce_and_clip_gradients
from lmtrain.parallel.weights.fsdp_sharding import ShardedWeights
from lmtrain.spec import Cut, Cuts, Split
from tests.layouts import pipeline_bugs

Patch = tuple[Any, str, Any]  # owner, name, what stands there instead
CASES = {
    "missing_all_reduce": "tied-tp2-fp32-micro1",
    "mean_instead_of_sum": "untied-tp2-sp-fp32-micro1",
    "replicated_weight_counted_for_each_rank": "tied-tp2-fp32-micro1",
    "sequence_gradients_not_summed": "untied-tp2-sp-fp32-micro1",
    "loss_scale_left_in_clipping": "gqa-tp2-fp16-micro1",
    "dropout_repeated_across_dp": "tied-dp2-zero1-fp32-micro1-dropout",
    "padded_column_wins": "tied-tp2-fp32-micro1",
    "wrong_head_order": "gqa-tp2-fp32-micro1",
    "last_microbatch_dropped": "window-dp2-zero2-fp32-micro4",
    "fsdp_averages": "parallel-dp2-zero3-fp32-micro1",
    "pairs_divided_by_tokens": "postnorm-dp2-zero1-fp32-micro1",
    "every_cut_has_a_first_token": "bert-tp2-sp-fp32-micro1",
    "documents_of_the_first_microbatch": "window-dp2-zero3-full-fp32-micro4-documents",
    "documents_shifted_by_one": "gqa-tp2-fp32-micro1-documents",
    "blocks_deaf_to_documents": "gqa-tp2-fp32-micro1-documents-blocks",
    "positions_not_restarted": "untied-dp2-zero2-fp32-micro1-documents",
    "positions_of_the_first_cut": "tied-tp2-sp-fp32-micro1-documents",
    "every_rank_scores_the_first_cut": "bert-tp2-sp-fp32-micro1",
    "sum_of_products_overwritten": "tied-tp2-bf16-micro4-summed",
    "sum_of_products_not_handed_to_fsdp": "untied-dp2-zero1-bf16-micro4-summed",
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, attribute, value in _PATCHES[name]():
            stack.enter_context(replaced(owner, attribute, value))
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _missing_all_reduce() -> Iterator[Patch]:
    """In backward alone: the input of a column-parallel linear keeps its own rank's part of the gradient."""
    right = tp_linears_and_collectives._ColumnLinear.backward

    def backward(ctx: Any, *grads: Tensor) -> Any:
        with replaced(tp_linears_and_collectives, "_start_sum", lambda x, axis, sequence: (x.contiguous(), None)):
            return right(ctx, *grads)

    yield tp_linears_and_collectives._ColumnLinear, "backward", staticmethod(backward)


def _mean_instead_of_sum() -> Iterator[Patch]:
    right = tp_linears_and_collectives._start_sum

    def mean(x: Tensor, axis: Axis, sequence: bool) -> Any:
        return right(x / axis.size, axis, sequence)

    yield tp_linears_and_collectives, "_start_sum", mean


def _replicated_weight_counted_for_each_rank() -> Iterator[Patch]:
    right = reduce_and_clip_gradients.gradient_norm

    def norm(gradients: Any, places: Any, *rest: Any) -> Tensor:
        return right(gradients, {name: replace(place, num_holders=1) for name, place in places.items()}, *rest)

    yield parallel_model, "gradient_norm", norm


def _sequence_gradients_not_summed() -> Iterator[Patch]:
    yield parallel_model, "sum_partial_gradients", lambda *_, **__: None


def _loss_scale_left_in_clipping() -> Iterator[Patch]:
    def clip(gradients: list[Tensor], norm: Tensor, clip_norm: float, loss_scale: float) -> None:
        factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0) / loss_scale
        torch._foreach_mul_(gradients, factor)

    yield parallel_model, "apply_clip", clip


def _dropout_repeated_across_dp() -> Iterator[Patch]:
    right = DropoutSeeds.seed_forward

    def enter(self: DropoutSeeds, *args: Any) -> None:
        self.dp = replace(self.dp, index=0)  # the loader has dealt out different samples by now
        right(self, *args)

    yield DropoutSeeds, "seed_forward", enter


def _padded_column_wins() -> Iterator[Patch]:
    yield VocabHead, "_padded_bias", lambda self: None


def _wrong_head_order() -> Iterator[Patch]:
    """Rows of the fused weight are dealt out as they stand, and not queries, keys and values each by heads."""
    right = TransformerSettings.cuts

    def cuts(self: TransformerSettings) -> Cuts:
        return {n: Cut(Split.COLUMN) if ".qkv." in n else cut for n, cut in right(self).items()}

    yield TransformerSettings, "cuts", cuts


def _last_microbatch_dropped() -> Iterator[Patch]:
    right = ParallelModel.forward_backward

    def forward_backward(self: ParallelModel, batches: StepBatches) -> Tensor:
        return right(self, replace(batches, microbatches=batches.microbatches[:-1]))

    yield ParallelModel, "forward_backward", forward_backward


def _fsdp_averages() -> Iterator[Patch]:
    yield FSDPModule, "set_gradient_divide_factor", lambda self, factor: None


def _pairs_divided_by_tokens() -> Iterator[Patch]:
    """Both terms of BERT's loss by the count of one."""
    right = ParallelModel.forward_backward

    def forward_backward(self: ParallelModel, batches: StepBatches) -> Tensor:
        return right(self, replace(batches, counts=batches.counts[:1] * len(batches.counts)))

    yield ParallelModel, "forward_backward", forward_backward


def _every_cut_has_a_first_token() -> Iterator[Patch]:
    """The pair is judged by the first token of the sequence, which one rank holds."""
    yield tensor_parallel, "broadcast_from_first", lambda x, axis: x


def _documents_of_the_first_microbatch() -> Iterator[Patch]:
    """The mask is made once, and not for each microbatch."""
    first: dict[str, Tensor] = {}
    right = Stack.block_contexts

    def block_contexts(self: Stack, batch: Batch) -> Any:
        return right(self, replace(batch, documents_BT=first.setdefault("documents", batch.documents_BT)))

    yield Stack, "block_contexts", block_contexts


def _documents_shifted_by_one() -> Iterator[Patch]:
    """The mask is of the labels' documents, and not of the tokens'."""
    right = Stack.block_contexts

    def block_contexts(self: Stack, batch: Batch) -> Any:
        return right(self, replace(batch, documents_BT=batch.documents_BT.roll(-1, dims=1)))

    yield Stack, "block_contexts", block_contexts


def _blocks_deaf_to_documents() -> Iterator[Patch]:
    right = flex_attention_block_masks._pair_rule

    def allowed(least: int, most: int, documents_BT: Tensor | None, not_padding_BT: Tensor | None) -> Any:
        return right(least, most, None, not_padding_BT)

    yield flex_attention_block_masks, "_pair_rule", allowed


def _positions_not_restarted() -> Iterator[Patch]:
    right = token_and_position_embedding.positions_of
    yield token_and_position_embedding, "positions_of", lambda batch: right(replace(batch, positions_BT=None))


def _positions_of_the_first_cut() -> Iterator[Patch]:
    """Of a row whose positions restart, every rank of a cut sequence reads the same part."""
    right = tensor_parallel.SequenceEmbedding.forward

    def forward(self: tensor_parallel.SequenceEmbedding, ids: Tensor) -> Tensor:
        length = ids.shape[-1] // self.axis.size
        first = ids.narrow(-1, 0, length).repeat(*(1,) * (ids.ndim - 1), self.axis.size)
        return right(self, first)

    yield tensor_parallel.SequenceEmbedding, "forward", forward


def _every_rank_scores_the_first_cut() -> Iterator[Patch]:
    """The positions of its own cut have other labels."""
    right = MaskedLM.prepare_batch

    def prepare_batch(self: MaskedLM, batch: Batch) -> Batch:
        with replaced(self, "shard_index", 0):
            return right(self, batch)

    yield MaskedLM, "prepare_batch", prepare_batch


def _sum_of_products_overwritten() -> Iterator[Patch]:
    """Of a step's microbatches the last alone counts."""
    right = linear_forward_backward_products._add_product

    def add(total: Tensor, *factors: Tensor) -> None:
        right(total.zero_(), *factors)

    yield linear_forward_backward_products, "_add_product", add


def _sum_of_products_not_handed_to_fsdp() -> Iterator[Patch]:
    yield ShardedWeights, "_set_total_gradients", lambda self, stage: None


_PATCHES: dict[str, Callable[[], Iterator[Patch]]] = {name: globals()[f"_{name}"] for name in CASES}
_PATCHES |= pipeline_bugs.PATCHES
