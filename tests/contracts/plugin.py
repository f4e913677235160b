"""The example of a plugin: where it lies, and how its configs are found beside the house's."""

from __future__ import annotations

from pathlib import Path

from lmtrain.config.compose_run_settings import conf_dir, group_choices
from lmtrain.config.settings_base import Choice, add_plugin, kinds, plugins

PLUGIN = "tests.plugin_example"
PLUGIN_CONF = Path(__file__).resolve().parents[1] / "plugin_example" / "conf"


def choices(group: str) -> list[str]:
    return group_choices(PLUGIN_CONF)[group]


def words(base: type[Choice]) -> list[str]:
    """Every kind, before any test has brought the plugin."""
    add_plugin(PLUGIN)
    try:
        return list(kinds(base))
    finally:
        del plugins[PLUGIN]


def config_file(group: str, name: str) -> Path:
    folders = (PLUGIN_CONF, conf_dir())
    return next(path for folder in folders if (path := folder / group / f"{name}.yaml").is_file())
