"""What a trace costs the host: CPU time a span, and of steps of 20 ms with the trace sampled, side by side with none.

    python -m tests.benchmarks.trace_cost

The marks of 1,000 steps of a rank in a pipeline with tensor parallelism are made without the work in between, which is
the same with a trace and without one. Contenders take turns, and medians of the thread's CPU time are compared.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmtrain.observe.spans.span_file import Header, SpanFile
from lmtrain.observe.spans.trace_span_recorder import TRACE_ALL, TRACE_NONE, TRACE_SAMPLED, Recorder, Tracer
from lmtrain.runtime.processes import current_phase

STEPS, MICROBATCHES, SUMS, ROUNDS = 1000, 8, 8, 9
STEP_S = 0.020
MOST_A_SPAN_S, MOST_SHARE = 2e-6, 0.003


@dataclass(frozen=True)
class Axis:
    name: str


@dataclass(frozen=True)
class MessageKey:
    backward: bool
    stage: int
    microbatch: int


TP, WORLD, SENT = Axis("tp"), Axis("world"), np.zeros(1024, np.float32)


def one_step(step: int) -> None:
    """As executor, collectives, messages and loop mark it."""
    current_phase.enter("data", step)
    current_phase.leave()
    for phase in ("forward", "backward"):
        for index in range(MICROBATCHES):
            current_phase.enter(phase, microbatch=index, stage=1)
            began = current_phase.span_start(SENT)
            with current_phase.within("collective", "a message from another stage"):
                pass
            current_phase.record_message(began, "receive", 0, SENT, MessageKey(False, 1, index))
            for _ in range(SUMS):
                with current_phase.within("collective", "a sum of activations", axis=TP, tensor=SENT):
                    pass
            began = current_phase.span_start(SENT)
            current_phase.record_message(began, "send", 2, SENT, MessageKey(False, 2, index))
            current_phase.leave()
    current_phase.enter("optimizer")
    with current_phase.within("collective", "the gradient norm", axis=WORLD, tensor=SENT):
        pass
    current_phase.leave()


def measured(which: str, folder: Path) -> tuple[float, int]:
    """CPU seconds of all steps, the file's opening included, and the number of spans."""

    def open_recorder() -> Recorder:
        header = Header(1, 8, (1, 0, 0, 0), (4, 1, 1, 1, 2), "here", 1, 0, 0, 0, 1 << 15, "1f1b", MICROBATCHES)
        return Recorder(SpanFile(folder / "trace" / f"{time.time_ns()}.spans", header))

    began = time.thread_time()
    tracer = Tracer(which, open_recorder, print)
    current_phase.set_step_callback(tracer.begin_step)
    for step in range(1, STEPS + 1):
        one_step(step)
    seconds, recorder = time.thread_time() - began, tracer.recorder
    tracer.close()
    return seconds, recorder.file.num_written if recorder else 0


def main() -> int:
    seconds: dict[str, list[float]] = {TRACE_NONE: [], TRACE_SAMPLED: [], TRACE_ALL: []}
    spans: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for which in seconds:
            measured(which, Path(folder))
        for _ in range(ROUNDS):
            for which, found in seconds.items():
                took, spans[which] = measured(which, Path(folder))
                found.append(took)
    print(f"{spans[TRACE_ALL] // STEPS} spans a step, {STEPS} steps, medians of {ROUNDS} rounds")
    none = statistics.median(seconds[TRACE_NONE])
    share = a_span = 0.0
    for which, found in seconds.items():
        more = statistics.median(found) - none
        of_all = more / (STEPS * STEP_S)
        print(
            f"{which:8} {statistics.median(found) / STEPS * 1e6:8.1f} us of CPU a step, {spans[which]:7} spans"
            f", {of_all:8.3%} more of steps of {STEP_S * 1e3:.0f} ms"
        )
        share = of_all if which == TRACE_SAMPLED else share
        a_span = more / spans[which] if which == TRACE_ALL else a_span
    print(f"a span: {a_span * 1e6:.2f} us of CPU (at most {MOST_A_SPAN_S * 1e6:.0f})")
    print(f"sampled: {share:.3%} of CPU (at most {MOST_SHARE:.1%})")
    return int(a_span > MOST_A_SPAN_S or share > MOST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
