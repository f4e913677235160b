"""The compiled helpers of csrc/, or None where no compiler was found at install. Each has a numpy twin."""

from __future__ import annotations

import os
from types import ModuleType


def _load() -> ModuleType | None:
    # because: tests compare the twin, and a user can rule the helper out, by LMTRAIN_NATIVE=0
    if os.environ.get("LMTRAIN_NATIVE") == "0":
        return None
    try:
        from lmtrain import _native  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        return None
    module: ModuleType = _native
    return module


lib: ModuleType | None = _load()
