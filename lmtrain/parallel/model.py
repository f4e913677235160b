"""What train and eval see of a model, whatever its layout: the verbs of ParallelModel. Made by apply.build_parallel."""

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
from lmtrain.optim.whole import Alone, Whole
from lmtrain.parallel.blocks.dropout import Noise
from lmtrain.parallel.collectives import all_reduce
from lmtrain.parallel.inference import Inference, chunks
from lmtrain.parallel.pipeline.executor import Begun
from lmtrain.parallel.shards import owned, pieces_of
from lmtrain.parallel.weights.gathered_weights import Spread
from lmtrain.parallel.weights.grads import (
    TiedSums,
    Weights,
    apply_clip,
    clip_factor,
    gradient_norm,
    sum_gradients,
    sum_partial_gradients,
)
from lmtrain.parallel.weights.precision import LossScale
from lmtrain.placement.places import Place
from lmtrain.spec import LanguageModel


@dataclass(eq=False)
class ParallelModel(Inference):
    """No caller asks which axes exist. All ranks call the same verbs in the same order, those of one dp copy with the
    same batches.
    """

    objective: CausalLM
    masters: Weights
    tied: TiedSums
    loss_scale: LossScale
    places: Mapping[str, Place]
    noise: Noise
    applied: Sequence[str]  # what was done to the model, line by line
    compiled: bool
    one_pass: OnePassAdamW | None = None  # an optimizer that clips and rounds in the pass of its update

    @property
    def model(self) -> LanguageModel:
        """The model of a run without a pipeline."""
        (model,) = self.stages.values()
        return model

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The fp32 weights, or this rank's shards of them, that an optimizer updates; each tied weight once."""
        return self.masters.master

    @property
    def num_parameters(self) -> int:
        """The parameters of the whole model, without padding."""
        return self.settings.num_parameters

    @property
    def terms(self) -> tuple[str, ...]:
        """The terms that the loss adds up, in the order of every tensor of shares and sums."""
        return self.objective.terms

    @property
    def whole(self) -> Whole:
        """The view of whole weights for an optimizer."""
        if self.mesh.world.size > 1:
            return Spread(self.places, self.mesh)
        return Alone({name: place.sections for name, place in self.places.items() if place.cut.sections})

    def forward_backward(self, batches: StepBatches) -> Tensor:
        """Gradients of the step's mean loss; returns [microbatches, terms], their shares of the mean of each term.

        The division by the global counts happens here, before backward, so that gradients need no rescaling after.
        """
        self.turn(training=True)
        self.tied.wait()  # because: a step before may have ended without a finish
        count = len(batches.microbatches)
        self.masters.clear_gradients(count)

        def compute(stage: int, index: int, hidden_BTD: Tensor | None) -> Tensor:
            self.noise.enter(batches.step, index, stage)
            batch = self._given(batches.microbatches[index], stage)
            hidden_BTD = self.stages[stage](batch, hidden_BTD)
            if stage < self.last_stage:
                return hidden_BTD
            sums = self.objective.loss_sums(self.stages[stage], hidden_BTD, batch)
            # because: numbers of Python need no copy to the device
            return torch.stack([one / num for one, num in zip(sums.unbind(), batches.counts, strict=True)])

        shape = self.hidden_shape(batches.microbatches[0])
        shares = self.runner.train(count, compute, shape, self.loss_scale.value, Begun(self.masters, count))
        self.masters.collect()
        return self._to_all(shares, count, (len(self.terms),))

    def finish_gradients(self, clip_norm: float | None) -> Tensor:
        """Sum what is partial, clip, now or in the update; returns the norm before clipping, still on the device."""
        phases.enter("optimizer")
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if self.sequence:
            sum_partial_gradients(gradients, self.places, self.mesh.tp)
        sum_gradients(gradients, self.settings.ties(), self.tied)
        norm = gradient_norm(gradients, self.places, self.mesh.world, self.device)
        if self.one_pass is None:
            apply_clip(list(gradients.values()), norm, clip_norm, self.loss_scale.value)
        else:
            self.one_pass.factor = clip_factor(norm, clip_norm, self.loss_scale.value)
        return norm / self.loss_scale.value

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare an optimizer before its first step; one that rounds in its update gets the weights to write."""
        if isinstance(optimizer, OnePassAdamW):
            self.one_pass, optimizer.rounded = optimizer, self.masters.rounded

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Do one step of the optimizer, and publish the new weights to the model."""
        optimizer.step()
        self.masters.publish(written=optimizer is self.one_pass)

    def load(self, fill: Callable[[list[Piece]], None], also: Sequence[Piece] = ()) -> None:
        """Have the weights filled, with other pieces of the same files, and the model computes with them."""
        fill([*self.pieces(), *also])
        self.masters.publish()

    @torch.no_grad()
    def valid_sums(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """Yield for each batch [2, terms]: summed losses and hits over all dp replicas, without gradients."""
        self.turn(training=False)
        for some in chunks(batches, self.runner.at_once):

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
        """Return the regions of the whole model that tensors shaped like this rank's parameters hold, for loading.

        Each key is, or ends in, a parameter's name. Padding of the vocabulary belongs to a layout and is in no region.
        """
        return pieces_of(tensors, self.places, prefix)

    def owned(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the pieces this rank saves; every element of every tensor is saved by exactly one rank."""
        return owned(pieces, self.places)

    def _given(self, batch: Batch, stage: int) -> Batch:
        """Return a batch as a stage reads it, on the device."""
        return (self.objective.prepared(batch) if stage == self.last_stage else batch).map(self._to_device)

    def _to_device(self, array: Tensor) -> Tensor:
        # because: a copy of what is not pinned waits for the device; where the loader has pinned it, this does nothing
        pinned = array.pin_memory() if self.device.type == "cuda" and array.device.type == "cpu" else array
        return pinned.to(self.device, non_blocking=True)

    def _to_all(self, found: Mapping[int, Tensor], count: int, shape: tuple[int, ...]) -> Tensor:
        """[count, *shape] of all dp copies together, from the last stage to every rank."""
        none = torch.zeros(shape, device=self.device)
        mine = torch.stack([found.get(index, none) for index in range(count)])
        # collective: shares of the loss, or validation's sums, over dp; then what the last stage has to all stages
        all_reduce(all_reduce(mine, self.mesh.dp, what="losses"), self.mesh.pp, what="losses of the last stage")
        self.runner.settle()
        return mine
