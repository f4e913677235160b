"""What the commands show of a run in stages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.harness import Toy, lmtrain, on_terminal
from tests.marks import wide

STAGES = (
    "stages.trunk.steps=6", "stages.decay.tokens=500", "stages.decay.schedule=linear", "stages.decay.optim.lr=1e-3",
    "stages.long.steps=2", "stages.long.model.seq_len=64",
)  # fmt: skip


def typed(toy: Toy, folder: Path) -> list[str]:
    words = [word for word in toy.settings(folder) if not word.startswith("train.steps=")]
    return ["pretrain", *words, "model.positions=rotary", *STAGES]


@pytest.fixture(scope="module")
def run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three stages: steps 1 to 6, 7 to 10 and 11 to 12."""
    folder = tmp_path_factory.mktemp("stages") / "run"
    lmtrain(*typed(toy, folder))
    return folder


@pytest.mark.wide
@pytest.mark.parametrize("columns", [80, 120])
def test_a_dry_run_prints_a_table_of_stages(run: Path, toy: Toy, columns: int) -> None:
    begun = lmtrain(*typed(toy, run.with_name("new")), "--dry-run", env={"COLUMNS": str(columns)})
    assert "stages.decay.tokens=500 is rounded up to 4 whole steps: 512 tokens." in begun
    table = begun[begun.index("\nstage ") :].splitlines()
    assert max(map(len, table)) <= columns
    facts = json.loads(lmtrain(*typed(toy, run), "stages.more.steps=4", "--dry-run", "--json"))
    assert [row["status"] for row in facts["stages"]] == ["done", "done", "done", "ahead"]
    assert facts["stages"][3]["sources"][0]["dataset"] == str(toy.data)


@pytest.mark.wide
def test_a_text_is_the_data_of_all_stages(toy: Toy, tmp_path: Path) -> None:
    words = [word for word in typed(toy, tmp_path / "run") if not word.startswith("data.path=")]
    facts = json.loads(lmtrain(*words, f"data.text={toy.text}", "--dry-run", "--json"))
    made = f"{tmp_path}/run/data/text"
    assert [source["dataset"] for row in facts["stages"] for source in row["sources"]] == [made] * 3
    assert "training_samples" not in facts
    assert "done: 12 steps" in lmtrain(*words, f"data.text={toy.text}")


@pytest.mark.wide
def test_a_setting_is_explained_by_stage(run: Path) -> None:
    facts = json.loads(lmtrain("config", "explain", "optim.lr", "--run", run, "--json"))
    assert [(row["stage"], row["step"], row["value"]) for row in facts["held"]] == [
        ("trunk", 1, 3e-3), ("decay", 7, 1e-3), ("long", 11, 3e-3),
    ]  # fmt: skip
    rows = json.loads(lmtrain("config", "explain", "model", "--run", run, "--json"))
    assert [row["value"] for row in rows if row["key"] == "model.seq_len"] == [32, 32, 64]
    assert [row.get("stage") for row in rows if row["key"] == "model.width"] == [None]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("stages.decay.optim.lr", "1e-3, from the command line: stages.decay.optim.lr=1e-3"),
        ("stages.decay.schedule.kind", "linear, from the command line: stages.decay.schedule=linear"),
        ("stages.decay.optim.lr", "the key optim.lr, while the stage decay lasts, in place of the run's"),
        ("stages.trunk.optim.lr", "not set in the stage trunk; the run's holds"),
        ("stages.decay.tokens", "500, from the command line: stages.decay.tokens=500"),
        ("stages.long", "stages.long.model.seq_len  64"),
        ("all", "stages.long.model.seq_len "),
    ],
)
def test_a_key_of_a_stage_is_explained(key: str, words: str) -> None:
    said = lmtrain("config", "explain", key, "data.path=x", "schedule.warmup_steps=2", *STAGES, env={"COLUMNS": "200"})
    assert words.replace("1e-3, ", "0.001, ") in " ".join(said.split("\n")).replace("  from", " from")


