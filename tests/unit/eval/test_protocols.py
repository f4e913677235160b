"""Every protocol is what its twin, written from the published description, finds: small files, then the real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_bpe
from tests.unit.eval.conftest import LONGROPE
from tests.unit.eval.protocols import LAMBADA_TASKS, WIKI_TASKS, Pair, agree, write

SEQ_LEN = 40
REAL = [  # those of the harness are compared with the harness itself elsewhere
    pytest.param("wikitext103/megatron-o32", "wt103.wiki.test.tokens", marks=pytest.mark.slow),
    pytest.param("wikitext/hf-stride40", "wiki.test.raw", marks=pytest.mark.slow),
    pytest.param("lambada/megatron-strict", "lambada_test.jsonl", marks=pytest.mark.slow),
    pytest.param("lambada/megatron-token", "lambada_test.jsonl", marks=pytest.mark.slow),
    pytest.param("wikitext103/lmeval-2.0", "wiki.test.raw", marks=pytest.mark.slow),
    pytest.param("lambada/lmeval-openai-1.0", "lambada_test.jsonl", marks=pytest.mark.slow),
    pytest.param("lambada/lmeval-standard-1.0", "lambada_test_plain_text.txt", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def pair(tokenizer: Tokenizer, build_gpt: Callable[..., Any]) -> Pair:
    return _pair(tokenizer, build_gpt, SEQ_LEN)


def _pair(tokenizer: Tokenizer, build_gpt: Callable[..., Any], seq_len: int, **words: Any) -> Pair:
    model = build_gpt(tokenizer.vocab_size, seq_len, std=0.4, **words)
    model.model.double()
    return Pair(model, tokenizer, seq_len)


@pytest.mark.parametrize("name", [*WIKI_TASKS, *LAMBADA_TASKS])
def test_a_task_is_its_twin(name: str, pair: Pair, tmp_path: Path) -> None:
    agree(pair, name, write(tmp_path, name), batch_size=7)


@pytest.mark.parametrize("name", [*WIKI_TASKS, *LAMBADA_TASKS])
def test_a_tasks_scores_do_not_depend_on_the_batch_if_angles_depend_on_lengths(
    name: str, tokenizer: Tokenizer, build_gpt: Callable[..., Any], tmp_path: Path
) -> None:
    pair, source = _pair(tokenizer, build_gpt, SEQ_LEN, **LONGROPE), write(tmp_path, name)
    alone = pair.measured(name, source, 1)
    for batch_size in (2, 7, 64):
        together = pair.measured(name, source, batch_size)
        assert together.result.nll_sum_nats == pytest.approx(alone.result.nll_sum_nats, rel=1e-10)
        assert together.result.measures == pytest.approx(alone.result.measures, rel=1e-9)


@pytest.mark.parametrize("size", range(0, 3 * SEQ_LEN + 8, 18))
@pytest.mark.parametrize("name", ["wikitext103/megatron-o13", "wikitext103/lmeval-2.0", "wikitext/hf-stride40"])
def test_texts_of_no_to_three_windows(name: str, size: int, pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "wiki"
    path.write_text(pair.tokenizer.decode([pair.tokenizer.encode(" the")[0]] * (size + 2)) + "\n")
    agree(pair, name, path)


@pytest.mark.parametrize(("name", "file"), REAL)
def test_the_real_file(name: str, file: str, shared_data: Path, build_gpt: Callable[..., Any]) -> None:
    """A vocabulary of 1,000 tokens that the file itself taught, and windows short enough to fill many."""
    source = shared_data / file
    tokenizer = train_bpe([source.read_text()[:200_000]], 1000)
    outcome = agree(_pair(tokenizer, build_gpt, 64 if "stride" not in name else SEQ_LEN), name, source, 64)
    assert outcome.result.num_documents == (62 if "wikitext" in name else 5153)
