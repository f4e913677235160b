"""From a model that knows nothing of processes to one that trains: `build_parallel` and the verbs of ParallelModel.

Called by train and eval. The order of application is the reason for this file. On meta, where nothing costs memory:
cut over tensors, recompute, compile, shard. Then give it memory, tie what must be one, and draw first weights by name,
each rank its blocks of them, so that no layout changes a weight.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lmtrain.batch import Batch
from lmtrain.data.loader import StepBatches
from lmtrain.layout import Layout
from lmtrain.models.init import apply_ties
from lmtrain.models.model_settings import ModelSettings
from lmtrain.objectives.causal_lm import CausalLM
from lmtrain.objectives.masked_lm import build_objective
from lmtrain.optim.whole import Alone, Whole
from lmtrain.parallel.blocks import fill, owned, pieces_of
from lmtrain.parallel.collectives import all_reduce
from lmtrain.parallel.compile import apply_compile
from lmtrain.parallel.compute_settings import ComputeSettings
from lmtrain.parallel.data import ShardedWeights, apply_data_parallel
from lmtrain.parallel.grads import apply_clip, gradient_norm, sum_partial_gradients
from lmtrain.parallel.logits import whole_logits
from lmtrain.parallel.mesh import Mesh, build_mesh
from lmtrain.parallel.parallel_settings import ParallelSettings
from lmtrain.parallel.placement import Place, place_all
from lmtrain.parallel.precision import WORK_DTYPE, LossScale, MasterWeights
from lmtrain.parallel.precision_settings import PrecisionSettings
from lmtrain.parallel.recompute import apply_recompute
from lmtrain.parallel.recompute_settings import NoRecomputeSettings, RecomputeSettings
from lmtrain.parallel.streams import Streams, apply_streams
from lmtrain.parallel.tensor import apply_tensor_parallel
from lmtrain.parallel.vocabulary import cross_entropy_sum, hit_sum
from lmtrain.parallel.whole import Spread
from lmtrain.piece import Piece
from lmtrain.runtime.faults import fault_point


def build_parallel(
    settings: ModelSettings,
    precision: PrecisionSettings,
    compute: ComputeSettings,
    device: torch.device,
    *,
    seed: int | None,
    training: bool,
    mesh: Mesh | None = None,
    parallel: ParallelSettings = ParallelSettings(),
    recompute: RecomputeSettings = NoRecomputeSettings(),
    always_shard: bool = False,
) -> ParallelModel:
    """One process unless there is a `mesh`. `seed=None` leaves the weights at zero, to be loaded from a checkpoint.

    `always_shard` takes the data-parallel path on one process too, to measure what it costs.
    """
    mesh = mesh or build_mesh(Layout(), device)
    shards = mesh.dp.size > 1 or always_shard
    sequence = parallel.sequence_parallel and mesh.tp.size > 1
    streams = Streams(seed or 0, mesh.tp, mesh.dp, sequence=sequence, uses_dropout=settings.uses_dropout)
    objective = build_objective(settings.terms)
    with torch.device("meta"):
        model = importlib.import_module(f"lmtrain.models.{settings.kind}").build(settings)

    apply_tensor_parallel(model, mesh.tp, sequence=sequence)
    if mesh.tp.size > 1:
        objective.cross_entropy = partial(cross_entropy_sum, axis=mesh.tp)
        objective.hits = partial(hit_sum, axis=mesh.tp)
    apply_streams(model, streams)
    apply_recompute(model, recompute, streams, compiled=compute.compile)
    if compute.compile:
        apply_compile(model, objective)
    if shards:  # outermost, so that its hooks see whole blocks
        apply_data_parallel(model, mesh, parallel.zero, WORK_DTYPE[precision.kind])

    model.to_empty(device=device)
    apply_ties(model)  # leaving meta made two tensors of one
    places = place_all(settings.weights(), settings.cuts(), mesh.layout, mesh.coordinate, settings.shape.vocab_size)
    weights = ShardedWeights(model, parallel.zero) if shards else MasterWeights(model, precision)
    fill(weights.master, places, model.starts() if seed is not None else None, seed or 0)
    weights.publish()
    model.train(training)
    return ParallelModel(model, objective, weights, LossScale(precision), settings, device, mesh, places, streams)


class ParallelModel:
    """What train and eval see of a model, whatever its layout. No caller asks which axes exist.

    All ranks call the same verbs in the same order, those of one dp copy with the same batches.
    """

    def __init__(
        self,
        model: Any,
        objective: CausalLM,
        masters: MasterWeights | ShardedWeights,
        loss_scale: LossScale,
        settings: ModelSettings,
        device: torch.device,
        mesh: Mesh,
        places: Mapping[str, Place],
        streams: Streams,
    ) -> None:
        self.model, self.objective, self.masters, self.loss_scale = model, objective, masters, loss_scale
        self.settings, self.device, self.mesh, self.places, self.streams = settings, device, mesh, places, streams

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The fp32 weights, or this rank's shards of them, that an optimizer updates; each tied weight once."""
        return self.masters.master

    @property
    def num_parameters(self) -> int:
        """Of the whole model, without padding."""
        return self.settings.num_parameters

    @property
    def terms(self) -> tuple[str, ...]:
        """What the loss adds up, in the order of every tensor of shares and sums."""
        return self.objective.terms

    @property
    def whole(self) -> Whole:
        """How an optimizer sees whole weights."""
        if self.mesh.world.size > 1:
            return Spread(self.places, self.mesh)
        return Alone({name: place.sections for name, place in self.places.items() if place.cut.sections})

    def forward_backward(self, batches: StepBatches) -> Tensor:
        """Gradients of the step's mean loss; gives [microbatches, terms], each one's share of the mean of each term.

        The division by the global counts happens here, before backward, so that gradients need no rescaling after.
        """
        self.model.train()
        self.masters.clear_gradients()
        shares, count = [], len(batches.microbatches)
        for index, batch in enumerate(batches.microbatches):
            self.masters.microbatch(last=index == count - 1)
            self.streams.enter(batches.step, index)
            fault_point("forward")
            sums = self.objective.loss_sums(self.model, self._to_device(batch))
            # because: numbers of Python need no copy to the device
            terms = torch.stack([one / num for one, num in zip(sums.unbind(), batches.counts, strict=True)])
            loss = terms.sum()
            fault_point("backward")
            torch.autograd.backward(loss * self.loss_scale.value if self.loss_scale.dynamic else loss)
            shares.append(terms.detach())
        self.masters.collect()
        # collective: each microbatch's share of the loss over dp, once a step
        return all_reduce(torch.stack(shares), self.mesh.dp)

    def finish_gradients(self, clip_norm: float | None) -> Tensor:
        """Sum what is partial, clip in place; gives the norm before clipping, still on the device."""
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if self.streams.splits_all:
            sum_partial_gradients(gradients, self.places, self.mesh.tp)
        norm = gradient_norm(gradients, self.places, self.mesh.world)
        apply_clip(list(gradients.values()), norm, clip_norm, self.loss_scale.value)
        return norm / self.loss_scale.value

    @torch.no_grad()
    def valid_sums(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """Of each batch [2, terms]: summed losses and numbers of hits, without gradients, over all dp copies."""
        self.model.eval()
        for batch in batches:
            # collective: validation's sums over dp, once a batch
            yield all_reduce(self.objective.valid_sums(self.model, self._to_device(batch)), self.mesh.dp)
        self.model.train()

    @torch.no_grad()
    def logits(self, batch: Batch, keep_BT: Tensor | None = None) -> Tensor:
        """fp32 logits over the true vocabulary, of all positions or of the kept ones only, on every tp rank."""
        self.model.eval()
        keep_BT = None if keep_BT is None else keep_BT.to(self.device)
        sequence = self.streams.splits_all
        logits = whole_logits(self.model, self._to_device(batch), keep_BT, self.mesh.tp, sequence=sequence)
        return logits[..., : self.settings.shape.vocab_size].float()

    def pieces(self) -> list[Piece]:
        return self.place(self.parameters, "model")

    def place(self, tensors: Mapping[str, Tensor], prefix: str) -> list[Piece]:
        """Where tensors shaped like this rank's parameters stand in the whole: all blocks that it holds, for loading.

        Each key is, or ends in, a parameter's name. Padding of the vocabulary is a layout's business and in no block.
        """
        return pieces_of(tensors, self.places, prefix)

    def owned(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Those that this rank saves: over all ranks, each number once."""
        return owned(pieces, self.places)

    def _to_device(self, batch: Batch) -> Batch:
        return batch.map(lambda array: array.to(self.device, non_blocking=True))
