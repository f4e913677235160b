"""What was typed beside `--from-run` becomes a stage of a branch where only a stage can change it."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.compose_run_settings import compose
from lmtrain.errors import SettingsError
from lmtrain.start.training_stages_of_branch import BranchPoint, inherited_settings, put_before_stages
from lmtrain.train.run_config import RunConfig

RUN = (
    "data=blend", "data.datasets=[{path: a, weight: 1}]", "run.dir=x", "model.positions=rotary",
    "model.seq_len=64", "train.global_batch=8", "train.micro_batch=2", "schedule.warmup_steps=5",
)  # fmt: skip
OTHER = [{"path": "b", "weight": 1}]


@cache
def recorded(*words: str) -> dict[str, Any]:
    length = () if any(word.startswith("stages.") for word in words) else ("train.steps=100",)
    return compose(RunConfig, [*RUN, *length, *words]).to_dict()


def branch(
    changes: dict[str, Any], *, at: int = 40, of: tuple[str, ...] = (), typed: dict[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings of a branch in which these dotted keys were typed, and the keys as they are then."""
    base = recorded(*of)
    tree = deepcopy(base)
    for key, value in changes.items():
        group, _, name = key.partition(".")
        if group == "stages":
            name, _, rest = name.partition(".")
            tree["stages"].setdefault(name, {})[rest] = value
        elif name:
            tree[group][name] = value
        else:
            tree[group] = value
    typed = {key: str(value) for key, value in changes.items()} if typed is None else typed
    return tree, BranchPoint(base, at).rewrite(tree, typed)


def refusal(changes: dict[str, Any], *, at: int = 40, of: tuple[str, ...] = ()) -> str:
    with pytest.raises(SettingsError) as caught:
        branch(changes, at=at, of=of)
    return str(caught.value)


def test_other_data_make_a_trunk_and_a_branch_up_to_the_runs_end() -> None:
    tree, typed = branch({"data.datasets": OTHER, "model.seq_len": 128, "optim.lr": 1e-5})
    assert tree["stages"] == {
        "trunk": {"steps": 40},
        "branch": {"data": {"datasets": OTHER}, "model": {"seq_len": 128}, "optim": {"lr": 1e-5}, "steps": 60},
    }
    assert {key: tree[key] for key in ("data", "model", "optim")} == {
        key: recorded()[key] for key in ("data", "model", "optim")
    }
    assert [*typed] == ["stages.branch.data.datasets", "stages.branch.model.seq_len", "stages.branch.optim.lr"]


@pytest.mark.parametrize(
    "changes",
    [{}, {"optim.lr": 1e-5, "schedule": {"kind": "linear"}, "train.steps": 80}, {"train.micro_batch": 4},
     {"data.verify": "full"}, {"data.datasets": [{**recorded()["data"]["datasets"][0]}]}],
)  # fmt: skip
def test_what_a_run_may_change_by_itself_makes_no_stage(changes: dict[str, Any]) -> None:
    tree, typed = branch(changes)
    assert not tree["stages"]
    assert [*typed] == [*changes]


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({"train.steps": "90"}, {"steps": 50}),
        ({"train.tokens": 64 * 8 * 40 + 5000, "train.steps": None}, {"tokens": 5000}),
    ],
)
def test_a_typed_length_is_that_of_the_whole_run(changes: dict[str, Any], length: dict[str, int]) -> None:
    tree, typed = branch({"train.global_batch": 16, **changes})
    assert tree["stages"]["branch"] == {"train": {"global_batch": 16}, **length}
    assert [*typed] == ["stages.branch.train.global_batch"]


def test_a_typed_schedule_is_the_branchs_and_does_not_warm_up_again() -> None:
    linear = {"kind": "linear", "warmup_steps": 10, "min_ratio": 0.1}
    tree, _ = branch({"model.seq_len": 128, "schedule": linear})
    assert tree["stages"]["branch"]["schedule"] == linear | {"warmup_steps": 0}
    assert tree["schedule"] == recorded()["schedule"]
    typed = {"schedule": "linear", "schedule.warmup_steps": "10"}
    tree, _ = branch({"model.seq_len": 128, "schedule": linear}, typed=typed)
    assert tree["stages"]["branch"]["schedule"] == linear


STAGES = (
    "stages.a.steps=30", "stages.b.steps=30", "stages.b.data.datasets=[{path: c, weight: 1}]",
    "stages.b.optim.lr=1e-4", "stages.c.steps=40", "stages.c.schedule=linear",
)  # fmt: skip


def test_a_run_in_stages_keeps_those_behind_and_its_stage_goes_on_in_the_branch() -> None:
    there = [{"path": "c", "weight": 1}]
    tree, _ = branch({"model.seq_len": 128}, of=STAGES)
    assert tree["stages"] == {
        "a": {"steps": 30}, "b": {"data": {"datasets": there}, "optim": {"lr": 1e-4}, "steps": 10},
        "branch": {"data": {"datasets": there}, "optim": {"lr": 1e-4}, "model": {"seq_len": 128}, "steps": 60},
    }  # fmt: skip
    tree, _ = branch({"data.datasets": OTHER}, at=30, of=STAGES)
    assert tree["stages"] == {"a": {"steps": 30}, "branch": {"data": {"datasets": OTHER}, "steps": 70}}


def test_the_runs_own_data_are_another_than_those_of_its_stage() -> None:
    tree, _ = branch({"data.datasets": recorded()["data"]["datasets"]}, of=STAGES)
    assert tree["stages"]["branch"]["data"]["datasets"] == recorded()["data"]["datasets"]


