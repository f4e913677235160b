"""The mistakes that make published figures wrong, planted one at a time: the comparison with a twin notices each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.errors import LmtrainError
from lmtrain.eval import windows
from lmtrain.eval.tasks import lambada, wikitext
from lmtrain.eval.windows import Request, StreamRequests, Window, WindowedRequests
from lmtrain.models.layers import output_heads
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from tests.unit.eval.protocols import Pair, agree, write

SEQ_LEN = 40
Plant = Callable[[pytest.MonkeyPatch], None]
_labelled_windows = wikitext.labelled_windows


class Doubled(StreamRequests):
    """As a sampler does that gives every rank as many samples: the last ones again."""

    def __iter__(self) -> Iterator[Request]:
        requests = list(super().__iter__())
        yield from [*requests, requests[0]]


class Padded(StreamRequests):
    """Short windows filled up, and what fills them scored."""

    def __iter__(self) -> Iterator[Request]:
        for request in super().__iter__():
            fill = SEQ_LEN + 1 - len(request.tokens) if request.tokens[-1] == self.tokens[-1] else 0
            yield Request(np.pad(request.tokens, (0, fill)), request.num_scored + fill, request.item)


def _replace(place: Any, name: str, other: Any) -> Plant:
    return lambda monkeypatch: monkeypatch.setattr(place, name, other)


def _every_target_weighs_one(num_tokens: int, seq_len: int, stride: int) -> Iterator[tuple[Window, float]]:
    return ((window, 1.0) for window, _ in _labelled_windows(num_tokens, seq_len, stride))


MISTAKES: dict[str, tuple[str, Plant]] = {
    "words between blanks, as Python splits": (
        "wikitext103/lmeval-2.0", _replace(wikitext, "count_words", lambda page: len(page.split())),
    ),
    "words after detokenizing": (
        "wikitext103/megatron-o32",
        _replace(wikitext, "spaces_by_article", lambda text, parts: np.array([len(p.split()) for p in parts])),
    ),
    "another prefix": (
        "wikitext103/lmeval-2.0", _replace(wikitext, "eod_id", lambda tokenizer: tokenizer.eod_id + 1),
    ),
    "another prefix of an empty context": (
        "lambada/lmeval-openai-1.0", _replace(lambada, "_prefix", lambda tokenizer, _: [tokenizer.eod_id + 1]),
    ),
    "pages concatenated": ("wikitext103/lmeval-2.0", _replace(wikitext, "split_pages", lambda text: [text])),
    "long lines cut on the right": (
        "lambada/megatron-strict", _replace(lambada, "cut_on_the_left", lambda row, seq_len: row[: seq_len + 1]),
    ),
    "a stride off by one": (
        "wikitext103/megatron-o32",
        _replace(wikitext, "windows", lambda num, seq_len, stride: windows.windows(num, seq_len, stride + 1)),
    ),
    "padding scored": ("wikitext103/megatron-o32", _replace(wikitext, "StreamRequests", Padded)),
    "padded vocabulary chosen": (
        "lambada/megatron-strict", _replace(output_heads, "padded_bias", lambda weight, bias, num_true: bias),
    ),
    "samples counted twice": ("wikitext103/megatron-o32", _replace(wikitext, "StreamRequests", Doubled)),
    "target tokenized apart": (
        "lambada/lmeval-openai-1.0", _replace(lambada.LambadaLmEval, "example", lambada.MegatronStrict.example),
    ),
    "last window dropped": (
        "wikitext/hf-stride13",
        _replace(wikitext, "labelled_windows", lambda *shape: list(_labelled_windows(*shape))[:-1]),
    ),
    "windows all weigh alike": (
        "wikitext/hf-stride13", _replace(wikitext, "labelled_windows", _every_target_weighs_one),
    ),
    "a page's last window is short": (
        "wikitext103/lmeval-2.0",
        _replace(
            wikitext, "WindowedRequests",
            lambda documents, seq_len, stride, last_looks_back: WindowedRequests(documents, seq_len, stride),
        ),
    ),
    "not detokenized": ("wikitext103/megatron-o32", _replace(wikitext, "detokenize", lambda text: text)),
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tokenizer: Tokenizer, build_gpt: Callable[..., Any]) -> Pair:
    model = build_gpt(tokenizer.vocab_size, SEQ_LEN, std=0.4)
    model.model.double()
    return Pair(model, tokenizer, SEQ_LEN)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_noticed(
    mistake: str, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, plant = MISTAKES[mistake]
    source = write(tmp_path, name)
    agree(pair, name, source)
    plant(monkeypatch)
    with pytest.raises((AssertionError, LmtrainError)):
        agree(pair, name, source)
