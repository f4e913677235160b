"""Inference with a parallel model: label scores and logits of batches of any length at any layout.

Called by ParallelModel. Only selected positions go through the head, on the ranks of the last stage, and `scores` never
holds the logits of all positions at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.batch import IGNORED, Batch
from lmtrain.errors import RanksDifferError
from lmtrain.models.block_stack import Stack
from lmtrain.models.model_settings import ModelSettings
from lmtrain.parallel.mesh import Axis, Mesh, peers_before_mesh
from lmtrain.parallel.pipeline.execute_schedule import Pipeline, SingleStage
from lmtrain.parallel.tensor_parallel import heads_take_whole_sequences, label_scores
from lmtrain.parallel.tp_linears_and_collectives import all_reduce, gather_columns, gather_sequence
from lmtrain.runtime.processes.succeed_on_all_ranks_or_none import all_equal
from lmtrain.spec import LanguageModel, PairModel

ComputeResult = Callable[[LanguageModel, Tensor, int], Tensor]  # (last stage, hidden states, batch index) -> result


@dataclass(eq=False)
class Inference:
    """The part of ParallelModel that needs no gradients."""

    stages: Mapping[int, LanguageModel]
    runner: SingleStage | Pipeline
    settings: ModelSettings
    device: torch.device
    mesh: Mesh
    sequence_parallel: bool  # True if tp ranks hold shards of the sequence

    @property
    def last_stage(self) -> int:
        """The number of the model's last stage."""
        return self.mesh.layout.pp * self.mesh.layout.vp - 1

    @property
    def separates_documents(self) -> bool:
        """True if `documents_BT` separates requests that share a row; False for models that do not declare it."""
        return all(getattr(model, "separates_documents", False) for model in self.stages.values())

    @property
    def scored_at_once(self) -> int:
        """The number of batches that `scores` processes together; with fewer, some processes idle."""
        return self.runner.batches_at_once * self.mesh.dp.size

    @torch.no_grad()
    def scores(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """Yield a float64 CPU tensor [2, K] for each batch, about its K labels that are not IGNORED, row by row: entry
        [0, k] is -log p of label k, entry [1, k] is 1 if that label is the most likely token, else 0.

        If a batch has pair labels, the pair labels are scored instead of the tokens. Collective: all ranks pass all
        batches and receive all results.
        """
        dp = self.mesh.dp
        for chunk in split_into_chunks(batches, self.scored_at_once):
            own_batches = chunk[dp.index :: dp.size]
            # because: dp ranks that share weights take part in each other's gathers, so each needs equally many batches
            num_missing = -(-len(chunk) // dp.size) - len(own_batches)
            results = self._score_labels(own_batches + [chunk[0].without_labels()] * num_missing)
            counts = [int((_scored_labels(batch) != IGNORED).sum()) for batch in chunk]
            all_2K = torch.zeros(2, sum(counts), dtype=torch.float64, device=self.device)
            for index, place_2K in enumerate(torch.split(all_2K, counts, 1)[dp.index :: dp.size]):
                if index in results:
                    place_2K.copy_(results[index])
            # collective: sums each batch's result with the other ranks' zeros, over dp, then over pp
            all_reduce(all_reduce(all_2K, dp), self.mesh.pp)
            self.runner.wait_for_sends()
            yield from torch.split(all_2K.cpu(), counts, 1)  # sync: reads the results

    @torch.no_grad()
    def logits(self, batch: Batch, keep_BT: Tensor | None = None) -> Tensor:
        """Return a batch's logits in fp32 on every rank, without columns that pad the vocabulary: [B, T, V] for all
        positions, or [K, V] for the K positions at which `keep_BT` is True.

        Collective: all ranks call this with the same batch.
        """

        def columns(model: LanguageModel, hidden: Tensor, index: int) -> Tensor:
            logits = model.logits(hidden)
            return gather_columns(logits, self.mesh.tp) if self.mesh.tp.size > 1 else logits

        keep_BT = None if keep_BT is None else keep_BT.to(self.device)
        result = self._compute_results([batch], [keep_BT], columns).get(0)
        shape = batch.tokens_BT.shape if keep_BT is None else (int(keep_BT.sum()),)
        vocab_size = self.settings.shape.vocab_size
        logits = (
            torch.zeros(*shape, vocab_size, device=self.device) if result is None else result[..., :vocab_size].float()
        )
        # collective: sums the last stage's logits with the other stages' zeros, over pp
        logits = all_reduce(logits.contiguous(), self.mesh.pp)
        self.runner.wait_for_sends()
        return logits

    def check_same_texts(self, checksum: int) -> None:
        """Raise RanksDifferError on every rank unless all ranks pass the same checksum of the texts to score. Ranks
        with different texts would wait forever in a collective.
        """
        if not all_equal(peers_before_mesh("the agreement on texts"), checksum):
            raise RanksDifferError(
                f"The texts to score on rank {self.mesh.rank} differ from those on another rank. Give all processes "
                "the same command, the same files and the same tokenizer."
            )

    def _score_labels(self, batches: Sequence[Batch]) -> dict[int, Tensor]:
        """Return batch index -> the scores of that batch's labels, [2, K] as `scores` yields them; {} on ranks without
        the last pipeline stage. All ranks must call this.
        """
        labels = [_scored_labels(batch).to(self.device) for batch in batches]
        is_labelled = [label != IGNORED for label in labels]
        of_pairs = [batch.pair_labels_B is not None for batch in batches]

        def compute_result(model: LanguageModel, hidden: Tensor, index: int) -> Tensor:
            labels_K = labels[index][is_labelled[index]]
            if of_pairs[index]:
                logits_K2 = cast(PairModel, model).pair_logits(hidden)[is_labelled[index]]
                return label_scores(lambda rows: rows, logits_K2, labels_K, Axis())  # every tp rank holds both columns
            return label_scores(model.logits, hidden, labels_K, self.mesh.tp)

        places = [None if pair else places_BT for pair, places_BT in zip(of_pairs, is_labelled, strict=True)]
        return self._compute_results(batches, places, compute_result)

    def _compute_results(
        self, batches: Sequence[Batch], keep_masks: Sequence[Tensor | None], compute_result: ComputeResult
    ) -> dict[int, Tensor]:
        """Run the model on all batches, and return batch index -> `compute_result(last stage, hidden states, batch
        index)`; {} on ranks without the last pipeline stage. A mask [B, T] in `keep_masks`, one per batch, selects the
        positions whose hidden states are passed; None passes all.
        """
        self.set_training_mode(False)
        device_batches = [batch.map(lambda array: array.to(self.device, non_blocking=True)) for batch in batches]
        if self.sequence_parallel:
            device_batches = [_pad_to_multiple(batch, self.mesh.tp.size) for batch in device_batches]

        def compute(stage: int, index: int, hidden_BTD: Tensor | None) -> Tensor:
            model, length, keep_BT = self.stages[stage], batches[index].tokens_BT.shape[1], keep_masks[index]
            hidden_BTD = model(device_batches[index], hidden_BTD)
            if stage < self.last_stage:
                return hidden_BTD
            if self.sequence_parallel:
                hidden_BTD = gather_sequence(hidden_BTD, self.mesh.tp)
            hidden_BTD = hidden_BTD[:, :length]
            assert isinstance(model, nn.Module)
            with heads_take_whole_sequences(model):
                return compute_result(model, hidden_BTD if keep_BT is None else hidden_BTD[keep_BT], index)

        with _use_dense_masks(self.stages.values()):
            return self.runner.forward(compute, [self.hidden_shape(batch) for batch in device_batches])

    def set_training_mode(self, training: bool) -> None:
        """Switch all stages of this rank to training mode, with dropout, or to evaluation mode."""
        for stage in self.stages.values():
            stage.train(training)

    def hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        """Return the shape of the hidden states that this rank sends to the next stage."""
        rows, length = batch.tokens_BT.shape
        return rows, length // self.mesh.tp.size if self.sequence_parallel else length, self.settings.shape.width


@contextmanager
def _use_dense_masks(models: Iterable[LanguageModel]) -> Iterator[None]:
    """Make the models build dense attention masks in place of flex_attention's block masks while the context is open,
    so that texts may have any length.

    because: flex_attention would be compiled for each length, and the compiler caches eight; uncompiled, as in an
    evaluation during training, it creates a matrix of all scores for every head
    """
    built = [(model, model.build_mask) for model in models if isinstance(model, Stack) and "build_mask" in vars(model)]
    for model, _ in built:
        del model.build_mask  # the class attribute builds dense masks
    try:
        yield
    finally:
        for model, build_mask in built:
            model.build_mask = build_mask


def _scored_labels(batch: Batch) -> Tensor:
    """Return the labels that `scores` scores: the pair labels if the batch has them, else those of tokens."""
    labels: Tensor = batch.labels_BT if batch.pair_labels_B is None else batch.pair_labels_B
    return labels


def split_into_chunks(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield the batches in lists of `size`; the last list may be shorter."""
    stream = iter(batches)
    while chunk := list(islice(stream, size)):
        yield chunk


def _pad_to_multiple(batch: Batch, multiple: int) -> Batch:
    """Return the batch with every row padded on the right to a multiple of `multiple` tokens. No token attends to the
    padding.
    """
    missing = -batch.tokens_BT.shape[1] % multiple
    if not missing:
        return batch
    if batch.not_padding_BT is None:
        batch = replace(batch, not_padding_BT=torch.ones_like(batch.tokens_BT, dtype=torch.bool))
    return batch.map(lambda array: F.pad(array, (0, missing)) if array.ndim == 2 else array)
