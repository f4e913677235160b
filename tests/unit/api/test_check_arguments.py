"""Token ids in any form become one array, and wrong ids are named with their position."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from lmtrain.api.check_arguments import check_token_ids
from lmtrain.api.encode_and_decode_text import Tokenizer
from lmtrain.cli.shared_options import PrecisionName
from lmtrain.config.settings_base import kinds
from lmtrain.errors import UsageError
from lmtrain.parallel.device_and_precision_settings import PrecisionSettings
from lmtrain.tokenizer.train import train_bpe


@pytest.mark.parametrize("ids", [[1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3], np.uint16), np.arange(1, 4)])
def test_any_integers_become_int64(ids: Any) -> None:
    array = check_token_ids(ids, 4, 3, num_axes=(1, 2))
    assert array.dtype == np.int64
    assert array.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (5, r"shape \[\], but must have the shape \[T\], for one text, or \[B, T\], for B texts"),
        ([[[1]]], r"shape \[1, 1, 1\]"),
        ([[1, 2], [3]], "with rows of the same length"),
        ([1.0, 2.0], "type float64. Give integers"),
        ([True], "type bool"),
        (["a"], "type <U1"),
        ([2**70], "type object"),
        ([], "There are no ids"),
        ([[], []], "There are no ids"),
        ([3, 4], r"ids\[1\] is 4, outside the vocabulary, whose ids are 0 to 3. Encode"),
        ([1, 1, 1, 1], "4 ids in a row, and the model takes at most 3"),
    ],
)
def test_others_are_refused(ids: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_token_ids(ids, 4, 3, num_axes=(1, 2))


def test_a_tokenizer_reads_back_what_it_has_written() -> None:
    tokenizer = Tokenizer(train_bpe(["The old mill"], 300))
    ids = tokenizer.encode("The old mill <|endoftext|>")
    assert tokenizer.special["eod"] not in ids
    for form in (ids, np.array(ids, np.uint16)):
        assert tokenizer.decode(form) == "The old mill <|endoftext|>"
    assert tokenizer.decode([]) == ""
    assert len(tokenizer) == tokenizer.vocab_size == 257, "256 bytes and the end of a document"
    with pytest.raises(UsageError, match=rf"ids\[0\] is {tokenizer.vocab_size}, outside"):
        tokenizer.decode([tokenizer.vocab_size])
    with pytest.raises(UsageError, match="encode\\(\\) takes a text, and was given a bytes"):
        tokenizer.encode(b"The")  # type: ignore[arg-type]


def test_the_types_on_the_command_line_are_those_of_the_settings() -> None:
    assert set(get_args(PrecisionName)) == set(kinds(PrecisionSettings))
