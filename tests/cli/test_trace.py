"""`lmtrain trace` as it is typed: tables, JSON, the file for a viewer; what it says where there is little."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmtrain.layout import Layout
from tests.cli.harness import lmtrain, on_terminal
from tests.unit.observe.timeline.made_up import Made
from tests.unit.observe.timeline.trace_event_format import problems


def test_tables_and_a_file_that_a_viewer_opens(tmp_path: Path) -> None:
    layout = Layout(pp=2, dp_shard=2, tp=2)
    Made(layout=layout, schedule="1f1b", slow={5: 1.25}, num_microbatches=4, steps=(10, 11, 12)).write(tmp_path)
    for columns in (80, 120):
        shown = on_terminal("trace", tmp_path, columns=columns)
        assert max(len(line) for line in shown.splitlines() if str(tmp_path) not in line) <= columns
        assert "8 ranks on 2 hosts, pp 2, dp_shard 2, tp 2, 1f1b, steps 10-12" in " ".join(shown.split())
        for title in ("as it ran", "where a step's time goes", "beside the table of 1f1b", "critical path of step 1",
                      "own work", "clocks"):  # fmt: skip
            assert f"\n{title}" in shown or title == "as it ran"
        assert "pp 1, dp 0       100   124" in shown
    assert problems(json.loads((tmp_path / "trace" / "trace.json").read_text())) == []


def test_of_many_ranks_the_slowest_are_listed(tmp_path: Path) -> None:
    Made(layout=Layout(tp=16), slow={7: 1.25}, num_microbatches=1, steps=(10,)).write(tmp_path)
    shown = on_terminal("trace", tmp_path, columns=80)
    listed = [line.split() for line in shown.partition("own work")[2].splitlines() if "  rank " in line]
    assert (len(listed), listed[0][1:9]) == (10, ["rank", "7", "pp", "0,", "dp", "0,", "tp", "7"])
    assert [int(words[0]) for words in listed] == sorted((int(words[0]) for words in listed), reverse=True)


def test_waiting_within_a_stage_is_said_within_the_screen(tmp_path: Path) -> None:
    made = Made(layout=Layout(tp=2), slow={1: 1.5}, num_microbatches=2, steps=(10, 11))
    made.summing = 20.0  # what takes long has a long bar beside it
    made.write(tmp_path)
    for columns in (80, 120):
        shown = on_terminal("trace", tmp_path, "--out", tmp_path / f"{columns}.json", columns=columns)
        assert any("ms of it waiting for slower ranks" in line for line in shown.splitlines())  # not torn apart
        assert max(len(line) for line in shown.splitlines() if str(tmp_path) not in line) <= columns


def test_json_says_the_same_and_adds_up(tmp_path: Path) -> None:
    Made(layout=Layout(pp=2), num_microbatches=4, steps=(10, 11)).write(tmp_path)
    Made(layout=Layout(dp_shard=2), num_microbatches=4, steps=(10, 12), start=1, began_s=500).write(tmp_path)
    facts = json.loads(lmtrain("trace", tmp_path, "--json"))
    assert not (tmp_path / "trace" / "trace.json").exists()
    assert [one["start"] for one in facts["starts"]] == [1, 2]
    assert (facts["start"], facts["steps"], facts["replay"], facts["file"]) == (2, [10, 12], None, None)
    facts = json.loads(lmtrain("trace", tmp_path, "--json", "--start", 1, "--step", 11, "--out", tmp_path / "x.json"))
    assert sum(one["seconds"] for one in facts["classes"].values()) == pytest.approx(facts["step_s"])
    for row in facts["by_rank"]:
        assert sum(row[name] for name in facts["classes"]) == pytest.approx(facts["step_s"], rel=0.01)
    assert facts["path"]["step"] == 11
    assert sum(hop["seconds"] for hop in facts["path"]["hops"]) == pytest.approx(facts["path"]["seconds"])
    assert facts["replay"]["bubble_s"] == pytest.approx(facts["replay"]["replayed_bubble_s"], rel=0.05)
    assert problems(json.loads((tmp_path / "x.json").read_text())) == []


def test_copies_are_numbered_as_the_layout_numbers_them(tmp_path: Path) -> None:
    layout = Layout(dp_replicate=2, dp_shard=3)
    Made(layout=layout, num_microbatches=1, steps=(10,)).write(tmp_path)
    facts = json.loads(lmtrain("trace", tmp_path, "--json"))
    copies = {rank: layout.dp_index(rank) for rank in range(6)}
    assert {row["rank"]: row["at"]["dp"] for row in facts["by_rank"]} == copies
    assert {row["rank"]: row["dp"] for row in facts["heat"]} == copies


def test_what_is_missing_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    Made(layout=Layout(pp=2, dp_shard=2), num_microbatches=2).write(tmp_path)
    files = sorted((tmp_path / "trace").iterdir())
    files[1].write_bytes(files[1].read_bytes()[:5000])
    files[3].unlink()
    shown = lmtrain("trace", tmp_path)
    assert "2 of 4 ranks on 2 hosts" in shown
    assert "rank-00001.spans ends before the last of its" in shown
    assert "no file of 2 of 4 ranks: 1, 3" in shown
    assert "where a step's time goes" in shown


def test_refusals_have_a_way_out(tmp_path: Path) -> None:
    assert "does not exist. Give the run.dir" in lmtrain("trace", tmp_path / "none", code=66)
    # before anything is read, which takes a while of many ranks
    assert "not exist. Create it" in lmtrain("trace", tmp_path / "none", "--out", tmp_path / "no" / "x.json", code=73)
    (tmp_path / "config.json").write_text("{}")
    said = lmtrain("trace", tmp_path, code=66)
    assert "has no traces" in said
    assert "touch" in said
    assert "observe.trace=sampled" in said
    Made(layout=Layout(), num_microbatches=2).write(tmp_path)
    said = lmtrain("trace", tmp_path, "--step", 99, code=2)
    assert "--step=99 is not among the steps that start 1 recorded: 10, 11, 12, 13. Choose one" in said
    assert "--start=3 has no trace" in lmtrain("trace", tmp_path, "--start", 3, code=2)
    assert "does not exist. Create it" in lmtrain("trace", tmp_path, "--out", tmp_path / "none" / "x.json", code=73)
    (tmp_path / "trace" / "rank-00000.spans").write_bytes(b"LMSPANS\n")
    assert "delete it to read the other ranks'" in lmtrain("trace", tmp_path, code=65)


def test_a_start_without_a_whole_step(tmp_path: Path) -> None:
    Made(layout=Layout(pp=2), num_microbatches=2, steps=()).write(tmp_path)
    shown = lmtrain("trace", tmp_path)
    assert "no whole step" in shown
    assert "no step was recorded to its end" in shown
    assert "rank 1 has recorded no span" in shown
    assert "--step=3 cannot be shown: start 1 has no completely recorded step" in lmtrain(
        "trace", tmp_path, "--step", 3, code=2
    )