@pytest.mark.wide
def test_rows_know_their_stage_and_time_goes_on_over_borders(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["event"] == "step"]
    numbers = {"trunk": 1, "decay": 2, "long": 3}
    assert [row["stage"] for row in steps] == ["trunk"] * 6 + ["decay"] * 4 + ["long"] * 2
    assert all(row["stage_number"] == numbers[row["stage"]] for row in steps)
    elapsed = [row["elapsed_s"] for row in steps]
    assert elapsed == sorted(elapsed)
    borders = [row for row in rows if row["event"] == "stage"]
    assert [(row["step"], row["stage"], row["stage_number"]) for row in borders] == [(6, "decay", 2), (10, "long", 3)]


@pytest.mark.wide
def test_checkpoints_at_the_ends_of_stages_stay(run: Path) -> None:
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["step_00000006", "step_00000010", "step_00000012"]  # the newest two, and the end of the first stage


@pytest.mark.wide
def test_commands_that_look_at_a_run_name_the_stage(run: Path) -> None:
    assert "long 3/3 to step 12" in on_terminal("watch", run)
    [listed] = json.loads(lmtrain("runs", "list", run, "--json"))
    assert listed["stage"] == "long"
    assert "stage           long, 3 of 3, steps 11 to 12" in lmtrain("inspect", run)
    at_border = run / "checkpoints" / "step_00000010"
    assert json.loads(lmtrain("inspect", at_border, "--json"))["stage"] == "decay"
    lmtrain("report", run)
    page = (run / "report.html").read_text()
    assert "the stage decay began after step 6" in page
    assert "the stage trunk began" not in page
    assert re.search(r">decay<.*?>7 to 10<.*?>512<.*?>0\.001 to 0\.00025<", page, re.DOTALL)


@pytest.mark.wide
def test_the_data_of_each_stage(run: Path, toy: Toy) -> None:
    settings = [word for word in typed(toy, run)[1:] if not word.startswith("run.dir")]
    rows = json.loads(lmtrain("data", "blend", *settings, "--json"))
    assert [(row["stage"], row["run_samples"], row["run_tokens"]) for row in rows] == [
        ("trunk", 24, 768), ("decay", 16, 512), ("long", 8, 512),
    ]  # fmt: skip
    assert "datasets        1\n" in lmtrain("data", "index", *settings)
    assert "Add --stage NAME: trunk, decay, long." in lmtrain("data", "show", "--run", run, "--sample", 3, code=2)
    shown = json.loads(lmtrain("data", "show", "--run", run, "--sample", 3, "--stage", "long", "--json"))
    assert shown[0]["tokens"] == 64
    assert "is not a stage of the run. Did you mean decay?" in lmtrain(
        "data", "show", "--run", run, "--sample", 3, "--stage", "dcay", code=2
    )
    assert "the run has none" in lmtrain("data", "show", toy.data, "--sample", 3, "--stage", "decay", code=2)


@pytest.mark.wide
def test_layouts_of_a_run_with_stages(toy: Toy, tmp_path: Path) -> None:
    words = [*typed(toy, tmp_path / "run"), "stages.long.train.micro_batch=4", "stages.long.train.global_batch=4"]
    said = lmtrain(*words, "--dry-run", "--elastic", "--nproc", 2)
    assert "stages.long.train.micro_batch=2, where the settings say one process" in said
    plan = lmtrain("plan", *STAGES, "model=gpt_tiny", "model.positions=rotary", "hardware=h100", "gpus=4")
    assert "the plan is for the stage trunk, which has the most tokens" in plan


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("stages.decay.optin.lr", "Did you mean stages.decay.optim.lr?"),
        *wide(
            ("stages.decay.optim.betas", "optim.betas cannot differ between the stages of a run."),
            ("stages.decay", "stages.decay is not set by any stage."),
        ),
    ],
)
def test_a_key_that_no_stage_has(key: str, words: str) -> None:
    assert words in lmtrain("config", "explain", key, code=2)
