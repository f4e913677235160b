"""Check what a caller of the Python interface gives: the types of arguments, and token ids, which become an array.

Every function of the interface that takes more than ids is decorated with `checked`. Torch-free.
"""

from __future__ import annotations

import json
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, wraps
from inspect import Parameter, Signature, signature
from types import NoneType
from typing import Any, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from lmtrain.config.name_suggestions import union_members
from lmtrain.config.names_without_counterpart import sentence_about
from lmtrain.errors import UsageError
from lmtrain.eval.sampling_and_precision_settings import PrecisionName
from lmtrain.runtime.files.explain_os_errors import error_from_os
from lmtrain.units import plural

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_NUMBERS: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}  # with the numbers of numpy
_SHAPES = {1: "[T], for one text", 2: "[B, T], for B texts of the same length"}


def checked(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Decorate a function of the Python interface so that an argument of another type than its annotation raises
    UsageError, and a file that cannot be opened or written an LmtrainError in place of an OSError.
    """
    parameters = signature(function)

    @cache
    def allowed_types() -> dict[str, tuple[Any, ...]]:
        return {name: union_members(hint) for name, hint in get_type_hints(function).items()}

    @wraps(function)
    def call(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        _refuse_settings_as_keywords(function.__name__, parameters, kwargs)
        for name, value in parameters.bind(*args, **kwargs).arguments.items():
            is_many = parameters.parameters[name].kind is Parameter.VAR_POSITIONAL
            for single in value if is_many else [value]:
                if name in allowed_types():
                    _check_argument(f"{function.__name__}()", name, single, allowed_types()[name])
        try:
            return function(*args, **kwargs)
        except OSError as error:
            raise error_from_os(error) from error

    return call


def _refuse_settings_as_keywords(call: str, parameters: Signature, kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError if a function that takes settings as texts is given them as keywords."""
    others = {name: value for name, value in kwargs.items() if name not in parameters.parameters}
    if others and "overrides" in parameters.parameters:
        for name in others:
            if why := sentence_about(name):
                raise TypeError(f"{call}() has no {name}. {why}")
        names = ", ".join(others)
        words = ", ".join(repr(f"{name}={_as_text(value)}") for name, value in others.items())
        raise TypeError(f"{call}() takes settings as texts, and {names} was given as a keyword. Give {words}.")


def _as_text(value: Any) -> str:
    """Return the text of a setting's value; VALUE for an object that no text stands for."""
    with suppress(TypeError, ValueError):
        json.dumps(os.fspath(value) if isinstance(value, os.PathLike) else value)
        return str(value)
    return "VALUE"


def _check_argument(call: str, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise UsageError unless `value`, the argument `name` of `call`, has one of the types `allowed` and fits into it:
    a path names a file that can exist, a whole number has at most 64 bits.
    """
    types = [get_origin(hint) or hint for hint in allowed]
    if Any in types or (value is None and NoneType in types):
        return
    is_bool = isinstance(value, bool | np.bool_)  # because: Python counts True among the whole numbers
    if (is_bool and bool not in types) or not any(isinstance(value, _NUMBERS.get(each, each)) for each in types):
        names = " or ".join("None" if each is NoneType else each.__name__ for each in types)
        raise UsageError(f"{call} was given a {type(value).__name__} as {name}. Give {names}.")
    if os.PathLike in types and not _can_be_path(value):
        raise UsageError(f"{call} was given {name}={str(value)[:100]!r}, which cannot be a path. Give another path.")
    if isinstance(value, numbers.Integral) and not -(2**63) <= int(value) < 2**64:
        raise UsageError(f"{call} was given a number of more than 64 bits as {name}. Give a smaller number.")


def _can_be_path(value: Any) -> bool:
    try:
        return isinstance(os.fspath(value), str) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def check_dtype(dtype: str) -> None:
    """Raise UsageError unless models compute in `dtype`."""
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
