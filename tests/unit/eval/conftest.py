"""Models to evaluate: a real tiny GPT, whose padded columns are -inf, and a bigram given as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_tools.read.find_input_files import find_sources
from lmtrain.batch import IGNORED, Batch
from lmtrain.eval.read_texts import TextInput
from lmtrain.models.gpt import GPT, build
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.parallel.mesh import Axis
from lmtrain.parallel.tensor_parallel import label_scores
from lmtrain.start.evaluation.tasks_and_texts import read_texts
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_bpe
from tests.unit.models.first_weights import start


def given_texts(path: Path) -> TextInput:
    """A file of text as the command line reads it."""
    return read_texts(find_sources([path]), "text", lambda done: None)


VOCAB_SIZE, SEQ_LEN = 37, 16
TEXT = (
    ' = The Old Mill = \n \n The old mill was a well @-@ known house by the river , cold in winter . \n Its " miller '
    "'s boy \" sold 1 @,@ 200 sacks ( some say 3 @.@ 5 times more ) : flour ; bran . Who 's there ? Nobody ! \n "
    "The lights went out and the mill 's wheel stood still , and nobody in the old house dared to speak . \n "
)


# Words of a model whose angles depend on the length of a text, by which scores would depend on neighbours.
LONGROPE: dict[str, Any] = {
    "positions": "rotary", "rotary_scaling": "longrope", "rotary_original_len": 12, "rotary_factor": 4.0,
    "rotary_short_factors": (1.0, 1.1, 1.2, 1.3), "rotary_long_factors": (1.5, 2.0, 3.0, 4.0),
}  # fmt: skip


class PlainModel:
    """A GPT without parallel around it, so that these tests judge the scoring alone."""

    def __init__(self, model: GPT, *, padded: bool = True) -> None:
        self.model, self.padded = model.eval(), padded
        self.device, self.scored_at_once, self.separates_documents = torch.device("cpu"), 3, True
        self.rows_through_head: list[int] = []

    @torch.no_grad()
    def logits(self, batch: Batch, keep_BT: Tensor | None = None) -> Tensor:
        hidden = self.model(batch)
        return self.logits_of(hidden if keep_BT is None else hidden[keep_BT])

    def logits_of(self, hidden: Tensor) -> Tensor:
        self.rows_through_head.append(hidden.shape[:-1].numel())
        logits = self.model.logits(hidden)
        return logits if self.padded else logits[..., : self.model.shape.vocab_size]

    def check_same_texts(self, checksum: int) -> None:
        """One process is alike itself."""

    @torch.no_grad()
    def scores(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        for batch in batches:
            kept = batch.labels_BT != IGNORED
            yield label_scores(self.logits_of, self.model(batch)[kept], batch.labels_BT[kept], Axis())


class TableModel:
    """P(next | this token) by a table of logits [V, V]: a bigram, or a unigram if all rows are alike."""

    def __init__(self, logits_VV: NDArray[np.float64]) -> None:
        self.table, self.device = torch.from_numpy(logits_VV), torch.device("cpu")
        self.scored_at_once, self.separates_documents = 1, True

    def logits(self, batch: Batch, keep_BT: Tensor | None = None) -> Tensor:
        logits: Tensor = self.table[batch.tokens_BT]
        return logits if keep_BT is None else logits[keep_BT]

    def check_same_texts(self, checksum: int) -> None:
        """One process is alike itself."""

    def scores(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        for batch in batches:
            kept = batch.labels_BT != IGNORED
            yield label_scores(lambda rows: rows, self.table[batch.tokens_BT[kept]], batch.labels_BT[kept], Axis())


BuildGpt = Callable[..., PlainModel]


@pytest.fixture(scope="session")
def build_gpt() -> BuildGpt:
    def build_gpt(
        vocab_size: int = VOCAB_SIZE, seq_len: int = SEQ_LEN, *, vocab_multiple: int = 64, std: float = 0.3,
        **words: Any,
    ) -> PlainModel:
        settings = GPTSettings(
            num_layers=2, width=16, num_heads=2, vocab_size=vocab_size, vocab_multiple=vocab_multiple, seq_len=seq_len,
            init_std=std, **words,
        )  # fmt: skip
        model = build(settings)
        start(model, 1)
        return PlainModel(model)

    return build_gpt


@pytest.fixture(scope="session")
def build_table() -> Callable[[NDArray[np.float64]], TableModel]:
    return TableModel


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_bpe([TEXT], 300)


@pytest.fixture(scope="session")
def text() -> str:
    return TEXT
