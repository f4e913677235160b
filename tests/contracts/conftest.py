"""A package from outside the house, whose models, optimizers, schedules and tasks keep the same contracts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmtrain.config.settings_base import add_plugin, plugins
from tests.contracts.plugin import PLUGIN


@pytest.fixture(autouse=True, scope="module")
def plugged() -> Iterator[None]:
    add_plugin(PLUGIN)
    yield
    del plugins[PLUGIN]