def test_ramp_up_and_restart_of_a_stage_belong_to_its_first_step() -> None:
    of = (
        "stages.a.steps=30", "stages.b.steps=70", "stages.b.train.rampup={start: 4, increment: 2, samples: 80}",
        "stages.b.data.datasets=[{path: a, weight: 1, restart: true}]",
    )  # fmt: skip
    tree, _ = branch({"model.seq_len": 128}, of=of)
    assert tree["stages"]["branch"] == {
        "data": {"datasets": [{"path": "a", "weight": 1}]}, "model": {"seq_len": 128}, "steps": 60,
    }  # fmt: skip
    assert tree["stages"]["b"]["train"]["rampup"]["start"] == 4
    assert tree["stages"]["b"]["data"]["datasets"][0]["restart"] is True
    assert [*branch({}, of=of)[0]["stages"]] == ["a", "b"]
    single = {"data": {"kind": "dataset", "path": "a", "restart": True}, "train": {"rampup": None, "seed": 2}}
    assert inherited_settings(single) == {"data": {"kind": "dataset", "path": "a"}, "train": {"seed": 2}}


@pytest.mark.parametrize("of", [(), ("stages.one.steps=30", "stages.two.steps=70", "stages.two.optim.lr=1e-4")])
def test_the_past_keeps_what_a_later_start_has_changed(of: tuple[str, ...]) -> None:
    base, earlier = recorded(*of), ("optim.lr=5e-4", "optim.clip_norm=2")
    tree, saved = deepcopy(base), build_settings(RunConfig, recorded(*of, *earlier))
    tree["data"]["datasets"] = OTHER
    BranchPoint(base, 40, saved).rewrite(tree, {"data.datasets": "[{path: b, weight: 1}]"})
    (*past, branch) = tree["stages"].values()
    assert [stage["optim"] for stage in past] == [
        {"lr": 5e-4, "clip_norm": 2.0}, {"lr": 1e-4, "clip_norm": 2.0}
    ][: len(past)]  # fmt: skip
    assert branch.get("optim", {}) == ({"lr": 1e-4} if of else {})  # what is ahead is as the last start has it


@pytest.mark.parametrize(("earlier", "kind"), [((), None), (("stages.b.schedule=constant",), "constant")])
def test_the_past_keeps_the_schedules_that_a_later_start_has_changed(
    earlier: tuple[str, ...], kind: str | None
) -> None:  # fmt: skip
    """Also those that a stage did not have of its own then."""
    base, saved = recorded(*STAGES, "stages.b.schedule=linear"), build_settings(RunConfig, recorded(*STAGES, *earlier))
    tree = deepcopy(base)
    tree["stages"]["new"] = {"steps": 5}
    BranchPoint(base, 70, saved).rewrite(tree, {"stages.new.steps": "5"})
    kinds = [stage.get("schedule", {}).get("kind") for stage in tree["stages"].values()]
    assert kinds == [None, kind, "linear", None]


def test_a_second_branch_has_a_name_of_its_own() -> None:
    of = ("stages.trunk.steps=30", "stages.branch.steps=70")
    assert [*branch({"model.seq_len": 128}, of=of)[0]["stages"]] == ["trunk", "branch", "branch-2"]


def test_new_stages_begin_at_the_checkpoint() -> None:
    assert [*branch({"stages.decay.steps": 5})[0]["stages"].items()] == [
        ("trunk", {"steps": 40}), ("decay", {"steps": 5}),
    ]  # fmt: skip
    stages = branch({"stages.decay.steps": 5}, of=STAGES)[0]["stages"]
    assert [(name, stage["steps"]) for name, stage in stages.items()] == [("a", 30), ("b", 10), ("decay", 5)]


@pytest.mark.parametrize(
    "changes",
    [{"stages.c.steps": 5}, {"stages.b.steps": 35, "stages.d.steps": 5}, {"stages.c.steps": 35, "stages.d.steps": 5}],
)
def test_stages_of_the_run_that_are_typed_stay(changes: dict[str, Any]) -> None:
    tree, _ = branch(changes, of=STAGES)
    assert [*tree["stages"]] == ["a", "b", "c", "d"][: 3 + len(changes) - 1]
    assert tree["stages"]["b"]["steps"] == changes.get("stages.b.steps", 30)


def test_a_run_that_goes_on_has_typed_stages_behind_its_end() -> None:
    tree = recorded() | {"stages": {"more": {"tokens": "1M"}}}
    put_before_stages(recorded(), tree)
    assert tree["stages"] == {"trunk": {"steps": 100}, "more": {"tokens": "1M"}}
    again = deepcopy(tree)
    put_before_stages(tree, again)
    assert again == tree


@pytest.mark.parametrize(
    ("changes", "at", "of", "text"),
    [
        ({"model.seq_len": 128, "train.steps": 40}, 40, (), "train.steps=40 is the length of the whole run, of which"),
        ({"model.seq_len": 128}, 100, (), "no step is left for the branch. Give the length of the whole run"),
        ({"model.seq_len": 128}, 70, STAGES, "a schedule of its own, which would begin anew in the branch"),
        ({"data.datasets": OTHER, "stages.d.steps": 5}, 40, (), "stages.d.data.datasets="),
        ({"optim.lr": 1e-5, "stages.d.steps": 5}, 40, (), "it is for: stages.d.optim.lr="),
    ],
)  # fmt: skip
def test_refusals(changes: dict[str, Any], at: int, of: tuple[str, ...], text: str) -> None:
    assert text in refusal(changes, at=at, of=of)
