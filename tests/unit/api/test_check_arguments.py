"""Token ids in any form become one array, and wrong ids are named with their position."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest

import lmtrain
from lmtrain.api.check_arguments import check_token_ids, checked
from lmtrain.api.encode_and_decode_text import Tokenizer
from lmtrain.config.settings_base import kinds
from lmtrain.errors import MissingInputError, UsageError
from lmtrain.eval.sampling_and_precision_settings import PrecisionName
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


def test_only_a_switch_takes_a_bool() -> None:
    @checked
    def function(switch: bool = False, number: int = 0) -> tuple[bool, int]:
        return switch, number

    assert function(True, 3) == (True, 3)
    with pytest.raises(UsageError, match="was given a bool as number"):
        function(number=True)
    with pytest.raises(UsageError, match="was given a int as switch"):
        function(1)  # type: ignore[arg-type]


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


FUNCTIONS = [value for name in lmtrain.__all__ if inspect.isfunction(value := getattr(lmtrain, name))]


@pytest.mark.parametrize("function", [*FUNCTIONS, lmtrain.Model.loss, lmtrain.Model.generate], ids=lambda f: f.__name__)
@pytest.mark.parametrize("wrong", [object(), b"a", [1]], ids=lambda wrong: type(wrong).__name__)
def test_every_argument_of_a_wrong_type_is_refused(function: Callable[..., Any], wrong: Any) -> None:
    parameters = inspect.signature(function).parameters
    required = {
        name: "x"
        for name, each in parameters.items()
        if each.default is each.empty and each.kind is not each.VAR_POSITIONAL
    }
    for name, parameter in parameters.items():
        if name in ("self", "ids"):
            continue
        words = [wrong] if parameter.kind is parameter.VAR_POSITIONAL else []
        values = required if words else required | {name: wrong}
        with pytest.raises(UsageError, match=rf"{function.__name__}\(\) was given a \w+ as {name}\. Give "):
            function(*words, **values)


@checked
def sample(path: str | os.PathLike[str], number: int = 0, share: float = 0.0) -> None:
    open(path).close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "a\0b"}, "path='a\\\\x00b', which cannot be a path"),
        ({"path": "\ud800"}, "which cannot be a path"),
        ({"number": True}, "was given a bool as number. Give int"),
        ({"number": 1.0}, "was given a float as number. Give int"),
        ({"number": 2**64}, "more than 64 bits"),
        ({"share": "1"}, "was given a str as share. Give float"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sample(**{"path": os.devnull} | arguments)


def test_numbers_of_numpy_fit_and_a_file_that_cannot_be_opened_is_our_error() -> None:
    sample(os.devnull, np.int32(3), np.float32(1))  # type: ignore[arg-type]
    sample(os.devnull, share=1)
    with pytest.raises(MissingInputError, match="cannot be opened: No such file"):
        sample("/nowhere/at/all")
    with pytest.raises(TypeError, match="unexpected keyword"):
        sample(os.devnull, size=1)  # type: ignore[call-arg]
