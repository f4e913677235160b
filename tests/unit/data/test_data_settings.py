"""Data settings judge themselves, and the config in conf/data lacks nothing but the path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lmtrain.config.build import build_settings
from lmtrain.data.data_settings import DataSettings
from lmtrain.errors import SettingsError


def test_the_config_asks_for_the_path(repository: Path) -> None:
    tree = OmegaConf.to_container(OmegaConf.load(repository / "conf" / "data" / "dataset.yaml"))
    assert isinstance(tree, dict)
    with pytest.raises(SettingsError) as caught:
        build_settings(DataSettings, tree, "data")
    assert str(caught.value) == "data.path is not set. Add data.path=VALUE."
    assert build_settings(DataSettings, tree | {"path": "books"}, "data") == DataSettings(path="books")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"split": (0.0, 1.0)}, r"split=\[0.0,1.0\] must be"),
        ({"split": (1.0, -1.0)}, "none negative"),
        ({"split": ()}, "one to three"),
        ({"split": (1.0, 0.0, 0.0, 0.0)}, "one to three"),
        ({"split": (float("nan"),)}, "one to three"),
        ({"path": ""}, "names no dataset"),
        ({"prefetch_steps": -1}, "at least 0"),
    ],
)
def test_wrong_values(values: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        DataSettings(**({"path": "books"} | values))
