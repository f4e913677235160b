"""From a model that knows nothing of processes to one that trains: `build_parallel` and the verbs of ParallelModel.

Called by train and eval. The order of application is the reason for this file. On meta, where nothing costs memory:
cut into stages, cut over tensors, recompute, compile, shard. Then give it memory, tie what must be one, and draw first
weights by name, each rank its blocks of them, so that no layout changes a weight.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby, islice
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
from lmtrain.parallel.collectives import all_reduce
from lmtrain.parallel.compile import apply_compile
from lmtrain.parallel.compute_settings import ComputeSettings
from lmtrain.parallel.dropout import Streams, apply_streams
from lmtrain.parallel.grads import apply_clip, gradient_norm, sum_partial_gradients
from lmtrain.parallel.mesh import Mesh, build_mesh
from lmtrain.parallel.pipeline.executor import OneStage, Pipeline
from lmtrain.parallel.precision import WORK_DTYPE, LossScale, MasterWeights
from lmtrain.parallel.precision_settings import PrecisionSettings
from lmtrain.parallel.recompute import apply_recompute
from lmtrain.parallel.recompute_settings import NoRecomputeSettings, RecomputeSettings
from lmtrain.parallel.sharding import ShardedWeights, apply_data_parallel
from lmtrain.parallel.shards import fill, owned, pieces_of
from lmtrain.parallel.split_backward import apply_deferral
from lmtrain.parallel.tensor.layers import apply_tensor_parallel
from lmtrain.parallel.tensor.logits import whole_logits
from lmtrain.parallel.tensor.vocabulary import cross_entropy_sum, hit_sum
from lmtrain.parallel.tied import copies, sum_gradients
from lmtrain.parallel.whole_weights import Spread
from lmtrain.piece import Piece
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.placement.places import Place
from lmtrain.placement.stages import places_of_rank, stages_of_rank
from lmtrain.runtime.faults import fault_point
from lmtrain.schedules.table import Action, Kind


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
    dtype = WORK_DTYPE[precision.kind]
    sequence = parallel.sequence_parallel and mesh.tp.size > 1
    streams = Streams(seed or 0, mesh.tp, mesh.dp, sequence=sequence, uses_dropout=settings.uses_dropout)
    objective = build_objective(settings.terms)
    if mesh.tp.size > 1:
        objective.cross_entropy = partial(cross_entropy_sum, axis=mesh.tp)
        objective.hits = partial(hit_sum, axis=mesh.tp)

    stages: dict[int, Any] = {}
    for stage in stages_of_rank(settings, parallel, mesh.pp.index):
        with torch.device("meta"):
            model = importlib.import_module(f"lmtrain.models.{settings.kind}").build(settings)
        starts = model.starts() if seed is not None else None
        model.cut(stage.layers, first=stage.first, last=stage.last)
        apply_tensor_parallel(model, mesh.tp, sequence=sequence)
        if parallel.splits_backward:
            apply_deferral(model)
        apply_streams(model, streams)
        apply_recompute(model, recompute, streams, compiled=compute.compile)
        if compute.compile:
            apply_compile(model, objective)
        if shards:  # outermost, so that its hooks see whole blocks
            apply_data_parallel(model, mesh, parallel.zero, dtype)
        model.to_empty(device=device)
        apply_ties(model)  # leaving meta made two tensors of one
        model.train(training)
        stages[stage.number] = model

    weights = ShardedWeights(stages, parallel.zero) if shards else MasterWeights(stages.values(), precision)
    places = places_of_rank(settings, parallel, mesh.coordinate)
    places |= copies(settings.ties(), weights.master, places)
    fill(weights.master, {name: places[name] for name in weights.master}, starts, seed or 0)
    weights.publish()
    runner = (
        Pipeline(parallel.schedule, mesh, dtype, device, shares=mesh.tp.size > 1 and not sequence)
        if mesh.pp.size > 1
        else OneStage()
    )
    return ParallelModel(
        stages, runner, objective, weights, LossScale(precision), settings, device, mesh,
        {name: places[name] for name in weights.master}, streams,
    )  # fmt: skip


class ParallelModel:
    """What train and eval see of a model, whatever its layout. No caller asks which axes exist.

    All ranks call the same verbs in the same order, those of one dp copy with the same batches.
    """

    def __init__(
        self,
        stages: dict[int, Any],
        runner: OneStage | Pipeline,
        objective: CausalLM,
        masters: MasterWeights | ShardedWeights,
        loss_scale: LossScale,
        settings: ModelSettings,
        device: torch.device,
        mesh: Mesh,
        places: Mapping[str, Place],
        streams: Streams,
    ) -> None:
        self.stages, self.runner, self.objective, self.masters = stages, runner, objective, masters
        self.loss_scale, self.settings, self.device = loss_scale, settings, device
        self.mesh, self.places, self.streams = mesh, places, streams
        self.last_stage = mesh.layout.pp * mesh.layout.vp - 1

    @property
    def model(self) -> Any:
        """The model of a run without a pipeline."""
        (model,) = self.stages.values()
        return model

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
        self._turn(training=True)
        self.masters.clear_gradients()
        count = len(batches.microbatches)

        def compute(stage: int, index: int, hidden_BTD: Tensor | None) -> Tensor:
            self.streams.enter(batches.step, index, stage)
            batch = self._to_device(batches.microbatches[index])
            hidden_BTD = self.stages[stage](batch, hidden_BTD)
            if stage < self.last_stage:
                return hidden_BTD
            sums = self.objective.loss_sums_of_hidden(self.stages[stage], hidden_BTD, batch)
            # because: numbers of Python need no copy to the device
            return torch.stack([one / num for one, num in zip(sums.unbind(), batches.counts, strict=True)])

        shape = self._hidden_shape(batches.microbatches[0])
        shares = self.runner.train(count, compute, shape, self.loss_scale.value, Watched(self.masters, count))
        self.masters.collect()
        return self._to_all(shares, count, (len(self.terms),))

    def finish_gradients(self, clip_norm: float | None) -> Tensor:
        """Sum what is partial, clip in place; gives the norm before clipping, still on the device."""
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if self.streams.splits_all:
            sum_partial_gradients(gradients, self.places, self.mesh.tp)
        sum_gradients(gradients, self.settings.ties(), self.mesh.pp, self.runner.ends)
        norm = gradient_norm(gradients, self.places, self.mesh.world, self.device)
        apply_clip(list(gradients.values()), norm, clip_norm, self.loss_scale.value)
        return norm / self.loss_scale.value

    @torch.no_grad()
    def valid_sums(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """Of each batch [2, terms]: summed losses and numbers of hits, without gradients, over all dp copies."""
        self._turn(training=False)
        for some in _alike(batches, self.runner.at_once):

            def compute(stage: int, index: int, hidden_BTD: Tensor | None, some: list[Batch] = some) -> Tensor:
                batch = self._to_device(some[index])
                hidden_BTD = self.stages[stage](batch, hidden_BTD)
                if stage < self.last_stage:
                    return hidden_BTD
                return self.objective.valid_sums_of_hidden(self.stages[stage], hidden_BTD, batch)

            sums = self.runner.forward(len(some), compute, self._hidden_shape(some[0]))
            yield from self._to_all(sums, len(some), (2, len(self.terms)))
        self._turn(training=True)

    @torch.no_grad()
    def logits(self, batch: Batch, keep_BT: Tensor | None = None) -> Tensor:
        """fp32 logits over the true vocabulary, of all positions or of the kept ones only, on every rank."""
        self._turn(training=False)
        keep_BT = None if keep_BT is None else keep_BT.to(self.device)

        def run(batch: Batch) -> Tensor | None:
            compute = lambda stage, index, hidden_BTD: self.stages[stage](batch, hidden_BTD)  # noqa: E731
            return self.runner.forward(1, compute, self._hidden_shape(batch)).get(0)

        model, sequence = self.stages.get(self.last_stage), self.streams.splits_all
        found = whole_logits(run, model, self._to_device(batch), keep_BT, self.mesh.tp, sequence=sequence)
        shape = batch.tokens_BT.shape if keep_BT is None else (int(keep_BT.sum()),)
        vocab_size = self.settings.shape.vocab_size
        none = torch.zeros(*shape, vocab_size, device=self.device)
        logits = none if found is None else found[..., :vocab_size].float()
        # collective: logits of the last stage to all, over pp
        return all_reduce(logits.contiguous(), self.mesh.pp)

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

    def _hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        rows, length = batch.tokens_BT.shape
        return rows, length // self.mesh.tp.size if self.streams.splits_all else length, self.settings.shape.width

    def _to_all(self, found: Mapping[int, Tensor], count: int, shape: tuple[int, ...]) -> Tensor:
        """[count, *shape] of all dp copies together, from the last stage to every rank."""
        none = torch.zeros(shape, device=self.device)
        mine = torch.stack([found.get(index, none) for index in range(count)])
        # collective: shares of the loss, or validation's sums, over dp; then what the last stage has to all stages
        return all_reduce(all_reduce(mine, self.mesh.dp), self.mesh.pp)

    def _turn(self, *, training: bool) -> None:
        for stage in self.stages.values():
            stage.train(training)


class Watched:
    """Tells the weights of every action, so that gradients are sent when they are whole."""

    def __init__(self, weights: MasterWeights | ShardedWeights, count: int) -> None:
        self.weights, self.last = weights, count - 1

    def begin(self, action: Action) -> None:
        fault_point("forward" if action.kind is Kind.FORWARD else "backward")
        self.weights.begin(action, action.microbatch == self.last)

    def done(self, action: Action) -> None:
        self.weights.done(action, action.microbatch == self.last)


def _alike(batches: Iterable[Batch], most: int) -> Iterator[list[Batch]]:
    """Neighbours of one shape, at most so many together."""
    for _, some in groupby(batches, lambda batch: batch.tokens_BT.shape):
        while together := list(islice(some, most)):
            yield together
