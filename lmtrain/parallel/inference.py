"""Inference with a parallel model: label scores and logits of batches of any length at any layout.

Called by ParallelModel. Only selected positions go through the head, on the ranks of the last stage, and `scores` never
holds the logits of all positions at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.batch import IGNORED, Batch
from lmtrain.errors import RanksDifferError
from lmtrain.models.model_settings import ModelSettings
from lmtrain.parallel.blocks.masks import masks_of_positions
from lmtrain.parallel.collectives import all_reduce, gather_columns, gather_sequence
from lmtrain.parallel.mesh import Axis, Mesh, peers_before_mesh
from lmtrain.parallel.pipeline.executor import Pipeline, SingleStage
from lmtrain.parallel.tensor import label_scores, whole_sequences
from lmtrain.runtime.processes.agreement import all_equal
from lmtrain.spec import LanguageModel, PairModel

Answer = Callable[[LanguageModel, Tensor, int], Tensor]  # (model, hidden states, index of the batch) -> result


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
        """Yield, for each batch, [2, labels] in float64 on the host, for labels that are not IGNORED, row by row.

        Row 0 is the negative log-likelihood; row 1 is 1 if the label is the most likely token. If a batch has pair
        labels, the pair labels are scored instead of the tokens. Collective: all ranks pass all batches and receive all
        results.
        """
        dp = self.mesh.dp
        for some in chunks(batches, self.scored_at_once):
            mine = some[dp.index :: dp.size]
            # because: dp ranks that share weights take part in each other's gathers, so each needs equally many batches
            found = self._labels(mine + [some[0].without_labels()] * (-(-len(some) // dp.size) - len(mine)))
            counts = [int((_asked(batch) != IGNORED).sum()) for batch in some]
            all_2K = torch.zeros(2, sum(counts), dtype=torch.float64, device=self.device)
            for index, place_2K in enumerate(torch.split(all_2K, counts, 1)[dp.index :: dp.size]):
                if index in found:
                    place_2K.copy_(found[index])
            # collective: sums each batch's result with the other ranks' zeros, over dp, then over pp
            all_reduce(all_reduce(all_2K, dp), self.mesh.pp)
            self.runner.wait_for_sends()
            yield from torch.split(all_2K.cpu(), counts, 1)  # sync: reads the results

    @torch.no_grad()
    def logits(self, batch: Batch, keep_BT: Tensor | None = None) -> Tensor:
        """Return fp32 logits over the true vocabulary, of all positions or those in `keep_BT`, on every rank.

        Collective: all ranks call this with the same batch.
        """

        def columns(model: LanguageModel, hidden: Tensor, index: int) -> Tensor:
            logits = model.logits(hidden)
            return gather_columns(logits, self.mesh.tp) if self.mesh.tp.size > 1 else logits

        keep_BT = None if keep_BT is None else keep_BT.to(self.device)
        found = self._infer([batch], [keep_BT], columns).get(0)
        shape = batch.tokens_BT.shape if keep_BT is None else (int(keep_BT.sum()),)
        vocab_size = self.settings.shape.vocab_size
        logits = (
            torch.zeros(*shape, vocab_size, device=self.device) if found is None else found[..., :vocab_size].float()
        )
        # collective: sums the last stage's logits with the other stages' zeros, over pp
        logits = all_reduce(logits.contiguous(), self.mesh.pp)
        self.runner.wait_for_sends()
        return logits

    def check_alike(self, checksum: int) -> None:
        """Raise on every rank if the checksums of the ranks differ, so that no rank waits forever in a collective."""
        if not all_equal(peers_before_mesh("the agreement on texts"), checksum):
            raise RanksDifferError(
                f"Rank {self.mesh.rank} is to score other texts than another rank. Give all processes the same "
                "command, the same files and the same tokenizer."
            )

    def _labels(self, batches: Sequence[Batch]) -> dict[int, Tensor]:
        labels = [_asked(batch).to(self.device) for batch in batches]
        kept = [label != IGNORED for label in labels]
        of_pairs = [batch.pair_labels_B is not None for batch in batches]

        def answer(model: LanguageModel, hidden: Tensor, index: int) -> Tensor:
            asked_K = labels[index][kept[index]]
            if of_pairs[index]:
                logits_K2 = cast(PairModel, model).pair_logits(hidden)[kept[index]]
                return label_scores(lambda rows: rows, logits_K2, asked_K, Axis())  # every tp rank holds both columns
            return label_scores(model.logits, hidden, asked_K, self.mesh.tp)

        places = [None if pair else places_BT for pair, places_BT in zip(of_pairs, kept, strict=True)]
        return self._infer(batches, places, answer)

    def _infer(self, batches: Sequence[Batch], kept: Sequence[Tensor | None], answer: Answer) -> dict[int, Tensor]:
        """Return, on the last stage, each batch's result from its hidden states, limited to `kept` positions."""
        self.turn(training=False)
        given = [batch.map(lambda array: array.to(self.device, non_blocking=True)) for batch in batches]
        given = [_padded(batch, self.mesh.tp.size) if self.sequence_parallel else batch for batch in given]

        def compute(stage: int, index: int, hidden_BTD: Tensor | None) -> Tensor:
            model, length, keep_BT = self.stages[stage], batches[index].tokens_BT.shape[1], kept[index]
            hidden_BTD = model(given[index], hidden_BTD)
            if stage < self.last_stage:
                return hidden_BTD
            if self.sequence_parallel:
                hidden_BTD = gather_sequence(hidden_BTD, self.mesh.tp)
            hidden_BTD = hidden_BTD[:, :length]
            assert isinstance(model, nn.Module)
            with whole_sequences(model):
                return answer(model, hidden_BTD if keep_BT is None else hidden_BTD[keep_BT], index)

        with masks_of_positions(self.stages.values()):
            return self.runner.forward(compute, [self.hidden_shape(batch) for batch in given])

    def turn(self, *, training: bool) -> None:
        for stage in self.stages.values():
            stage.train(training)

    def hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        """Return the shape of the hidden states that this rank sends to the next stage."""
        rows, length = batch.tokens_BT.shape
        return rows, length // self.mesh.tp.size if self.sequence_parallel else length, self.settings.shape.width


def _asked(batch: Batch) -> Tensor:
    asked: Tensor = batch.labels_BT if batch.pair_labels_B is None else batch.pair_labels_B
    return asked


def chunks(batches: Iterable[Batch], most: int) -> Iterator[list[Batch]]:
    stream = iter(batches)
    while some := list(islice(stream, most)):
        yield some


def _padded(batch: Batch, multiple: int) -> Batch:
    """Pad the batch to a length that tp ranks can divide evenly. Padding is not real, so no token attends to it."""
    missing = -batch.tokens_BT.shape[1] % multiple
    if not missing:
        return batch
    if batch.not_padding_BT is None:
        batch = replace(batch, not_padding_BT=torch.ones_like(batch.tokens_BT, dtype=torch.bool))
    return batch.map(lambda array: F.pad(array, (0, missing)) if array.ndim == 2 else array)
