from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from lmtrain.observe.spans import trace_span_recorder as module
from lmtrain.observe.spans.span_file import Axis, Flag, Kind, read_spans
from lmtrain.observe.spans.trace_span_recorder import Recorder
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.current_phase import within
from tests.unit.observe.spans.conftest import Open


@dataclass(frozen=True)
class Over:
    name: str


@dataclass(frozen=True)
class MessageKey:
    backward: bool
    stage: int
    microbatch: int


class Told:
    """A clock that goes on by one whenever it is read."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic_ns(self) -> int:
        self.now += 1
        return self.now


HELD, TP, WORLD = np.zeros(3, np.float32), Over("tp"), Over("world")


@pytest.fixture
def recorder(open_file: Open, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(module, "time", Told())
    recorder = Recorder(open_file(1000))
    current_phase.set_step_callback(recorder.begin_step)
    current_phase.set_recorder(recorder)
    return recorder


def found(recorder: Recorder) -> list[tuple[Any, ...]]:
    """(kind, begin, end) in the order of their beginnings."""
    spans = read_spans(recorder.file.path).spans
    return [(Kind(int(one["kind"])).name, int(one["begin_ns"]), int(one["end_ns"])) for one in spans]


def test_what_is_entered_lasts_until_it_is_left_or_something_else_is_entered(recorder: Recorder) -> None:
    current_phase.enter("data", 1)
    current_phase.leave()
    current_phase.enter("forward", microbatch=3, stage=1)
    current_phase.enter("backward", microbatch=3, stage=1, half="input")
    current_phase.leave()
    current_phase.enter("backward", microbatch=3, stage=1, half="weight")
    current_phase.enter("backward", microbatch=4, stage=1)
    current_phase.enter("optimizer")
    current_phase.leave()
    current_phase.enter("data", 2)
    assert found(recorder) == [
        ("STEP", 1, 14), ("DATA", 2, 3), ("FORWARD", 4, 5), ("INPUT", 6, 7), ("WEIGHT", 8, 9), ("BACKWARD", 10, 11),
        ("OPTIMIZER", 12, 13),
    ]  # fmt: skip
    spans = read_spans(recorder.file.path).spans
    assert [tuple(one) for one in spans[["step", "stage", "microbatch"]].tolist()][2:6] == [
        (1, 1, 3), (1, 1, 3), (1, 1, 3), (1, 1, 4)
    ]  # fmt: skip


def test_a_collective_stands_within_what_it_is_part_of(recorder: Recorder) -> None:
    current_phase.enter("data", 1)
    current_phase.enter("forward", microbatch=0, stage=0)
    with within("collective", "a sum", axis=TP, tensor=HELD):
        pass
    with within("collective", "a sum", axis=TP, tensor=HELD, early=True):
        pass
    current_phase.leave()
    with within("save"), within("collective", "the vote on a stop", axis=WORLD, tensor=HELD):
        pass
    recorder.end_step()
    assert [kind for kind, *_ in found(recorder)] == [
        "STEP", "DATA", "FORWARD", "COLLECTIVE", "COLLECTIVE", "SAVE", "COLLECTIVE"
    ]  # fmt: skip
    spans = read_spans(recorder.file.path)
    sums = spans.spans[spans.spans["kind"] == Kind.COLLECTIVE]
    assert sums["number"].tolist() == [0, 1, 0], "each axis counts by itself"
    assert sums["axis"].tolist() == [Axis.TP, Axis.TP, Axis.WORLD]
    assert sums["flags"].tolist() == [0, Flag.EARLY, 0]
    assert sums["num_bytes"].tolist() == [12, 12, 12]
    assert [spans.header.names[int(one["name"])] for one in sums] == ["a sum", "a sum", "the vote on a stop"]


def test_both_ends_of_a_message_number_it_in_their_order(recorder: Recorder) -> None:
    current_phase.enter("data", 1)
    current_phase.enter("forward", microbatch=1, stage=2)
    for letter in (None, MessageKey(False, 2, 1)):
        current_phase.record_message(current_phase.span_start(), "receive", 4, HELD, letter)
    current_phase.record_message(current_phase.span_start(), "send", 4, HELD, MessageKey(True, 1, 1))
    current_phase.record_message(current_phase.span_start(), "send", 6, HELD, MessageKey(False, 3, 1))
    recorder.end_step()
    spans = read_spans(recorder.file.path)
    mail = [
        (
            Kind(int(one["kind"])).name,
            *one[["peer", "number", "stage", "microbatch"]].tolist(),
            spans.header.names[int(one["name"])],
        )
        for one in spans.spans
        if one["kind"] in (Kind.SEND, Kind.RECEIVE)
    ]
    assert mail == [
        ("RECEIVE", 4, 0, -1, -1, "terms"), ("RECEIVE", 4, 1, 2, 1, "activations"), ("SEND", 4, 0, 1, 1, "gradients"),
        ("SEND", 6, 0, 3, 1, "activations"),
    ]  # fmt: skip
    begins = {kind: begin for kind, begin, _ in found(recorder)}
    ends = {kind: end for kind, _, end in found(recorder)}
    assert begins["FORWARD"] == ends["RECEIVE"], "what waits for a message computes when it has come"


def test_numbers_begin_anew_with_each_step(recorder: Recorder) -> None:
    for step in (1, 2):
        current_phase.enter("data", step)
        with within("collective", "a sum", axis=TP, tensor=HELD):
            pass
    recorder.end_step()
    spans = read_spans(recorder.file.path).spans
    assert spans[spans["kind"] == Kind.COLLECTIVE][["step", "number"]].tolist() == [(1, 0), (2, 0)]


def test_only_a_wait_for_a_message_to_be_taken_that_took_time_is_kept(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    current_phase.enter("data", 1)
    for _ in range(2):
        current_phase.record_message(current_phase.span_start(), "taken", 4, HELD)
        monkeypatch.setattr(module, "_SHORT_WAIT_NS", 0)
    recorder.end_step()
    spans = read_spans(recorder.file.path).spans
    assert spans[spans["kind"] == Kind.SEND][["number", "flags"]].tolist() == [(1, Flag.EARLY)]


def test_the_thread_that_saves_and_marks_without_an_axis_are_not_recorded(recorder: Recorder) -> None:
    current_phase.enter("data", 1)
    current_phase.saver.enter("save", 1)
    with within("collective", "an agreement", current_phase.saver, WORLD, HELD), within("collective", "a message"):
        pass
    current_phase.saver.enter("save", -1)
    current_phase.enter("build")
    recorder.end_step()
    assert [kind for kind, *_ in found(recorder)] == ["STEP", "DATA"]


def test_what_fails_is_not_recorded_and_one_begun_before_is_not_either(recorder: Recorder) -> None:
    current_phase.enter("data", 1)
    with pytest.raises(RuntimeError), within("collective", "a sum", axis=TP, tensor=HELD):
        raise RuntimeError("Connection closed by peer")
    current_phase.set_recorder(None)
    began, mark = current_phase.span_start(), within("collective", "a sum", axis=TP, tensor=HELD)
    with mark:
        current_phase.set_recorder(recorder)
    current_phase.record_collective(began, "a sum", TP, HELD)
    current_phase.record_message(began, "send", 1, HELD)
    recorder.end_step()
    assert [kind for kind, *_ in found(recorder)] == ["STEP", "DATA"]


def test_an_exchange_with_one_rank_counts_by_itself(recorder: Recorder) -> None:
    current_phase.enter("data", 1)
    current_phase.record_collective(current_phase.span_start(), "losses", Over("pp"), HELD)
    current_phase.record_collective(current_phase.span_start(), "the gradient of a tied weight", Over("pp"), HELD, 1)
    current_phase.record_collective(current_phase.span_start(), "losses", Over("pp"), HELD)
    recorder.end_step()
    spans = read_spans(recorder.file.path).spans
    assert spans[spans["kind"] == Kind.COLLECTIVE][["peer", "number"]].tolist() == [(-1, 0), (1, 0), (-1, 1)]
