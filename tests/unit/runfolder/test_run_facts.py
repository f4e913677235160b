"""What a run is at a step, by rows and by checkpoints, at the steps beside a border between stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmtrain.cli.runs.runs_command import select_rows
from lmtrain.runfolder.run_facts import RunFacts, facts_at, facts_of_checkpoint, facts_of_rows, parameters_text
from lmtrain.train.run_config import RunConfig, config_of_checkpoint, readable_config
from tests.cli.harness import on_terminal
from tests.unit.train.test_stages import composed

STAGES = (
    "train.rampup={start: 2, increment: 2, samples: 12}", "stages.trunk.steps=6", "stages.decay.steps=4",
    "stages.decay.train.global_batch=4", "stages.decay.model.seq_len=8", "stages.decay.data.path=y",
    "stages.decay.schedule=linear", "stages.decay.optim.lr=1e-3", "model.vocab_size=400",
)  # fmt: skip


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return composed(*STAGES)


def row(event: str, step: int, stage: str, **more: Any) -> dict[str, Any]:
    return {"event": event, "step": step, "attempt": 1, "stage": stage, **more}


def shown(facts: RunFacts) -> tuple[Any, ...]:
    return facts.stage_name, facts.step, facts.batch, facts.seq_len, facts.data


def test_a_stage_has_begun_when_a_row_says_so(config: RunConfig) -> None:
    rows = [row("start", 0, "trunk"), row("step", 6, "trunk", tokens=512, lr=3e-3, tokens_per_s=float("nan"))]
    at_end = facts_of_rows(config, rows, "running")
    assert shown(at_end) == ("trunk", 6, 8, 16, "x")
    assert (at_end.tokens, at_end.lr, at_end.tokens_per_s, at_end.borders) == (512, 3e-3, None, [6])
    begun = facts_of_rows(config, [*rows, row("stage", 6, "decay")], "running")
    assert shown(begun) == ("decay", 6, 4, 8, "y")
    assert (begun.tokens, begun.lr) == (512, 3e-3)
    assert [shown(facts_at(config, step, state=""))[2] for step in range(10)] == [2, 2, 2, 4, 6, 8, 8, 4, 4, 4]


def test_the_newest_start_counts_and_what_no_row_says_is_none(config: RunConfig) -> None:
    rows = [row("step", 3, "trunk", lr=1e-3), row("start", 3, "trunk", tokens=64) | {"attempt": 3}]
    facts = facts_of_rows(config, rows, "killed")
    assert (facts.starts, facts.tokens, facts.tokens_per_s) == (3, 64, None)
    unread = facts_of_rows(None, rows, "killed", steps=10)
    assert (unread.stage_name, unread.steps, unread.batch, unread.parameters) == ("trunk", 10, None, None)
    assert facts_of_rows(config, [], "killed").step == 0


@pytest.mark.parametrize(("step", "lr"), [(6, 1e-2 * 0.1), (7, 1e-3), (8, 7.5e-4)])
def test_a_checkpoint_has_the_rate_of_its_last_step(config: RunConfig, step: int, lr: float) -> None:
    state = {"step": step, "tokens": 5, "attempt": 2, "settings": config.to_dict(), "model": {"vocab_size": 400}}
    facts = facts_of_checkpoint(config_of_checkpoint(state), state)
    expected = config.stage_at(step - 1).learning_rate(step - 1)
    assert facts.lr == expected
    assert step == 6 or expected == pytest.approx(lr)
    assert (facts.state, facts.starts, facts.stage_name) == ("checkpoint", 2, "trunk" if step == 6 else "decay")
    assert facts_of_checkpoint(None, state | {"merged": {}}).state == "merged"


def test_parameters_say_whether_padding_counts(config: RunConfig) -> None:
    facts = facts_at(config, 0, state="")
    assert facts.padded_parameters is not None
    assert facts.parameters is not None
    width = config.model.to_dict()["width"]
    assert (facts.padded_parameters - facts.parameters) % width == 0 < facts.padded_parameters - facts.parameters
    assert parameters_text(38_272, 39_808) == "38.3k parameters, 39.8k with padding"
    assert parameters_text(38_272, 38_272) == "38.3k parameters"
    assert readable_config({"model": 3}) is None


def written(folder: Path, config: RunConfig, *rows: dict[str, Any]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


def test_a_list_leaves_out_what_a_restart_does_again(config: RunConfig, tmp_path: Path) -> None:
    rows = [row("step", 5, "trunk", tokens=80), row("step", 9, "decay", tokens=144), row("start", 5, "trunk")]
    [listed] = select_rows([written(tmp_path, config, *rows)], [], [])
    assert (listed["step"], listed["stage"], listed["tokens"]) == (5, "trunk", 80)


def test_a_watched_run_gets_the_facts_of_the_stage_that_begins(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(tmp_path, config, row("start", 0, "trunk"), row("step", 6, "trunk", lr=1e-3))
    (run / ".lock").write_text("process 1 on another machine\n")

    def next_poll(_: float) -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row("stage", 6, "decay")) + "\n")
        (run / "stop.json").write_text(json.dumps({"cause": "done", "exit_code": 0}))

    monkeypatch.setattr("lmtrain.cli.runs.watch_command.time.sleep", next_poll)
    before, _, after = on_terminal("watch", run, columns=200).partition("batch 4 samples of 8 tokens")
    assert "batch 8 samples of 16 tokens" in before
    assert "dataset: y" in after


@pytest.mark.parametrize(
    ("losses", "why"), [((4.0, 3.0, 5.0, 4.5), ""), ((4.0, 3.0, 5.0, 5.5), "loss above its first")]
)
def test_losses_of_two_stages_are_not_compared(
    config: RunConfig, tmp_path: Path, losses: tuple[float, ...], why: str
) -> None:
    stages = ["trunk", "trunk", "decay", "decay"]
    rows = [row("step", step, stages[at], loss=losses[at]) for at, step in enumerate((1, 6, 7, 10))]
    rows.insert(2, row("stage", 6, "decay"))
    written(tmp_path, config, *rows)
    (tmp_path / "stop.json").write_text(json.dumps({"cause": "done", "exit_code": 0}))
    [listed] = select_rows([tmp_path], [], [])
    assert (listed["stage"], listed["why"], listed["state"]) == ("decay", why, "finished")
