"""ParallelModel, the interface of train and eval to a model of any layout. Built by apply.build_parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lmtrain.batch import Batch, StepBatches
from lmtrain.layout import Piece
from lmtrain.objectives.objective import CausalLM
from lmtrain.observe.measure import phases
from lmtrain.optim.adamw import OnePassAdamW
from lmtrain.optim.whole_tensors import LocalTensors, WholeTensors
from lmtrain.parallel.blocks.dropout import Noise
from lmtrain.parallel.collectives import all_reduce
from lmtrain.parallel.inference import Inference, chunks
from lmtrain.parallel.pipeline.executor import TrainingObserver
from lmtrain.parallel.shards import owned, pieces_of
from lmtrain.parallel.weights.gathered_weights import ShardedTensors
from lmtrain.parallel.weights.grads import (
    TiedSums,
    Weights,
    apply_clip,
    clip_factor,
    gradient_norm,
    sum_partial_gradients,
    sum_tied_gradients,
)
from lmtrain.parallel.weights.precision import LossScale
from lmtrain.placement.places import Place
from lmtrain.spec import LanguageModel


@dataclass(eq=False)
class ParallelModel(Inference):
    """A model on a mesh. No caller depends on which axes exist.

    Collective: all ranks call the same methods in the same order; the ranks of a dp index pass the same batches.
    """

    objective: CausalLM
    masters: Weights
    tied: TiedSums
    loss_scale: LossScale
    places: Mapping[str, Place]
    noise: Noise
    applied: Sequence[str]  # log lines of the applied transformations
    compiled: bool
    one_pass_optimizer: OnePassAdamW | None = None  # an optimizer that clips and rounds within its update

    @property
    def model(self) -> LanguageModel:
        """The model of a run without a pipeline."""
        (model,) = self.stages.values()
        return model

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The fp32 weights, or this rank's shards of them, that the optimizer updates; tied weights once."""
        return self.masters.master

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the whole model, without padding."""
        return self.settings.num_parameters

    @property
    def terms(self) -> tuple[str, ...]:
        """The loss terms, in the order of every tensor of shares and sums."""
        return self.objective.terms

    @property
    def whole_tensors(self) -> WholeTensors:
        """An optimizer's access to whole weights."""
        if self.mesh.world.size > 1:
            return ShardedTensors(self.places, self.mesh)
        return LocalTensors({name: place.sections for name, place in self.places.items() if place.cut.sections})

    def forward_backward(self, batches: StepBatches) -> Tensor:
        """Compute the gradients of the step's mean loss; return [micro-batches, terms], shares of each term's mean.

        The division by the global counts happens here, before backward, so that gradients need no rescaling.
        """
        self.turn(training=True)
        self.tied.wait()  # because: the previous step may have ended without finish_gradients
        count = len(batches.microbatches)
        self.masters.clear_gradients(count)

        def compute(stage: int, index: int, hidden_BTD: Tensor | None) -> Tensor:
            self.noise.enter(batches.step, index, stage)
            batch = self._given(batches.microbatches[index], stage)
            hidden_BTD = self.stages[stage](batch, hidden_BTD)
            if stage < self.last_stage:
                return hidden_BTD
            sums = self.objective.loss_sums(self.stages[stage], hidden_BTD, batch)
            # because: dividing by Python numbers needs no copy to the device
            return torch.stack([one / num for one, num in zip(sums.unbind(), batches.counts, strict=True)])

        shape = self.hidden_shape(batches.microbatches[0])
        shares = self.runner.train(count, compute, shape, self.loss_scale.value, TrainingObserver(self.masters, count))
        self.masters.collect_gradients()
        return self._to_all(shares, count, (len(self.terms),))

    def finish_gradients(self, clip_norm: float | None) -> Tensor:
        """Sum partial gradients and clip, now or in the update; return the norm before clipping, on the device."""
        phases.enter("optimizer")
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if self.sequence_parallel:
            sum_partial_gradients(gradients, self.places, self.mesh.tp)
        sum_tied_gradients(gradients, self.settings.ties(), self.tied)
        norm = gradient_norm(gradients, self.places, self.mesh.world, self.device)
        if self.one_pass_optimizer is None:
            apply_clip(list(gradients.values()), norm, clip_norm, self.loss_scale.value)
        else:
            self.one_pass_optimizer.gradient_factor = clip_factor(norm, clip_norm, self.loss_scale.value)
        return norm / self.loss_scale.value

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Attach the optimizer before its first step: a one-pass optimizer receives the half-precision copies."""
        if isinstance(optimizer, OnePassAdamW):
            self.one_pass_optimizer, optimizer.compute_copies = optimizer, self.masters.compute_copies

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Run an optimizer step and publish the new weights to the model."""
        optimizer.step()
        self.masters.publish(already_written=optimizer is self.one_pass_optimizer)

    def load(self, fill: Callable[[list[Piece]], None], also: Sequence[Piece] = ()) -> None:
        """Call `fill` with the weights' pieces and those of `also`, then publish the new weights to the model."""
        fill([*self.pieces(), *also])
        self.masters.publish()

    @torch.no_grad()
    def valid_sums(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """Yield, for each batch, [2, terms]: summed losses and hit counts, without gradients, over all dp ranks."""
        self.turn(training=False)
        for some in chunks(batches, self.runner.batches_at_once):

            def compute(stage: int, index: int, hidden_BTD: Tensor | None, some: list[Batch] = some) -> Tensor:
                batch = self._given(some[index], stage)
                hidden_BTD = self.stages[stage](batch, hidden_BTD)
                if stage < self.last_stage:
                    return hidden_BTD
                return self.objective.valid_sums(self.stages[stage], hidden_BTD, batch)

            sums = self.runner.forward(compute, [self.hidden_shape(batch) for batch in some])
            yield from self._to_all(sums, len(some), (2, len(self.terms)))
        self.turn(training=True)

    def pieces(self) -> list[Piece]:
        return self.place(self.parameters, "model")

    def place(self, tensors: Mapping[str, Tensor], prefix: str) -> list[Piece]:
        """Return all regions that this rank holds of tensors shaped like its parameters, as pieces for loading.

        Each key is, or ends in, a parameter's name. Vocabulary padding depends on the layout and is in no region.
        """
        return pieces_of(tensors, self.places, prefix)

    def owned(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the pieces that this rank saves. Every element of every tensor is saved by exactly one rank."""
        return owned(pieces, self.places)

    def _given(self, batch: Batch, stage: int) -> Batch:
        """Return a stage's input batch on the device."""
        return (self.objective.prepared(batch) if stage == self.last_stage else batch).map(self._to_device)

    def _to_device(self, array: Tensor) -> Tensor:
        # because: a copy from unpinned memory waits for the device; for memory pinned by the loader this does nothing
        pinned = array.pin_memory() if self.device.type == "cuda" and array.device.type == "cpu" else array
        return pinned.to(self.device, non_blocking=True)

    def _to_all(self, found: Mapping[int, Tensor], count: int, shape: tuple[int, ...]) -> Tensor:
        """Sum results [count, *shape] over dp and distribute them from the last stage to every rank."""
        none = torch.zeros(shape, device=self.device)
        mine = torch.stack([found.get(index, none) for index in range(count)])
        # collective: sums loss shares or validation sums over dp, then the last stage's with the others' zeros over pp
        all_reduce(all_reduce(mine, self.mesh.dp, what="losses"), self.mesh.pp, what="losses of the last stage")
        self.runner.wait_for_sends()
        return mine
