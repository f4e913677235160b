"""ParallelModel, the interface of train and eval to a model of any layout. Built by build_parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.batch import Batch, StepBatches
from lmtrain.layout import Piece
from lmtrain.models.objectives.causal_and_masked_objectives import CausalLM
from lmtrain.optim.adamw import OnePassAdamW
from lmtrain.optim.interface_to_whole_weights import LocalTensors, WholeTensors
from lmtrain.parallel.blocks.dropout_random_numbers import DropoutSeeds
from lmtrain.parallel.inference_scores_and_logits import Inference, split_into_chunks
from lmtrain.parallel.initialize_and_save_shards import owned_pieces, pieces_of
from lmtrain.parallel.pipeline.execute_schedule import TrainingObserver
from lmtrain.parallel.tp_linears_and_collectives import all_reduce
from lmtrain.parallel.weights.gather_weights_for_optimizer import ShardedTensors
from lmtrain.parallel.weights.master_weights import LossScale
from lmtrain.parallel.weights.reduce_and_clip_gradients import (
    TiedSums,
    Weights,
    apply_clip,
    clip_factor,
    gradient_norm,
    sum_copied_gradients,
    sum_partial_gradients,
    sum_tied_gradients,
)
from lmtrain.placement.layers_and_shards_of_ranks import Placement
from lmtrain.runtime.processes import current_phase
from lmtrain.spec import LanguageModel


@dataclass(eq=False)
class ParallelModel(Inference):
    """A model on a mesh of ranks, with its objective: gradients, updates, validation and checkpoint pieces. Collective:
    all ranks call the same methods in the same order; the ranks of a dp index pass the same batches.
    """

    objective: CausalLM
    masters: Weights
    tied_sums: TiedSums
    loss_scale: LossScale
    placements: Mapping[str, Placement]
    dropout_seeds: DropoutSeeds
    applied: Sequence[str]  # log lines of the applied transformations
    compiled: bool
    one_pass_optimizer: OnePassAdamW | None = None  # an optimizer that clips and rounds within its update

    def forward_backward(self, batches: StepBatches) -> Tensor:
        """Run forward and backward of a step's micro-batches, which leaves the gradients of the mean loss in the
        weights. Return [micro-batches, num_sums]: what each micro-batch adds to the mean of each loss term, and to the
        z-loss if there is one. The division by global counts comes before backward: gradients need no rescaling.

        With `batches.by_source`, further columns hold the summed loss of each sample of the micro-batch, over all
        data-parallel ranks: flattened, they are in the order of `batches.sample_ids`.
        """
        self.set_training_mode(True)
        self.tied_sums.wait()  # because: the previous step may have ended without finish_gradients
        num_microbatches = len(batches.microbatches)
        self.masters.clear_gradients(num_microbatches)
        num_samples = batches.microbatches[0].num_samples if batches.by_source else 0
        sample_sums: dict[int, Tensor] = {}
        num_sums, counts = self.objective.num_sums, self.objective.counts_of_sums(batches.counts)

        def compute(stage: int, index: int, hidden_BTD: Tensor | None) -> Tensor:
            self.dropout_seeds.seed_forward(batches.step, index, stage)
            batch = self._to_stage_input(batches.microbatches[index], stage)
            hidden_BTD = self.stages[stage](batch, hidden_BTD)
            if stage < self.last_stage:
                return hidden_BTD
            sums = self.objective.loss_sums(self.stages[stage], hidden_BTD, batch, num_samples)
            if num_samples:
                sums, sample_sums[index] = sums[:num_sums], sums[num_sums:].detach()
            # because: dividing by Python numbers needs no copy to the device
            return torch.stack([total / count for total, count in zip(sums.unbind(), counts, strict=True)])

        shape = self.hidden_shape(batches.microbatches[0])
        observer = TrainingObserver(self.masters, num_microbatches)
        shares = self.runner.train(num_microbatches, compute, shape, self.loss_scale.value, observer)
        self.masters.collect_gradients()
        totals = self._share_results(shares, num_microbatches, (num_sums,))
        return self._with_sample_sums(totals, sample_sums, num_samples)

    def finish_gradients(self, clip_norm: float | None) -> Tensor:
        """Complete the gradients after a step's last backward: sum partial ones over ranks, undo the loss scale and
        clip to `clip_norm` (None: no clipping), now or in the update. Return the norm before clipping, on the device.
        """
        current_phase.enter("optimizer")
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        sum_partial_gradients(gradients, self.placements, self.mesh.tp, sequence_parallel=self.sequence_parallel)
        sum_copied_gradients(gradients, self.placements, self.mesh.tp)
        sum_tied_gradients(gradients, self.settings.ties(), self.tied_sums)
        norm = gradient_norm(gradients, self.placements, self.mesh.world, self.device)
        if self.one_pass_optimizer is None:
            apply_clip(list(gradients.values()), norm, clip_norm, self.loss_scale.value)
        else:
            self.one_pass_optimizer.gradient_factor = clip_factor(norm, clip_norm, self.loss_scale.value)
        return norm / self.loss_scale.value

    @property
    def model(self) -> LanguageModel:
        """The model of a run without a pipeline."""
        (model,) = self.stages.values()
        return model

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The fp32 weights that the optimizer updates, or this rank's shards of them, by name; tied weights once."""
        return self.masters.master

    @property
    def terms(self) -> tuple[str, ...]:
        """The loss terms, in the order of every tensor of shares and sums."""
        return self.objective.terms

    @property
    def num_sums(self) -> int:
        """The number of sums that a step minimises: the loss terms, then the z-loss if there is one."""
        return self.objective.num_sums

    @property
    def whole_tensors(self) -> WholeTensors:
        """The interface by which an optimizer gathers, sums over and shards whole weights, for this layout."""
        if self.mesh.world.size > 1:
            return ShardedTensors(self.placements, self.mesh)
        return LocalTensors({name: p.sections for name, p in self.placements.items() if p.cut.sections})

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Attach the optimizer before its first step: a one-pass optimizer receives the half-precision copies."""
        if isinstance(optimizer, OnePassAdamW):
            self.one_pass_optimizer, optimizer.compute_copies = optimizer, self.masters.compute_copies

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Run an optimizer step and publish the new weights to the model."""
        optimizer.step()
        self.masters.publish(already_written=optimizer is self.one_pass_optimizer)

    def load(self, fill: Callable[[list[Piece]], None], extra_pieces: Sequence[Piece] = ()) -> None:
        """Call `fill` with the pieces of this rank's weights and `extra_pieces`, whose tensors it overwrites with a
        checkpoint's values; then copy the new weights to the model.
        """
        fill([*self.pieces(), *extra_pieces])
        self.masters.publish()

    @torch.no_grad()
    def validation_sums(self, batches: Iterable[Batch], num_samples: int = 0) -> Iterator[Tensor]:
        """Yield [2, loss terms] for each batch, without gradients: row 0 is the summed loss of each term, row 1 the
        number of labels with the highest logit. Both are sums over all data-parallel ranks.

        With `num_samples`, the most samples of a batch, further columns hold the part of each sample: `num_samples` of
        the first data-parallel rank, then those of the next. Columns beyond a smaller batch are 0.
        """
        self.set_training_mode(False)
        for chunk in split_into_chunks(batches, self.runner.batches_at_once):

            def compute(stage: int, index: int, hidden_BTD: Tensor | None, chunk: list[Batch] = chunk) -> Tensor:
                batch = self._to_stage_input(chunk[index], stage)
                hidden_BTD = self.stages[stage](batch, hidden_BTD)
                if stage < self.last_stage:
                    return hidden_BTD
                batch_samples = batch.num_samples if num_samples else 0
                return self.objective.validation_sums(self.stages[stage], hidden_BTD, batch, batch_samples)

            results = self.runner.forward(compute, [self.hidden_shape(batch) for batch in chunk])
            num_terms = len(self.terms)
            sums = {index: result[:, :num_terms] for index, result in results.items()}
            sample_sums = {index: result[:, num_terms:] for index, result in results.items()}
            totals = self._share_results(sums, len(chunk), (2, num_terms))
            yield from self._with_sample_sums(totals, sample_sums, num_samples)
        self.set_training_mode(True)

    def pieces(self) -> list[Piece]:
        """Return every region that this rank holds of the weights."""
        return self.pieces_of(self.parameters, "model")

    def pieces_of(self, tensors: Mapping[str, Tensor], prefix: str) -> list[Piece]:
        """Return every region that this rank holds of tensors shaped like its parameters, named `prefix.NAME`.

        Each key is, or ends in, a parameter's name. Vocabulary padding depends on the layout and is in no region.
        """
        return pieces_of(tensors, self.placements, prefix)

    def owned_pieces(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the pieces that this rank saves. Every element of every tensor is saved by exactly one rank."""
        return owned_pieces(pieces, self.placements)

    def _to_stage_input(self, batch: Batch, stage: int) -> Batch:
        """Return the batch on the device; for the last stage with what the loss needs."""
        return (self.objective.prepare_batch(batch) if stage == self.last_stage else batch).map(self._to_device)

    def _to_device(self, array: Tensor) -> Tensor:
        # because: a copy from unpinned memory waits for the device; for memory pinned by the loader this does nothing
        pinned = array.pin_memory() if self.device.type == "cuda" and array.device.type == "cpu" else array
        return pinned.to(self.device, non_blocking=True)

    def _with_sample_sums(self, totals: Tensor, sample_sums: Mapping[int, Tensor], num_samples: int) -> Tensor:
        """Return `totals` with `num_samples` further columns per data-parallel rank, equal on every rank; `totals`
        alone if `num_samples` is 0. `sample_sums` has this rank's columns by index of the result; zeros follow if they
        are fewer. All ranks must call this.
        """
        if not num_samples:
            return totals
        dp = self.mesh.dp
        first, end = dp.index * num_samples, dp.size * num_samples
        # because: in a sum over ranks the other ranks' zeros leave a value exact
        padded = {i: F.pad(sums, (first, end - first - sums.shape[-1])) for i, sums in sample_sums.items()}
        # because: in one tensor with `totals`, the ranks' totals could be added in another order
        return torch.cat([totals, self._share_results(padded, len(totals), (*totals.shape[1:-1], end))], -1)

    def _share_results(self, results: Mapping[int, Tensor], count: int, shape: tuple[int, ...]) -> Tensor:
        """Return [count, *shape], equal on every rank: entry i is the sum of `results[i]` over data-parallel ranks.
        Only ranks with the last pipeline stage have `results`; a missing one counts as 0. All ranks must call this.
        """
        zeros = torch.zeros(shape, device=self.device)
        totals = torch.stack([results.get(index, zeros) for index in range(count)])
        # collective: sums loss shares or validation sums over dp, then the last stage's with the others' zeros over pp
        totals = all_reduce(totals, self.mesh.dp, wait_name="losses")
        all_reduce(totals, self.mesh.pp, wait_name="losses of the last stage")
        self.runner.wait_for_sends()
        return totals
