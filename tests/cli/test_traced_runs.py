"""What processes record of a run, as it is typed: the same numbers on both ends, and nothing that changes a loss."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from lmtrain.layout import Layout
from lmtrain.observe.spans.span_file import Axis, Flag, Kind, RankSpans, read_spans
from tests.cli.harness import Toy, lmtrain, start
from tests.cli.test_parallel_runs import exact, run
from tests.marks import wide

SIZES = ("pp", "vp", "dp_replicate", "dp_shard", "tp")
MEMBERS = {
    Axis.PP: ("pp",), Axis.TP: ("tp",), Axis.DP: ("dp_replicate", "dp_shard"), Axis.DP_SHARD: ("dp_shard",),
    Axis.DP_REPLICATE: ("dp_replicate",), Axis.PLANE: ("dp_replicate", "dp_shard", "tp"),
    Axis.WORLD: ("pp", "dp_replicate", "dp_shard", "tp"),
}  # fmt: skip


def spans_of(folder: Path, start: int = 0) -> list[RankSpans]:
    """Of one start, rank by rank."""
    found = [read_spans(path) for path in sorted((folder / "trace").iterdir())]
    return sorted((one for one in found if one.header.start == start), key=lambda one: one.header.rank)


def steps(of: RankSpans) -> list[int]:
    found: list[int] = of.spans[of.spans["kind"] == Kind.STEP]["step"].tolist()
    return found


def follow_messages(ranks: list[RankSpans]) -> int:
    """Every message has two ends that say the same of it; it has not come before it was sent."""
    ends: dict[int, dict[Any, Any]] = {Kind.SEND: {}, Kind.RECEIVE: {}}
    for of in ranks:
        for one in of.spans[(of.spans["flags"] & Flag.EARLY) == 0]:
            kind, both = int(one["kind"]), (of.header.rank, int(one["peer"]))
            if kind in ends:
                key = (*(both if kind == Kind.SEND else both[::-1]), int(one["step"]), int(one["number"]))
                assert key not in ends[kind]
                ends[kind][key] = (
                    one,
                    (one[["stage", "microbatch", "num_bytes"]].tolist(), of.header.names[int(one["name"])]),
                )
    sent, received = ends[Kind.SEND], ends[Kind.RECEIVE]
    assert sent.keys() == received.keys()
    for key, (one, said) in sent.items():
        assert said == received[key][1], key
        assert one["begin_ns"] <= received[key][0]["end_ns"], "one machine has one clock"
    return len(sent)


def follow_collectives(ranks: list[RankSpans]) -> set[Axis]:
    """All members of one have it, under the same number and name, and none is done before all have come to it."""
    header = ranks[0].header
    layout = Layout(**dict(zip(SIZES, header.sizes, strict=True)))
    met: dict[Any, dict[int, Any]] = defaultdict(dict)
    for of in ranks:
        at = layout.coordinate(of.header.rank)
        assert of.header.coordinate == (at.pp, at.dp_replicate, at.dp_shard, at.tp)
        for one in of.spans[of.spans["kind"] == Kind.COLLECTIVE]:
            axis, peer = Axis(int(one["axis"])), int(one["peer"])
            others = tuple(getattr(at, name) for name in MEMBERS[Axis.WORLD] if name not in MEMBERS[axis])
            group = tuple(sorted((of.header.rank, peer))) if peer >= 0 else others
            key = axis, group, peer >= 0, int(one["step"]), int(one["number"])
            assert of.header.rank not in met[key]
            met[key][of.header.rank] = one, (of.header.names[int(one["name"])], int(one["num_bytes"]))
    for key, members in met.items():
        size = 2 if key[2] else 1
        for name in MEMBERS[key[0]] if not key[2] else ():
            size *= getattr(layout, name)
        assert len(members) == size, (key, members)
        assert len({said for _, said in members.values()}) == 1, (key, members)
        if not any(one["flags"] & Flag.EARLY for one, _ in members.values()):
            last = max(one["begin_ns"] for one, _ in members.values())
            assert all(one["end_ns"] >= last for one, _ in members.values()), (key, members)
    return {key[0] for key in met if len(met[key]) > 1}


def check_actions(of: RankSpans) -> None:
    """Each step has the whole of this rank's work, within the step, one thing after the other."""
    spans = of.spans
    own = np_isin(spans, Kind.DATA, Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT, Kind.OPTIMIZER)
    for number in steps(of):
        inside = own[own["step"] == number]
        (step,) = spans[(spans["kind"] == Kind.STEP) & (spans["step"] == number)]
        assert step["begin_ns"] <= inside["begin_ns"].min()
        assert inside["end_ns"].max() <= step["end_ns"]
        assert (inside["begin_ns"][1:] >= inside["end_ns"][:-1]).all()
        kinds = inside["kind"].tolist()
        stages = set(inside[inside["kind"] == Kind.FORWARD]["stage"].tolist())
        turns = of.header.num_microbatches * len(stages)
        assert kinds.count(Kind.FORWARD) == turns
        assert kinds.count(Kind.BACKWARD) + kinds.count(Kind.INPUT) == turns
        assert kinds.count(Kind.INPUT) == kinds.count(Kind.WEIGHT)
        assert (kinds.count(Kind.DATA), kinds.count(Kind.OPTIMIZER)) == (1, 1)


def np_isin(spans: Any, *kinds: Kind) -> Any:
    return spans[[int(kind) in kinds for kind in spans["kind"]]]


