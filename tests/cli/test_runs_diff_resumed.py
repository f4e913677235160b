"""`lmtrain runs diff` of runs that were resumed: each start is judged by its own settings, layout and versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmtrain.cli.runs.print_difference import diff_lines
from lmtrain.observe.metrics import read_metrics
from lmtrain.start.facts_of_outputs.compare_runs import diff_facts
from tests.cli.harness import Toy, lmtrain

SETTINGS = {
    "optim": {"lr": 0.1}, "parallel": {"dp_shard": 1}, "data": {"kind": "dataset"},
    "train": {"steps": 20, "micro_batch": 1, "global_batch": 2},
}  # fmt: skip
Start = dict[str, Any]


def start(step: int = 0, *, told: bool = True, world_size: int = 1, **settings: Any) -> Start:
    """A start and what it ran with; `told` is whether its row says so, as those of older versions do not."""
    with_settings = SETTINGS | {key: SETTINGS[key] | value for key, value in settings.items()}
    row = {"event": "start", "step": step, "attempt": 1 + (step > 0), "world_size": world_size, "device": "cpu"}
    row |= {"weights_digest": "w", "data_sha256": "d"}
    own = {"settings": with_settings, "environment": {"python": "3.11.2"}}
    return row | (own if told else {"_last": own})


def write(folder: Path, *starts: Start, end: int = 20, **changed: Any) -> Path:
    """20 steps; rows hold the learning rate and the layout of their start, and from step 15 on what is `changed`."""
    folder.mkdir()
    rows, begun = [], [one["step"] for one in starts]
    last = starts[-1].get("_last") or starts[-1]
    for one, until in zip(starts, [*begun[1:], end], strict=True):
        own = one.get("_last") or one
        rows.append({key: value for key, value in one.items() if key != "_last"})
        lr = own["settings"]["optim"]["lr"]
        rows += [
            {"event": "step", "step": step, "attempt": 1, "loss": 3.0 - lr * (step - 1), "lr": lr,
             "samples_hash": "a", "batch_digest": f"{step} of {one['world_size']}"} | (changed if step >= 15 else {})
            for step in range(one["step"] + 1, until + 1)
        ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, file in (("settings", "config.json"), ("environment", "environment.json")):
        (folder / file).write_text(json.dumps(last[name]))
    (folder / "stop.json").write_text('{"cause": "done", "exit_code": 0}')
    return folder


def facts(a: Path, b: Path) -> dict[str, Any]:
    found = diff_facts(a, b)
    json.dumps(found)
    assert [said for name, said in diff_lines(found) if name == "cause"] == (
        found["causes"] or ["nothing that was recorded"] * bool(found["first"])
    )
    return found


TWO: dict[str, Any] = {"world_size": 2, "parallel": {"dp_shard": 2}}


def test_other_layouts_read_the_same_data(tmp_path: Path) -> None:
    """The start before the last had two processes: rank 0 then read half as much, of the same data."""
    found = facts(write(tmp_path / "a", start()), write(tmp_path / "b", start(**TWO), start(10)))
    assert (found["first"], found["causes"]) == ({}, [])
    assert any(said.startswith("batch_digest: the runs divide a batch") for said in found["not_compared"])


def test_of_older_runs_no_digest_is_compared(tmp_path: Path) -> None:
    b = write(tmp_path / "b", start(told=False, **TWO), start(10, told=False))
    found = facts(write(tmp_path / "a", start(told=False)), b)
    assert (found["first"], found["causes"]) == ({}, [])
    assert "b: config.json is from the last of 2 starts; earlier settings are not known" in found["not_compared"]


@pytest.mark.parametrize("sha256", ["d", "another"])
def test_other_text_is_said_as_far_as_it_is_known(sha256: str, tmp_path: Path) -> None:
    other = start() | {"data_sha256": sha256}
    found = facts(write(tmp_path / "a", start()), write(tmp_path / "b", other, batch_digest="x", loss=7.0))
    assert found["first"]["batch_digest"] == 15
    (cause,) = found["causes"]
    assert ("the data is not the same" in cause) == (sha256 != "d")
    assert ("both name the same data" in cause) == (sha256 == "d")


def test_an_earlier_start_had_other_settings(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", start()), write(tmp_path / "b", start(optim={"lr": 0.2}), start(10))
    found = facts(a, b)
    assert found["first"] == {"lr": 1, "loss": 2}
    assert found["causes"] == ["the setting optim.lr is 0.1 in A and 0.2 in B"]


def test_a_later_start_had_other_settings(tmp_path: Path) -> None:
    found = facts(write(tmp_path / "a", start()), write(tmp_path / "b", start(), start(10, optim={"lr": 0.2})))
    assert found["first"]["lr"] == 11
    assert found["causes"] == ["the setting optim.lr is 0.1 in A and 0.2 in B after step 10"]
    assert ("setting", "optim.lr: 0.1 and 0.2 after step 10") in list(diff_lines(found))


def test_what_changed_after_the_last_step_of_both_is_named(tmp_path: Path) -> None:
    longer = write(tmp_path / "b", start(), start(20, optim={"lr": 0.2}), end=30)
    found = facts(write(tmp_path / "a", start()), longer)
    assert (found["settings"], found["causes"]) == ({}, [])
    assert ("in the end", "optim.lr: 0.1 and 0.2") in list(diff_lines(found))


def test_what_came_later_explains_nothing(tmp_path: Path) -> None:
    """Not even what changed just after the first step that differs."""
    late = start(15, optim={"lr": 0.2})
    found = facts(write(tmp_path / "a", start()), write(tmp_path / "b", start(), late, loss=7.0))
    assert (found["first_step"], [cause[:16] for cause in found["causes"]]) == (15, ["neither settings"])
    assert found["settings"] == {"optim.lr": [0.1, 0.2]}


def test_another_version_or_device_of_one_start(tmp_path: Path) -> None:
    for key, value, said in (
        ("device", "cuda", "the device"),
        ("environment", {"python": "3.12.1"}, "python"),
    ):
        other = start(10) | {key: value}
        found = facts(write(tmp_path / f"a {key}", start()), write(tmp_path / key, start(), other, loss=7.0))
        (cause,) = found["causes"]
        assert cause.startswith(f"{said} is ")
        assert cause.endswith(" in B after step 10")


def test_a_start_that_was_done_again_counts_no_more(tmp_path: Path) -> None:
    b = write(tmp_path / "b", start(optim={"lr": 0.2}), start(), end=20)
    found = facts(write(tmp_path / "a", start()), b)
    assert (found["first"], found["settings"], found["causes"]) == ({}, {}, [])


def test_a_timeout_is_no_cause_and_cuts_no_batch(tmp_path: Path) -> None:
    other = start(parallel={"timeout_s": 60.0})
    found = facts(write(tmp_path / "a", start()), write(tmp_path / "b", other, loss=7.0))
    assert found["causes"][0].startswith("neither settings")
    assert not any(said.startswith("batch_digest") for said in found["not_compared"])


@pytest.mark.parametrize(
    ("key", "ours", "theirs", "cause"),
    [
        ("data.valid_path", None, "held", True), ("data.valid_path", "held", "other", False),
        ("train.valid_interval_steps", 0, 200, True), ("train.valid_interval_steps", 100, 200, False),
    ],
)  # fmt: skip
def test_what_is_held_out_to_validate_on_is_not_trained_on(
    key: str, ours: object, theirs: object, cause: bool, tmp_path: Path
) -> None:
    group, name = key.split(".")
    first: dict[str, Any] = {group: {name: ours}}
    second: dict[str, Any] = {group: {name: theirs}}
    one, other = start(**first), start(**second)
    a = write(tmp_path / "a", one)
    b = write(tmp_path / "b", other, samples_hash="b", batch_digest="b", loss=1.0)
    found = facts(a, b)
    assert (found["causes"][0].startswith(f"the setting {key} is")) is cause
    assert ("though no setting says so" in found["causes"][0]) is not cause
    c = write(tmp_path / "c", other, loss=1.0)  # the data is the same: it is no cause
    assert not any(key in said for said in facts(a, c)["causes"])


def test_how_often_is_validated_explains_no_data(tmp_path: Path) -> None:
    a = write(tmp_path / "a", start(data={"valid_path": None}, train={"valid_interval_steps": 10}))
    told = start(data={"valid_path": "held"}, train={"valid_interval_steps": 20})
    b = write(tmp_path / "b", told, samples_hash="b", loss=1.0)
    assert facts(a, b)["causes"] == ["the setting data.valid_path is null in A and held in B"]


def test_what_is_no_number_is_a_text_in_json(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", start()), write(tmp_path / "b", start(), loss="nan")
    told = lmtrain("runs", "diff", a, b, "--json")
    assert json.loads(told, parse_constant=pytest.fail)["loss_after"][0]["b"] == "nan"


def test_equal_runs_need_no_cause(tmp_path: Path) -> None:
    found = facts(write(tmp_path / "a", start()), write(tmp_path / "b", start(train={"steps": 40})))
    assert (found["first"], found["causes"]) == ({}, [])
    assert found["settings"] == {"train.steps": [20, 40]}


def test_older_runs_are_given_no_cause_that_is_not_known(tmp_path: Path) -> None:
    """An earlier start had another rate, and only config.json of the last one is left."""
    b = write(tmp_path / "b", start(told=False, optim={"lr": 0.2}), start(10, told=False))
    found = facts(write(tmp_path / "a", start(told=False)), b)
    assert (found["first"], found["causes"]) == ({"lr": 1, "loss": 2}, [])


def test_what_a_start_writes(toy: Toy, tmp_path: Path) -> None:
    settings = {"train__steps": 6, "checkpoint__interval_steps": 3}
    lmtrain("pretrain", *toy.settings(tmp_path / "a", **settings))
    lmtrain("pretrain", *toy.settings(tmp_path / "b", **settings | {"train__steps": 3, "optim__lr": "1e-3"}))
    lmtrain("pretrain", *toy.settings(tmp_path / "b", **settings))
    starts = [row for row in read_metrics(tmp_path / "b" / "metrics.jsonl") if row["event"] == "start"]
    assert [row["settings"]["optim"]["lr"] for row in starts] == [1e-3, 3e-3]
    assert starts[1]["settings"] == json.loads((tmp_path / "b" / "config.json").read_text())
    assert starts[1]["environment"] == json.loads((tmp_path / "b" / "environment.json").read_text())
    found = facts(tmp_path / "a", tmp_path / "b")
    assert found["first_step"] == 1
    assert "the setting optim.lr is 0.003 in A and 0.001 in B" in found["causes"]
    assert not any(said.startswith("batch_digest") for said in found["not_compared"])
