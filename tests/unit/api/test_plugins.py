"""A plugin's kinds are known after `add_plugin`: its settings, and its model with the house's methods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import lmtrain
from lmtrain.config.settings_base import plugins
from lmtrain.errors import CheckpointError, UsageError
from tests.contracts.plugin import PLUGIN, PLUGIN_CONF
from tests.plugin_example.mean_mixer_settings import MeanMixerSettings
from tests.unit.api.saved_models import VOCAB_SIZE, save_run


@pytest.fixture(autouse=True)
def _without_plugins() -> Iterator[None]:
    known = dict(plugins)
    yield
    plugins.clear()
    plugins.update(known)


def test_a_plugins_model_is_loaded_once_the_plugin_is_added(tmp_path: Path) -> None:
    lmtrain.add_plugin(PLUGIN)
    run = save_run(
        tmp_path, MeanMixerSettings(num_layers=2, width=16, num_heads=2, ffn_width=32, vocab_size=VOCAB_SIZE, seq_len=8)
    )
    model, tokenizer = lmtrain.load(run, device="cpu")
    hidden = model.hidden_states(tokenizer.encode("mill"))
    assert list(hidden) == ["tokens", "blocks.0", "blocks.1", "last_norm"]
    assert len(model.generate("The", max_tokens=2)) > 0
    del plugins[PLUGIN]
    with pytest.raises(CheckpointError, match="mean_mixer"):
        lmtrain.load(run, device="cpu")


def test_a_plugins_settings_are_known(tmp_path: Path) -> None:
    lmtrain.add_plugin(PLUGIN)
    settings = lmtrain.settings("model=gpt_tiny", "data.path=x", "optim=heavy_ball", config_dir=PLUGIN_CONF)
    assert settings.optim.kind == "heavy_ball"


def test_a_package_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="--plugin=no_such_package cannot be imported"):
        lmtrain.add_plugin("no_such_package")


@pytest.mark.parametrize("name", ["", "..", "my-package", "a."])
def test_what_is_no_name_of_a_package_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not the name of a Python package"):
        lmtrain.add_plugin(name)
