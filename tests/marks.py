"""Marks of parameters, for tests of which `make test` has a few and `make test-all` the rest."""

from __future__ import annotations

from typing import Any

import pytest


def wide(*values: Any) -> list[Any]:
    """A tuple is the values of several parameters."""
    return [pytest.param(*value if isinstance(value, tuple) else (value,), marks=pytest.mark.wide) for value in values]
