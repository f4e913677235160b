"""`lmtrain runs`: the table and its filters, what sets two runs apart, curves in the terminal."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

from lmtrain.cli.pretrain.print_sweep import print_sweep_table
from lmtrain.cli.runs.plot_command import draw_curves
from lmtrain.runfolder.stop_json_writer import DONE
from lmtrain.start.sweep_runs import summarize_run
from tests.cli.harness import Toy, lmtrain, on_terminal


@pytest.fixture(scope="module")
def runs(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared") / "runs"
    settings = {"train__steps": 6, "checkpoint__interval_steps": 3}
    lmtrain("pretrain", *toy.settings(folder / "a", **settings))
    lmtrain("pretrain", *toy.settings(folder / "deep" / "b", **settings, optim__lr="1e-3"))
    shutil.copytree(folder / "a", folder / "killed")
    (folder / "killed" / "stop.json").unlink()
    with open(folder / "killed" / "metrics.jsonl", "r+b") as file:
        file.truncate(len(file.read()) - 1500)
    (folder / "empty").mkdir()
    return folder


def listed(*arguments: object) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(lmtrain("runs", *arguments, "--json"))}


def test_the_table_and_its_filters(runs: Path) -> None:
    found = listed(runs)
    states = {name: row["state"] for name, row in found.items()}
    assert states == {"a": "finished", "deep/b": "finished", "killed": "killed"}
    assert (found["a"]["step"], found["a"]["steps"]) == (6, 6)
    assert found["killed"]["step"] < 6
    assert listed("list", runs) == found
    assert [*listed(runs, "--state", "killed", "--state", "failed")] == ["killed"]
    assert [*listed(runs, "--where", "optim.lr=0.001", "--where", "train.steps=6")] == ["deep/b"]
    for where in ("optim.lr=7", "train.steps=six", "model.positions=rotary", "data.tokenizer=none"):
        assert listed(runs, "--where", where) == {}
    for where in ("optim.lr=3e-3", "train.steps=6.0", "model.positions=learned", "data.tokenizer=null"):
        assert "a" in listed(runs, "--where", where)
    assert [*listed(runs / "a", runs / "deep")] == ["a", "b"]
    assert "killed" in lmtrain("runs", runs)
    for columns in (60, 80, 120):
        lines = on_terminal("runs", runs, columns=columns).splitlines()
        assert len(lines) == 4
        assert max(map(len, lines)) <= columns
        assert {line.split()[0] for line in lines[1:]} == {"a", "deep/b", "killed"}


def test_a_long_name_gives_way_to_how_a_run_stands(runs: Path, tmp_path: Path) -> None:
    for at, name in enumerate(("a", "deep/b")):
        shutil.copytree(runs / name, tmp_path / (6 * "of_a_long_name_") / f"run_{at}")
    title, *lines = on_terminal("runs", tmp_path, columns=70).splitlines()
    assert title.split()[:4] == ["run", "state", "step", "loss"]
    for at, line in enumerate(lines):
        assert line.startswith("…")
        assert f"/run_{at}  finished" in line


def test_columns_stand_below_each_other_whatever_letters_are_as_wide_as_two(runs: Path, tmp_path: Path) -> None:
    for name in ("a", "実験 ラン"):
        shutil.copytree(runs / "a", tmp_path / name)
    lines = lmtrain("runs", tmp_path).splitlines()
    places = [line.index(word) for line, word in zip(lines, ("state", "finished", "finished"), strict=True)]
    assert len({cell_len(line[:at]) for line, at in zip(lines, places, strict=True)}) == 1


def test_a_loss_that_is_no_number_is_shown_as_what_it_is(tmp_path: Path) -> None:
    rows = [{"event": "step", "step": step, "attempt": 1, "loss": 2.5 if step < 3 else "nan"} for step in (1, 2, 3, 4)]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert listed(tmp_path)["a"]["loss"] == "nan"
    assert lmtrain("runs", tmp_path).splitlines()[1].split()[:4] == ["a", "killed", "4", "nan"]
    lmtrain("report", tmp_path / "a")
    assert "<dt>loss</dt><dd>nan; 2.5 at step 2</dd>" in (tmp_path / "a" / "report.html").read_text()


@pytest.mark.parametrize(("last", "said"), [("nan", "loss not finite"), (3865.0, "loss above its first"), (2.4, "")])
def test_an_end_that_is_no_success_is_marked(tmp_path: Path, last: float | str, said: str) -> None:
    """By the table of runs and by a sweep's, which both call it finished."""
    run = tmp_path / "a"
    run.mkdir()
    rows = [{"event": "step", "step": step, "attempt": 1, "loss": loss} for step, loss in ((1, 2.5), (2, last))]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run / "stop.json").write_text(json.dumps({"cause": DONE}))
    found = listed(tmp_path)["a"]
    assert (found["state"], found["why"]) == ("finished", said)
    member = summarize_run(run, {"optim.lr": "1"}, "done")
    assert (member["state"], member["went_wrong"]) == ("done", said)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as shown:
        patch.setenv("COLUMNS", "120")
        print_sweep_table([member])
    assert (f"done, {said}" if said else "done") in shown.getvalue()


