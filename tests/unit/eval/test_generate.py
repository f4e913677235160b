"""Sampling: seeds, limits, cropping, the end of a document; and text that is never half a character."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmtrain.batch import Batch
from lmtrain.errors import NonFiniteLossError, UsageError
from lmtrain.eval.sample_text_from_prompt import (
    draw_token,
    generate,
    generate_stream,
    generate_tokens,
    prompt_tokens,
    stream_text,
)
from lmtrain.eval.sampling_and_precision_settings import Sampling
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

SEQ_LEN = 16
LIKELY = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64))


def drawn(sampling: Sampling, logits: torch.Tensor = LIKELY) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {draw_token(logits, sampling, generator) for _ in range(300)}


@pytest.fixture(scope="module")
def model(build_gpt: Callable[..., Any], tokenizer: Tokenizer) -> Any:
    return build_gpt(tokenizer.vocab_size, SEQ_LEN, std=0.2)


def test_the_same_seed_gives_the_same_text_and_another_seed_another(model: Any, tokenizer: Tokenizer) -> None:
    texts = [generate(model, tokenizer, "The mill", 30, Sampling(seed=seed), SEQ_LEN).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_stream_is_the_same_text(model: Any, tokenizer: Tokenizer) -> None:
    sampling = Sampling(seed=5)
    pieces = list(generate_stream(model, tokenizer, "The mill", 40, sampling, SEQ_LEN))
    assert "".join(pieces) == generate(model, tokenizer, "The mill", 40, sampling, SEQ_LEN).text
    assert len(pieces) > 1


def test_temperature_0_takes_the_likeliest(build_table: Callable[..., Any]) -> None:
    table = np.eye(5)[:, [4, 0, 1, 2, 3]]  # after a token comes the next one
    found = list(generate_tokens(build_table(table), [0], 6, Sampling(temperature=0), SEQ_LEN, frozenset()))
    assert found == [1, 2, 3, 4, 0, 1]


def test_top_k_and_top_p_leave_only_the_likeliest() -> None:
    assert drawn(Sampling()) == {0, 1, 2, 3}
    assert drawn(Sampling(top_k=2)) == {1, 3}
    assert drawn(Sampling(top_k=9)) == {0, 1, 2, 3}
    assert drawn(Sampling(top_p=0.69)) == {1, 3}
    assert drawn(Sampling(top_p=0.71)) == {1, 2, 3}
    assert drawn(Sampling(top_p=1e-9)) == {1}
    assert drawn(Sampling(temperature=0.01)) == {1}
    assert drawn(Sampling(top_k=2, top_p=0.5)) == {1}, "of the two that top-k leaves, the likelier has 4/7"


def test_draws_follow_the_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = np.bincount([draw_token(LIKELY, Sampling(), generator) for _ in range(4000)])
    np.testing.assert_allclose(counts / 4000, [0.1, 0.4, 0.2, 0.3], atol=0.03)


def test_padded_columns_are_never_drawn() -> None:
    padded = torch.cat([torch.zeros(3, dtype=torch.float64), torch.full((5,), -torch.inf, dtype=torch.float64)])
    for sampling in (Sampling(), Sampling(temperature=50.0), Sampling(top_k=6), Sampling(top_p=0.999)):
        assert drawn(sampling, padded) == {0, 1, 2}


def test_a_long_context_is_cropped_on_its_left(model: Any) -> None:
    long = list(range(3 * SEQ_LEN))
    sampling = Sampling(temperature=0)
    first = next(generate_tokens(model, long, 1, sampling, SEQ_LEN, frozenset()))
    assert first == next(generate_tokens(model, long[-SEQ_LEN:], 1, sampling, SEQ_LEN, frozenset()))
    tokens = torch.tensor([long[-SEQ_LEN:]])
    assert first == int(model.logits(Batch(tokens_BT=tokens, labels_BT=tokens))[0, -1].argmax())


def test_the_end_of_a_document_ends_a_sample(tokenizer: Tokenizer, build_table: Callable[..., Any]) -> None:
    letter = tokenizer.encode("x")[0]
    table = np.zeros((tokenizer.vocab_size, tokenizer.vocab_size))
    table[:, tokenizer.eod_id] = 1.0
    table[tokenizer.eod_id, letter] = 2.0
    made = generate(build_table(table), tokenizer, "", 10, Sampling(temperature=0), SEQ_LEN)
    assert (made.text, made.num_tokens, made.stopped_by) == ("x", 2, "end_of_document")
    assert "".join(generate_stream(build_table(table), tokenizer, "", 10, Sampling(temperature=0), SEQ_LEN)) == "x"


def test_other_tokens_end_a_sample_where_the_model_has_others(
    tokenizer: Tokenizer, build_table: Callable[..., Any]
) -> None:
    end = tokenizer.encode("x")[0]
    table = np.zeros((tokenizer.vocab_size, tokenizer.vocab_size))
    table[:, end] = 1.0
    chat = tokenizer.with_end_ids(frozenset({3, end}))
    made = generate(build_table(table), chat, "m", 10, Sampling(temperature=0), SEQ_LEN)
    assert (made.text, made.num_tokens, made.stopped_by) == ("", 1, "end_of_document")
    assert tokenizer.end_ids == {tokenizer.eod_id}
    assert tokenizer.with_end_ids(frozenset()) is tokenizer


def test_without_an_end_the_limit_stops(tokenizer: Tokenizer, build_table: Callable[..., Any]) -> None:
    table = np.zeros((tokenizer.vocab_size, tokenizer.vocab_size))
    table[:, tokenizer.encode("x")[0]] = 1.0
    made = generate(build_table(table), tokenizer, "x", 4, Sampling(temperature=0), SEQ_LEN)
    assert (made.text, made.num_tokens, made.stopped_by) == ("xxxx", 4, "max_new_tokens")


def test_an_empty_prompt_starts_a_document(tokenizer: Tokenizer) -> None:
    assert prompt_tokens(tokenizer, "") == [tokenizer.eod_id]
    assert prompt_tokens(tokenizer, "mill") == tokenizer.encode("mill")


@settings(max_examples=30)
@example(text="the \u20ac", cut=1)
@example(text="x \U0001f600 y\u00e9", cut=3)
@given(text=st.text(max_size=20), cut=st.integers(0, 3))
def test_streamed_pieces_are_whole_characters(tokenizer: Tokenizer, text: str, cut: int) -> None:
    """Byte-level tokens split characters; a stream that also ends within one gives the rest at the end."""
    text = text.replace("\ufffd", "")
    tokens = tokenizer.encode(text)
    tokens = tokens[: max(len(tokens) - cut, 0)]
    *pieces, last = ["", *stream_text(tokenizer, tokens)]
    assert text.startswith("".join(pieces))
    assert "".join(pieces) + last == tokenizer.decode(tokens)


def test_bytes_that_make_no_character_come_out_once_text_goes_on(tokenizer: Tokenizer) -> None:
    euro = tokenizer.encode("\u20ac")
    given: list[int] = []
    tokens = [*euro[:2], *tokenizer.encode("a"), *euro]
    pieces = [(piece, len(given)) for piece in stream_text(tokenizer, (given.append(t) or t for t in tokens))]  # type: ignore[func-returns-value]
    assert pieces == [("\ufffda", 3), ("\u20ac", 6)]


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),  # torch would draw what it draws for 0
        ({"seed": 2**64}, "seed"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], key: str) -> None:
    with pytest.raises(UsageError, match=f"{key}="):
        Sampling(**wrong)


def test_a_damaged_model_is_an_error() -> None:
    with pytest.raises(NonFiniteLossError, match="not finite"):
        draw_token(torch.tensor([0.0, torch.nan]), Sampling(), torch.Generator())
