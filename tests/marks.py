"""Marks of parameters, for tests of which `make test` has a few, and `make test-all` or `make test-slow` the rest."""

from __future__ import annotations

from typing import Any

import pytest


def wide(*values: Any) -> list[Any]:
    """A tuple is the values of several parameters."""
    return _marked(values, pytest.mark.wide)


def slow(*values: Any) -> list[Any]:
    """The same, for tests that `make test-all` leaves to `make test-slow`."""
    return _marked(values, pytest.mark.slow)


def _marked(values: tuple[Any, ...], mark: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(*value if isinstance(value, tuple) else (value,), marks=mark) for value in values]