def test_what_is_refused(runs: Path) -> None:
    assert "Did you mean optim.lr?" in lmtrain("runs", runs, "--where", "optim.lrr=1", code=2)
    assert "has no value" in lmtrain("runs", runs, "--where", "optim.lr", code=2)
    assert "Did you mean finished?" in lmtrain("runs", runs, "--state", "finishd", code=2)
    assert "is not a folder that holds runs" in lmtrain("runs", runs / "empty", code=66)
    assert "is not the folder of a run" in lmtrain("runs", "diff", runs / "a", runs / "empty", code=66)
    assert "Did you mean grad_norm?" in lmtrain("runs", "plot", runs / "a", "--key", "grad_nrm", code=2)
    assert "Did you mean tokens?" in lmtrain("runs", "plot", runs / "a", "--by", "token", code=2)
    assert "no number to plot for --key=skipped" in lmtrain(
        "runs", "plot", runs / "a", "--key", "skipped", "--log", code=65
    )


def test_two_runs_that_part(runs: Path) -> None:
    facts = json.loads(lmtrain("runs", "diff", runs / "a", runs / "deep" / "b", "--json"))
    assert {key for key in facts["settings"] if not key.startswith("run.")} == {"optim.lr"}
    assert facts["causes"] == ["the setting optim.lr is 0.003 in A and 0.001 in B"]
    # the first step's loss is that of the first weights, which are the same
    assert (facts["first_step"], facts["first"]["lr"], facts["first"]["loss"]) == (1, 1, 2)
    assert facts["begun"] == {}
    said = lmtrain("runs", "diff", runs / "a", runs / "deep" / "b")
    assert "differs from step 2 on; equal in every row up to step 1" in said
    assert "cause           the setting optim.lr is 0.003 in A and 0.001 in B" in said


def test_a_run_and_its_copy_are_equal(runs: Path) -> None:
    facts = json.loads(lmtrain("runs", "diff", runs / "a", runs / "killed", "--json"))
    assert (facts["first_step"], facts["causes"], facts["settings"], facts["weights"]) == (None, [], {}, None)
    assert any("incomplete" in said for said in facts["not_compared"])
    assert "all equal, bit for bit" in lmtrain("runs", "diff", runs / "a", runs / "killed")


@pytest.mark.parametrize("log", [False, True])
def test_a_picture_of_any_height_has_numbers_on_its_axis(log: bool) -> None:
    steps = np.arange(1.0, 11.0)
    for low, high in ((2.05, 2.47), (4.1, 9.7), (3.2, 9.8), (5.5, 9e5), (1e-7, 2e-7), (3.0, 3.0)):
        values = np.linspace(low, high, 10)
        for height in range(4, 61):
            lines = [*draw_curves([("a", steps, values)], "loss", "step", log, 24, height, use_braille=True)]
            assert len(lines) == height + 3
            assert any("┤" in str(line) for line in lines), (low, high, height)


def test_curves_in_the_terminal(runs: Path) -> None:
    for columns in (80, 120):
        lines = on_terminal("runs", "plot", runs / "a", runs / "deep", columns=columns).splitlines()
        assert max(map(len, lines)) <= columns
        assert (lines[0], len(lines)) == ("loss", 21)
        assert {"a", "b"} <= set("".join(lines[1:-2]))  # without colours a letter stands for each
        one = on_terminal("runs", "plot", runs / "a", "--key", "grad_norm", "--log", "--height", 8, columns=columns)
        assert any("⠁" <= character <= "⣿" for character in one)
        assert len(one.splitlines()) == 11
