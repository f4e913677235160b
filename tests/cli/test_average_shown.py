"""What is shown of a run that keeps an average of its weights: it stands beside the weights, never in their place."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import Toy, lmtrain

pytestmark = pytest.mark.wide


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("held_out") / "text.txt"
    path.write_text("A few lines of text that were not read before.\n" * 8)
    return path


@pytest.fixture(scope="module")
def run(toy: Toy, held_out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose average lags far behind its weights, validated and evaluated at its end."""
    folder = tmp_path_factory.mktemp("average") / "run"
    settings = toy.settings(
        folder, checkpoint__ema__decay=0.9, train__valid_interval_steps=6, data__split="[0.9,0.1,0.0]",
        eval__interval_steps=12, eval__tasks=f"[{{task: perplexity, data: {held_out}}}]",
    )  # fmt: skip
    lmtrain("pretrain", *settings)
    return folder


def last(run: Path, event: str) -> dict[str, Any]:
    return [row for row in read_metrics(run / "metrics.jsonl") if row["event"] == event][-1]


def test_the_average_in_a_checkpoint_is_what_the_run_has_measured(run: Path, held_out: Path, tmp_path: Path) -> None:
    task = ("--task", "perplexity", "--data", held_out, "--output", tmp_path / "found.json")
    for weights, key in (("ema", "ema"), ("model", "measures")):
        lmtrain("eval", run, *task, "--weights", weights, "--overwrite")
        (found,) = json.loads((tmp_path / "found.json").read_text())["results"]
        assert found["measures"]["token_perplexity"] == pytest.approx(last(run, "eval")[key]["token_perplexity"])
    assert last(run, "eval")["ema"] != last(run, "eval")["measures"]


def test_lists_and_views_have_both(run: Path) -> None:
    valid = last(run, "valid")
    (row,) = json.loads(lmtrain("runs", run, "--json"))
    assert row["loss/valid"] == valid["loss"] != valid["ema"]["loss"]
    shown = lmtrain("inspect", run)
    assert f"best validation {valid['loss']:.4f} at step 12" in " ".join(shown.split())
    assert f"; average of the weights {valid['ema']['loss']:.4f}" in shown
    assert re.search(r"evaluation +perplexity.*, of the average [a-z ]+ [\d.]+ at step 12", shown)


def test_a_report_draws_both(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    lmtrain("report", run, "--output", page)
    (data,) = re.findall('<script type="application/json" id="figures">(.*?)</script>', page.read_text())
    figures = {figure["key"]: figure for figure in json.loads(data)["figures"]}
    curves = {curve["name"]: curve for curve in figures["loss"]["curves"]}
    assert curves["validation"]["value"][-1] == pytest.approx(last(run, "valid")["loss"], rel=1e-5)
    of_average = last(run, "valid")["ema"]["loss"]
    assert curves["validation of the average"]["value"][-1] == pytest.approx(of_average, rel=1e-5)
    text = unescape(re.sub(r"<[^>]+>", " ", page.read_text()))
    assert f"{last(run, 'eval')['headline'].replace('_', ' ')} of the average" in text


def test_an_exports_card_has_the_runs_measures_of_what_is_exported(run: Path, tmp_path: Path) -> None:
    for weights, loss in (("model", last(run, "valid")["loss"]), ("ema", last(run, "valid")["ema"]["loss"])):
        lmtrain("export", run, "--to", "hf", "--output", tmp_path / weights, "--weights", weights)
        card = (tmp_path / weights / "README.md").read_text()
        assert f"| loss on the run's validation data, nats per token | {loss:.4f} |" in card
