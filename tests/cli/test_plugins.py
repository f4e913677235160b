"""A model, an optimizer, two schedules and a task from outside the package, through the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmtrain.config.settings_base import kinds, plugins
from lmtrain.models.model_settings import ModelSettings
from tests.cli.harness import Toy, lmtrain
from tests.cli.test_parallel_runs import assert_same_curve, rows, run
from tests.contracts.plugin import PLUGIN, PLUGIN_CONF

CHOSEN = ("--config-dir", PLUGIN_CONF, "model=mean_mixer", "optim=heavy_ball", "schedule=stairs", "optim.lr=0.3")
WITH = ("--plugin", PLUGIN)


@pytest.fixture(autouse=True)
def unplugged() -> Iterator[None]:
    """A verb that runs in this process leaves the plugin behind."""
    yield
    plugins.pop(PLUGIN, None)


@pytest.fixture(scope="module")
def four(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pp 2 x tp 2, under the plugin's own pipeline schedule."""
    folder = tmp_path_factory.mktemp("plugged") / "run"
    settings = [*toy.settings(folder), *WITH, *CHOSEN, "parallel=eager", "parallel.tp=2", "parallel.timeout_s=60"]
    output = run(4, *settings)
    assert "pipeline          eager, 2 stages" in output
    return folder


@pytest.mark.wide
def test_it_trains_on_any_layout_as_on_one_process(toy: Toy, four: Path, tmp_path: Path) -> None:
    lmtrain("pretrain", *toy.settings(tmp_path / "one"), *WITH, *CHOSEN)
    assert_same_curve(rows(four), rows(tmp_path / "one"))
    losses = [row["loss"] for row in rows(four)]
    assert losses[-1] < losses[0] - 0.1
    log = (four / "log.txt").read_text()
    for line in ("cut: stage 0 of 2, layers 0-0, embedding", "stage 0: tensor parallel over 2: 5 modules"):
        assert line in log


@pytest.mark.wide
def test_its_checkpoint_is_opened_by_every_verb(four: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n")
    found = json.loads(lmtrain(
        "eval", four, *WITH, "--task", "lines", "--data", tmp_path / "text.txt", "--device", "cpu", "--json"
    ))  # fmt: skip
    assert found["results"][0]["measures"]["nll_per_line_nats"] > 0
    assert "all is well" in lmtrain("verify", four, *WITH)
    lmtrain("inspect", four, *WITH)
    lmtrain("generate", four, *WITH, "--prompt", "def", "--max-new-tokens", 4, "--device", "cpu")
    lmtrain("reshard", four, "--output", tmp_path / "whole", *WITH, "--to", "tp=1")
    assert "all is well" in lmtrain("verify", tmp_path / "whole", *WITH)


@pytest.mark.wide
def test_without_the_plugin_it_is_refused_with_a_way_out(toy: Toy, four: Path, tmp_path: Path) -> None:
    known = ", ".join(kinds(ModelSettings))
    said = f"model.kind=mean_mixer is not a kind of model. Known: {known}. If it is a plugin's, add --plugin PACKAGE."
    assert said in lmtrain("generate", four, "--prompt", "x", code=65)
    output = lmtrain("pretrain", *toy.settings(tmp_path / "run"), *CHOSEN, "parallel=eager", code=2)
    for part in (said, "optim.kind=heavy_ball is not a kind", "schedule.kind=stairs", "parallel.schedule=eager is not"):
        assert part in output


@pytest.mark.wide
def test_a_plugin_that_is_not_there(four: Path) -> None:
    output = lmtrain("verify", four, "--plugin", "tests.no_such_plugin", code=2)
    assert "--plugin=tests.no_such_plugin cannot be imported: No module named 'tests.no_such_plugin'." in output


def test_no_file_names_code(toy: Toy, tmp_path: Path) -> None:
    """A plugin is the command line's alone: as a setting it is refused like any unknown key."""
    output = lmtrain("pretrain", *toy.settings(tmp_path / "run"), f"plugin={PLUGIN}", code=2)
    assert "plugin=tests.plugin_example is not a setting" in output
