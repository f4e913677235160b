"""Check what a caller of the Python interface gives: token ids, which become an array, and types. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import UsageError
from lmtrain.units import plural

_SHAPES = {1: "[T], for one text", 2: "[B, T], for B texts of the same length"}


def check_dtype(dtype: str) -> None:
    """Raise UsageError unless models compute in `dtype`."""
    from lmtrain.cli.shared_options import PrecisionName  # because: it imports typer, which a tokenizer does not need

    known = get_args(PrecisionName)
    if dtype not in known:
        raise UsageError(f"dtype={dtype} is not a type that models compute in. Use {', '.join(known)}.")


def check_token_ids(
    ids: Any, vocab_size: int, max_tokens: int | None = None, *, num_axes: Sequence[int]
) -> NDArray[Any]:
    """Return `ids` as an int64 array. `ids` is a list, a nested list, an array or a tensor of integers.

    `vocab_size` is the number of ids that the model or tokenizer knows, `max_tokens` the longest row that the model can
    take, and `num_axes` lists how many axes are allowed: 1 for one text, 2 for rows of the same length. Raise
    UsageError for anything else, and for an id outside the vocabulary with its position.
    """
    array = _as_array(ids)
    if array.ndim not in num_axes:
        allowed = ", or ".join(_SHAPES[number] for number in num_axes)
        raise UsageError(f"The ids have the shape {list(array.shape)}, but must have the shape {allowed}.")
    if array.size and array.dtype.kind not in "iu":
        raise UsageError(f"The ids have the type {array.dtype}. Give integers, such as `tokenizer.encode` returns.")
    if max_tokens is not None and array.size == 0:
        raise UsageError("There are no ids, and a model needs at least one. Give the ids of a text that is not empty.")
    if max_tokens is not None and array.shape[-1] > max_tokens:
        raise UsageError(
            f"There are {array.shape[-1]} ids in a row, and the model takes at most {max_tokens}. Give fewer, or let "
            "`lmtrain.evaluate` cut a long text into windows."
        )
    is_wrong = (array < 0) | (array >= vocab_size)
    if is_wrong.any():
        position = np.argwhere(is_wrong)[0].tolist()
        where = "".join(f"[{index}]" for index in position)
        num_others = int(is_wrong.sum()) - 1
        others = f", and {plural(num_others, 'other id')} too" if num_others else ""
        raise UsageError(
            f"ids{where} is {array[tuple(position)]}, outside the vocabulary, whose ids are 0 to {vocab_size - 1}"
            f"{others}. Encode the text with the model's own tokenizer."
        )
    return array.astype(np.int64)


def _as_array(ids: Any) -> NDArray[Any]:
    """Return ids as an array of any type and shape. Raise UsageError if they form none."""
    if hasattr(ids, "detach"):  # a torch tensor, on any device
        ids = ids.detach().cpu()
    try:
        return np.asarray(ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            "The ids are not an array of integers with rows of the same length. Give one text at a time, or cut the "
            "texts to equal lengths."
        ) from error
