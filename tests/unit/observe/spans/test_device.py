"""The clock of a device, on one that is told how far it has come."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmtrain.observe.spans.span_file import Flag, Header, Kind, SpanFile, read_spans
from lmtrain.observe.spans.trace_span_recorder import DeviceClock, Recorder


@dataclass
class Device:
    """torch.cuda as the clock uses it: what is recorded happens a millisecond after what was recorded before."""

    stream: str = "compute"
    recorded: int = 0
    done: int = 0
    made: int = 0

    def current_stream(self) -> str:
        return self.stream

    def Event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0

    def record(self, stream: str) -> None:
        assert stream == self.device.stream
        self.device.recorded += 1
        self.at = self.device.recorded

    def query(self) -> bool:
        return self.at <= self.device.done

    def elapsed_time(self, later: Event) -> float:
        assert self.query()
        assert later.query()
        return float(later.at - self.at)


def test_spans_stand_on_the_hosts_clock_around_when_the_device_was_idle() -> None:
    clock = DeviceClock(device := Device())
    before = clock.record_event(), clock.record_event()
    clock.set_reference()
    after = clock.record_event(), clock.record_event()
    clock.add_span(*before, (7, 0))
    clock.add_span(*after, (8, 0))
    assert list(clock.finished_spans()) == [], "nobody waits for the device"
    device.done = device.recorded
    (first, second) = clock.finished_spans()
    assert (first[1] - first[0], second[0] - first[1], second[1] - second[0]) == (10**6, 2 * 10**6, 10**6)
    assert [first[2:], second[2:]] == [(7, Flag.DEVICE), (8, Flag.DEVICE)]
    assert list(clock.finished_spans()) == []


def test_steps_are_read_as_far_as_the_device_has_come() -> None:
    clock = DeviceClock(device := Device())
    for step in (1, 2):
        clock.add_span(clock.record_event(), clock.record_event(), (step, 0))
        clock.set_reference()
        clock.next_step()
    device.done = 3
    assert [rest[2] for rest in clock.finished_spans()] == [1]
    device.done = 99
    assert [rest[2] for rest in clock.finished_spans()] == [2]


def test_another_stream_runs_beside_the_computation() -> None:
    clock = DeviceClock(device := Device())
    device.stream = "gradients"
    clock.add_span(clock.record_event(), clock.record_event(), (0, Flag.EARLY))
    device.stream = "compute"
    clock.set_reference()
    device.done = 99
    assert [rest[-1] for rest in clock.finished_spans()] == [Flag.DEVICE | Flag.ASIDE | Flag.EARLY]


def test_events_are_used_again_and_not_before_the_step_after_theirs_is_read() -> None:
    clock, device = DeviceClock(device := Device()), device
    for step in range(20):
        began = clock.record_event()
        clock.set_reference()
        clock.next_step()
        clock.add_span(began, clock.record_event(), (step, 0))  # ends in the next step, as a step does
        device.done = device.recorded
        found = [rest[2] for rest in clock.finished_spans()]
        assert found == ([step] if step else [0])
    assert device.made < 20


def test_a_step_whose_time_is_not_known_takes_that_of_the_one_before() -> None:
    clock = DeviceClock(device := Device())
    device.done = 99
    clock.add_span(clock.record_event(), clock.record_event(), (1, 0))
    assert list(clock.finished_spans()) == [], "and the first is left out"
    clock.set_reference()
    clock.next_step()
    clock.add_span(clock.record_event(), clock.record_event(), (2, 0))
    assert [rest[2] for rest in clock.finished_spans()] == [2]


@pytest.mark.parametrize("kind", ["receive", "taken"])
def test_a_message_on_the_host_within_a_forward_leaves_its_end_on_the_device(kind: str, tmp_path: Path) -> None:
    """What a stage tells its neighbour before its first message lies on the host, whatever computes."""
    header = Header(
        rank=0, world_size=2, coordinate=(0, 0, 0, 0), sizes=(2, 1, 1, 1, 1), host="here", pid=1, start=0, wall_ns=0,
        monotonic_ns=0, capacity=64, schedule="1f1b", num_microbatches=1,
    )  # fmt: skip
    file, device = SpanFile(tmp_path / "one.spans", header), Device()
    spans, told = Recorder(file, DeviceClock(device)), SimpleNamespace(is_cuda=False, nbytes=48)
    spans.begin_step(1)
    spans.enter("forward", "", 0, 0)
    spans.record_message(spans.current_time(told), kind, 1, told, None)
    spans.leave()
    spans.device.set_reference()  # type: ignore[union-attr]
    device.done = 99
    spans.close()
    found = read_spans(file.path).spans
    (forward,) = found[found["kind"] == Kind.FORWARD]
    assert forward["flags"] & Flag.DEVICE
    assert forward["end_ns"] > forward["begin_ns"]
