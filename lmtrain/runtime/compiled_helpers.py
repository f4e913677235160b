"""Access to the compiled helpers of csrc/; `lib` is None if no compiler was found at install.

Each helper has a numpy fallback.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from lmtrain.errors import LmtrainError

Function = TypeVar("Function", bound=Callable[..., Any])
INTERFACE = 3  # version: raise here and in csrc/native.cpp when a function is added, removed or takes other arguments


def _load() -> ModuleType | None:
    """Import the compiled module. Return None if it is not installed or disabled by LMTRAIN_NATIVE=0. Raise an
    LmtrainError if it was compiled for another version of lmtrain.
    """
    # because: LMTRAIN_NATIVE=0 lets tests compare the numpy fallback and lets a user disable the compiled helpers
    if os.environ.get("LMTRAIN_NATIVE") == "0":
        return None
    try:
        from lmtrain import _native  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        return None
    module: ModuleType = _native
    if getattr(module, "interface", 0) != INTERFACE:
        raise LmtrainError(
            f"{module.__file__} was compiled for another version of lmtrain and cannot be used with this one. Run "
            "`make native`, or install lmtrain again; with LMTRAIN_NATIVE=0 lmtrain runs without it, more slowly."
        )
    return module


lib: ModuleType | None = _load()


def compiled(name: str, fallback: Function) -> Function:
    """Return the compiled function of this name; without compiled helpers, `fallback`, the same function in numpy."""
    function: Function = fallback if lib is None else getattr(lib, name)
    return function
