from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from lmtrain.errors import StorageError
from lmtrain.observe.spans import span_file as form
from lmtrain.observe.spans.span_file import Kind, read_spans
from lmtrain.observe.spans.trace_span_recorder import TRACE_ALL, TRACE_NONE, TRACE_SAMPLED, Recorder, Tracer
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.current_phase import within
from tests.unit.observe.spans.conftest import Open

SPANS = str(Path(form.__file__).parent / "*")


def train(first: int, last: int, after: Callable[[int], None] = lambda step: None) -> None:
    for step in range(first, last + 1):
        current_phase.enter("data", step)
        current_phase.enter("forward", microbatch=0, stage=0)
        with within("collective", "a sum"):
            pass
        current_phase.leave()
        after(step)


def traced(path: Path) -> list[int]:
    spans = read_spans(path).spans
    return sorted(spans[spans["kind"] == Kind.STEP]["step"].tolist())


def tracer(which: str, open_file: Open, said: list[str] | None = None) -> Tracer:
    made = Tracer(which, lambda: Recorder(open_file(100_000)), print if said is None else said.append)
    current_phase.set_step_callback(made.begin_step)
    return made


def file_of(tracer: Tracer) -> Path:
    assert tracer.recorder is not None
    return tracer.recorder.file.path


@pytest.mark.parametrize(
    ("which", "first", "last", "steps"),
    [
        (TRACE_SAMPLED, 1, 30, [*range(10, 16)]),
        (TRACE_SAMPLED, 501, 530, [*range(510, 516)]),
        (TRACE_SAMPLED, 1, 3003, [*range(10, 16), 333, 334, 1333, 1334, 2333, 2334]),
        (TRACE_ALL, 5, 20, [*range(5, 21)]),
    ],
)
def test_these_steps_are_traced(open_file: Open, which: str, first: int, last: int, steps: list[int]) -> None:
    made = tracer(which, open_file)
    train(first, last)
    path = file_of(made)
    made.close()
    assert traced(path) == steps


def test_sampled_steps_do_not_save_or_validate(open_file: Open) -> None:
    made = tracer(TRACE_SAMPLED, open_file)
    train(1, 20_000)
    sampled = [step for step in traced(file_of(made)) if step > 15]
    assert len(sampled) == 40
    for interval in (5, 8, 10, 16, 50, 64, 100, 128, 200, 250, 256, 500, 512, 1000, 1024):
        assert not [step for step in sampled if step % interval == 0], interval


def test_six_steps_are_traced_when_somebody_asks(open_file: Open) -> None:
    made = tracer(TRACE_NONE, open_file)
    train(1, 50, lambda step: made.request_steps() if step in (20, 23, 40) else None)
    assert traced(file_of(made)) == [*range(21, 30), *range(41, 47)]


def test_none_leaves_no_file(open_file: Open, tmp_path: Path) -> None:
    made = tracer(TRACE_NONE, open_file)
    train(1, 1100)
    made.close()
    assert not (tmp_path / "trace").exists()
    assert made.recorder is None


@pytest.mark.parametrize("which", [TRACE_NONE, TRACE_SAMPLED])
def test_a_step_that_is_not_traced_makes_nothing(open_file: Open, which: str) -> None:
    """No memory is taken by any line that records, and no span is counted."""
    made = tracer(which, open_file)
    train(1, 20)
    recorder = made.recorder
    num_spans = recorder.file.num_written if recorder else 0
    tracemalloc.start()
    try:
        train(21, 60)
        taken = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, SPANS)])
    finally:
        tracemalloc.stop()
    assert sum(one.size for one in taken.statistics("filename")) == 0
    assert (recorder.file.num_written if recorder else 0) == num_spans


def test_a_disk_without_room_is_said_once_and_a_question_tries_again(tmp_path: Path) -> None:
    tried, said = [0], list[str]()

    def refuse() -> Recorder:
        tried[0] += 1
        raise StorageError("Writing x failed: the disk is full.")

    made = Tracer(TRACE_ALL, refuse, said.append)
    current_phase.set_step_callback(made.begin_step)
    train(1, 9)
    assert (tried, len(said)) == ([1], 1)
    made.request_steps()
    train(10, 19)
    assert (tried, len(said)) == ([2], 2)
    assert "training goes on" in said[0]


def test_a_disk_that_fills_ends_the_trace_and_not_the_run(open_file: Open) -> None:
    said = list[str]()
    made = tracer(TRACE_ALL, open_file, said)
    train(1, 3)
    assert made.recorder is not None
    path, made.recorder.file.problem = file_of(made), "Writing x failed: the disk is full."
    train(4, 9)
    assert len(said) == 1
    assert made.recorder is None
    assert traced(path) == [1, 2]


def test_the_step_that_a_run_ends_with_is_whole(open_file: Open) -> None:
    made = tracer(TRACE_ALL, open_file)
    train(1, 4)
    path = file_of(made)
    made.close()
    assert traced(path) == [1, 2, 3, 4]
