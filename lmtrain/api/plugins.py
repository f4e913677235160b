"""`lmtrain.add_plugin`: models, optimizers and tasks of another package, for all other names of the interface."""

from __future__ import annotations

from lmtrain.config import settings_base


def add_plugin(package: str) -> None:
    """Make the kinds of a package known, as the option --plugin does: its models to `lmtrain.load`, its tasks to
    `lmtrain.evaluate`, all of them to `lmtrain.settings`. Raise UsageError if the package cannot be imported.
    """
    settings_base.add_plugin(package)
