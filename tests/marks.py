"""Marks of parameters, for tests of which `make test` has a few and `make test-all` the rest."""

from __future__ import annotations

from typing import Any

import pytest


def wide(*values: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.wide) for value in values]