LAYOUTS: dict[str, tuple[dict[str, object], str]] = {
    "tp2-dp2-zero2": ({"parallel.tp": 2, "parallel.dp_shard": 2, "parallel.zero": 2}, "sampled"),
    "pp2-tp2": ({"parallel.pp": 2, "parallel.tp": 2, "parallel.sequence_parallel": "false"}, "all"),
    "pp4-zb_h1": ({"parallel.pp": 4, "parallel.schedule": "zb_h1", "model.num_layers": 4}, "sampled"),
    "pp2-dp2-interleaved": (
        {"parallel.pp": 2, "parallel.vp": 2, "parallel.dp_replicate": 2, "parallel.schedule": "interleaved",
         "model.num_layers": 4, "parallel.zero": 0}, "sampled",
    ),
    "pp2-dp2-zb_v-fp16": (
        {"parallel.pp": 2, "parallel.vp": 2, "parallel.dp_shard": 2, "parallel.zero": 2, "parallel.schedule": "zb_v",
         "model.num_layers": 4, "precision": "fp16"}, "all",
    ),
    "dp2x2-zero1": ({"parallel.dp_replicate": 2, "parallel.dp_shard": 2}, "sampled"),
}  # fmt: skip
AXES = {
    "tp2-dp2-zero2": {Axis.TP, Axis.DP, Axis.DP_SHARD, Axis.WORLD}, "pp2-tp2": {Axis.PP, Axis.TP, Axis.WORLD},
    "pp4-zb_h1": {Axis.PP, Axis.WORLD}, "pp2-dp2-interleaved": {Axis.PP, Axis.DP, Axis.DP_REPLICATE, Axis.WORLD},
    "pp2-dp2-zb_v-fp16": {Axis.PP, Axis.DP, Axis.DP_SHARD, Axis.WORLD},
    "dp2x2-zero1": {Axis.DP, Axis.DP_SHARD, Axis.DP_REPLICATE, Axis.WORLD},
}  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("name", LAYOUTS)
def test_four_processes_number_alike_whatever_they_exchange(toy: Toy, tmp_path: Path, name: str) -> None:
    """A validation and a save fall into steps that are traced."""
    settings, which = LAYOUTS[name]
    more = {"train.global_batch": 8, "train.micro_batch": 1, "train.valid_interval_steps": 11, "train.valid_samples": 5}
    given = [f"{key}={value}" for key, value in {**more, **settings, "observe.trace": which}.items()]
    run(4, *toy.settings(tmp_path / "run"), *given, "parallel.timeout_s=120")
    ranks = spans_of(tmp_path / "run")
    assert [of.header.rank for of in ranks] == [0, 1, 2, 3]
    for of in ranks:
        assert steps(of) == (list(range(1, 13)) if which == "all" else [10, 11, 12])
        assert {Kind.VALIDATION, Kind.SAVE} <= set(of.spans["kind"].tolist())
        check_actions(of)
    assert follow_collectives(ranks) == AXES[name]
    assert (follow_messages(ranks) > 0) == ("parallel.pp" in settings)


@pytest.mark.parametrize(("which", "traced"), [("sampled", [10, 11, 12]), *wide(("all", [*range(1, 13)]))])
def test_what_is_recorded_changes_no_loss_and_none_records_nothing(
    toy: Toy, tmp_path: Path, which: str, traced: list[int]
) -> None:
    for one in ("none", which):
        lmtrain("pretrain", *toy.settings(tmp_path / one), f"observe.trace={one}")
    assert exact(tmp_path / "none") == exact(tmp_path / which)
    assert not (tmp_path / "none" / "trace").exists()
    (of,) = spans_of(tmp_path / which)
    assert steps(of) == traced
    check_actions(of)


def test_each_start_has_a_file_of_its_own(toy: Toy, tmp_path: Path) -> None:
    for last in (2, 4):
        settings = toy.settings(tmp_path / "run", train__steps=last, schedule__warmup_steps=0)
        lmtrain("pretrain", *settings, "observe.trace=all")
    assert sorted(os.listdir(tmp_path / "run" / "trace")) == ["rank-00000.1.spans", "rank-00000.spans"]
    (first,), (second,) = spans_of(tmp_path / "run", 0), spans_of(tmp_path / "run", 1)
    assert (steps(first), steps(second)) == ([1, 2], [3, 4])


@pytest.mark.wide
def test_a_file_in_the_folder_asks_for_six_steps(toy: Toy, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = toy.settings(folder, train__steps=100_000, checkpoint__interval_steps=0)
    process = start("pretrain", *settings, "observe.trace=none")
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if re.match(r"step +3/", line):
                (folder / "TRACE").touch()
            # because: lines come faster than a trace is read
            if re.match(r"step +\d+00/", line) and (folder / "trace").exists() and not (folder / "STOP").exists():
                (of,) = spans_of(folder)
                if len(steps(of)) == 6:
                    (folder / "STOP").touch()
    finally:
        process.kill()
        process.communicate()
    assert not (folder / "TRACE").exists()
    (of,) = spans_of(folder)
    first = steps(of)[0]
    assert steps(of) == list(range(first, first + 6))
    assert first > 3


@pytest.mark.wide
def test_a_killed_run_leaves_what_it_has_recorded(toy: Toy, tmp_path: Path) -> None:
    settings = (*toy.settings(tmp_path / "run"), "observe.trace=all", "parallel.dp_shard=2")
    run(2, *settings, code=76, fault="kill:rank=1:point=opt_step:count=9")
    ranks = spans_of(tmp_path / "run")
    assert [of.header.rank for of in ranks] == [0, 1]
    assert steps(ranks[1]) == list(range(1, 9))
    assert ranks[1].spans["step"].max() == 9, "and what it did of the step that it was killed in"
