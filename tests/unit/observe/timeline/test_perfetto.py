"""The file goes by its format's rules, and each arrow leads from a send to the receive of the same message."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lmtrain.layout import Layout
from lmtrain.observe.timeline.merge_ranks import merge_traces
from lmtrain.observe.timeline.perfetto_export import write_trace
from tests.unit.observe.timeline.made_up import Made
from tests.unit.observe.timeline.trace_event_format import problems


def written(folder: Path, name: str = "trace.json") -> dict[str, Any]:
    write_trace(merge_traces(folder), folder / name)
    content = (folder / name).read_bytes()
    return dict(json.loads(gzip.decompress(content) if name.endswith(".gz") else content))


def test_every_flow_leads_from_its_send_to_its_receive(tmp_path: Path) -> None:
    """Follow each by rank, stage and microbatch, as somebody would who looks at the screen."""
    layout = Layout(pp=4, vp=2, dp_shard=2)
    made = Made(layout=layout, schedule="zb_v", num_microbatches=4, steps=(10, 11)).write(tmp_path)
    document = written(tmp_path)
    assert problems(document) == []
    events = document["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    at = {(e["cat"], e["tid"], e["ts"]): e for e in events if e["ph"] == "X"}
    receives = [e for e in events if e["ph"] == "X" and e["cat"] == "receive"]
    ends = {(e["tid"], round(e["ts"] + max(e["dur"] - 0.001, 0.0), 3)): e for e in receives}
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    arrows = [e for e in events if e["ph"] == "f"]
    assert len(arrows) == sum(int((spans["kind"] == 7).sum()) for spans in made.truth.values()) > 100
    for arrow in arrows:
        begin = begins.pop(arrow["id"])
        send, receive = at["send", begin["tid"], begin["ts"]], ends[arrow["tid"], arrow["ts"]]
        ranks = [int(threads[e["tid"]].split()[1]) for e in (send, receive)]
        stages = [int(threads[e["tid"]].split()[3]) for e in (send, receive)]
        assert (send["args"]["peer"], receive["args"]["peer"]) == (ranks[1], ranks[0])
        assert send["args"]["microbatch"] == receive["args"]["microbatch"]
        assert send["args"]["stage"] == receive["args"]["stage"] == stages[1]
        assert abs(stages[0] - stages[1]) == 1
        assert arrow["ts"] > begin["ts"]
    assert not begins


def test_hosts_are_processes_and_starts_lie_behind_one_another(tmp_path: Path) -> None:
    Made(layout=Layout(pp=2, tp=2), num_microbatches=2, steps=(10,)).write(tmp_path)
    Made(layout=Layout(dp_shard=2), num_microbatches=2, steps=(10,), start=1, began_s=300).write(tmp_path)
    document = written(tmp_path, "trace.json.gz")
    assert problems(document) == []
    events = document["traceEvents"]
    names = [e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]]
    assert [name for name in names if name.startswith("host")] == ["host node0", "host node1"]
    assert "rank 3 (pp 1, dp 0, tp 1)" in names
    assert "rank 3 stage 1" in names
    assert "start 2: rank 1 (pp 0, dp 1, tp 0)" in names
    steps = [e for e in events if e["name"] == "step 10"]
    assert len(steps) == 6
    assert max(e["ts"] + e["dur"] for e in steps[:4]) < min(e["ts"] for e in steps[4:])


SLICE = {"ph": "X", "name": "a", "cat": "c", "ts": 1.0, "dur": 4.0, "pid": 1, "tid": 2, "args": {}}
NAMED = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "p"}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "ts": 0, "args": {"name": "t"}},
]
FLOW = {"cat": "c", "name": "m", "id": 1, "pid": 1, "tid": 2}


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([{**SLICE, "dur": -1.0}], "a time below 0"),
        ([{**SLICE, "ts": "1"}], "ts is not there"),
        ([SLICE, {**SLICE, "ts": 3.0}], "ends after the slice around it"),
        ([{**SLICE, "pid": 3}], "process 3 has no name"),
        ([SLICE, {"ph": "s", **FLOW, "ts": 2.0}], "1 beginnings and 0 ends"),
        ([SLICE, {"ph": "s", **FLOW, "ts": 3.0}, {"ph": "f", "bp": "e", **FLOW, "ts": 2.0}], "ends before it begins"),
        ([SLICE, {"ph": "s", **FLOW, "ts": 2.0}, {"ph": "f", "bp": "e", **FLOW, "ts": 9.0}], "an end in no slice"),
        ([{"ph": "Z"}], "no known phase"),
    ],
)
def test_the_rules_find_a_planted_mistake(events: list[dict[str, Any]], said: str) -> None:
    assert problems({"traceEvents": [*NAMED, SLICE]}) == []
    assert said in problems({"traceEvents": [*NAMED, *events]})[0]
