"""Settings from Python are those that `lmtrain pretrain` would have, and its refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import assert_type

import pytest

import lmtrain
from lmtrain.config.compose_run_settings import compose
from lmtrain.errors import MissingInputError, SettingsError
from lmtrain.train.run_config import RunConfig


def test_they_are_those_of_a_run() -> None:
    settings = lmtrain.settings("model=gpt_tiny", "data.path=x", "optim.lr=3e-4")
    assert_type(settings, RunConfig)
    assert settings == compose(RunConfig, ["model=gpt_tiny", "data.path=x", "optim.lr=3e-4"])
    assert settings.model.shape.width == settings.to_dict()["model"]["width"]


def test_all_wrong_ones_are_refused_together() -> None:
    with pytest.raises(SettingsError) as error:
        lmtrain.settings("model=gpt_tiny", "data.path=x", "model.num_heads=5", "optim.lrr=1")
    assert len(error.value.problems) == 2


def test_names_of_other_tools_are_answered_as_on_the_command_line() -> None:
    with pytest.raises(SettingsError, match=r"warmup_ratio=0.1 is schedule.warmup_steps=6 here, 0.1 x train.steps"):
        lmtrain.settings("data.path=x", "warmup_ratio=0.1", "max_steps=60")
    with pytest.raises(SettingsError, match=r"Did you mean train.steps=10\?"):
        lmtrain.settings("data.path=x", "max_step=10")
    with pytest.raises(TypeError, match=r"num_layer was given as a keyword. Give 'num_layer=2'."):
        lmtrain.settings("data.path=x", num_layer=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"num_layer was given as a keyword. Give 'num_layer=VALUE'."):
        lmtrain.settings("data.path=x", num_layer=object())  # type: ignore[call-arg]


def test_callbacks_are_answered_with_what_there_is() -> None:
    with pytest.raises(TypeError, match=r"settings\(\) has no callbacks. There are no callbacks here. lmtrain.metrics"):
        lmtrain.settings("data.path=x", callbacks=[object()])  # type: ignore[call-arg]
    with pytest.raises(SettingsError, match="a file STOP in") as caught:
        lmtrain.settings("data.path=x", "callbacks=[StopAtLoss(10.2)]")
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None


def test_a_folder_of_configs_and_a_run_may_stand_for_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("kind: gpt\nnum_layers: 2\nwidth: 16\nnum_heads: 2\nseq_len: 8\n")
    assert lmtrain.settings("model=mine", "data.path=x", config_dir=str(tmp_path)).model.shape.width == 16
    with pytest.raises(MissingInputError, match="--from-run="):
        lmtrain.settings(from_run=tmp_path / "none")


def test_the_package_config_stays_one() -> None:
    module = "lmtrain.config.compose_run_settings"
    code = f"import lmtrain; lmtrain.settings; import {module}; assert {module}; print('ok')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "ok\n"
