"""Does a trace say what was? Blocks that sleep known times, on processes whose clocks are off by up to 2 s and drift.

    python -m tests.benchmarks.trace_truth

Every schedule on 4 processes, then 8 processes and, as another start of the same run, 4 at another layout. All marks,
messages and collectives are a run's own, recorded by its recorder, which is given a wrong clock; the truth is the right
one, and what the blocks know of their sleep. Fails where fewer than 95% of the merged spans are within 1 ms of the
truth or one is off by over 5 ms, where a class's share is off by over 2% of a step, or the bubble is not the table's.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table as Sheet
from torch import Tensor, nn

from lmtrain.batch import Batch, StepBatches
from lmtrain.layout import Layout
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.layers.block import BlockContext
from lmtrain.observe.spans import trace_span_recorder as recording
from lmtrain.observe.spans.span_file import Header, SpanFile, read_spans, span_file_name
from lmtrain.observe.timeline.merge_ranks import Segment, merge_traces
from lmtrain.observe.timeline.step_breakdown import step_times
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from lmtrain.parallel.linear_forward_backward_products import compute_or_defer
from lmtrain.parallel.mesh import build_mesh
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.plan.compare_trace_to_schedule import compare_with_replay
from lmtrain.runtime.processes import current_phase
from lmtrain.schedules.pipeline_schedule import schedule_named
from lmtrain.schedules.schedule_simulator import Costs, simulate
from lmtrain.schedules.table import Action, Kind
from tests.layouts.workers import Pool

COSTS = Costs(forward=0.060, input=0.072, weight=0.048)  # seconds, of every block
DATA_S, UPDATE_S = 0.020, 0.040
STEPS, MICROBATCHES, LAYERS = range(10, 16), 8, 8
MOST_OFF_MS, USUALLY_MS, USUALLY, MOST_SHARE = 5.0, 1.0, 0.95, 0.02
SKEW_S, DRIFT = 2.0, 100e-6
CPU = torch.device("cpu")
ONE_START: tuple[dict[str, Any], ...] = (
    {"pp": 4, "schedule": "gpipe"}, {"pp": 4, "schedule": "1f1b"}, {"pp": 4, "vp": 2, "schedule": "interleaved"},
    {"pp": 4, "schedule": "zb_h1"}, {"pp": 4, "vp": 2, "schedule": "zb_v"},
)  # fmt: skip
RESTARTED: tuple[dict[str, Any], ...] = (
    {"pp": 4, "dp_replicate": 2, "schedule": "1f1b"}, {"pp": 2, "vp": 2, "dp_replicate": 2, "schedule": "interleaved"}
)  # fmt: skip


@dataclass(frozen=True)
class Clock:
    """A monotonic clock that is off: also what the recorder is given for its `time`."""

    offset_ns: float
    drift: float
    since_ns: int

    @classmethod
    def of(cls, rank: int, start: int, since_ns: int) -> Clock:
        rng = np.random.default_rng([rank, start])
        return cls(rng.uniform(-SKEW_S, SKEW_S) * 1e9, rng.uniform(-DRIFT, DRIFT), since_ns)

    def monotonic_ns(self) -> int:
        now = time.monotonic_ns()
        return int(now + self.offset_ns + self.drift * (now - self.since_ns))

    def truth(self, shown_ns: Any) -> Any:
        """The right clock's time, from `since_ns` on."""
        return (shown_ns - self.since_ns - self.offset_ns) / (1 + self.drift)


def main() -> int:
    console, sheet = Console(), Sheet(title=f"torch {torch.__version__}, load {os.getloadavg()[0]:.0f}")
    for head in ("layout", "spans", "95% within", "all within", "class off", "bubble", "table", "closed form"):
        sheet.add_column(head, justify="left" if head == "layout" else "right")
    failed = 0
    with Pool() as pool:
        for starts in ((one,) for one in ONE_START):
            failed += look(pool, starts, sheet)
        failed += look(pool, RESTARTED, sheet)
    console.print(sheet)
    return int(failed > 0)


def look(pool: Pool, starts: tuple[dict[str, Any], ...], sheet: Sheet) -> int:
    """One run; how many of its starts are not as they should be."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        known = []
        for number, parallel in enumerate(starts):
            since, world = time.monotonic_ns(), ParallelSettings(**parallel).layout.world_size
            told = {"folder": folder, "start": number, "since_ns": since, "parallel": parallel}
            known.append((since, pool.run("tests.benchmarks.trace_truth:work", world, told)))
        timeline = merge_traces(Path(folder))
        assert timeline.notes == (), timeline.notes
        for (since, slept), segment, parallel in zip(known, timeline.segments, starts, strict=True):
            assert segment.notes == (), segment.notes
            off = off_ms(Path(folder), segment, since)
            times = step_times(segment)
            beside = compare_with_replay(segment, times)
            assert beside is not None
            wrong, bubble = class_off(segment, slept)
            ideal = closed_form(segment)
            row = [float(np.quantile(off, USUALLY)), float(off.max())]
            sheet.add_row(
                ", ".join(f"{key} {value}" for key, value in parallel.items()), str(off.size // 2),
                f"{row[0]:.2f} ms", f"{row[1]:.2f} ms", f"{wrong:.2%}", f"{beside.bubble_s * 1e3:.0f} ms",
                f"{bubble * 1e3:.0f} ms", f"{ideal * 1e3:.0f} ms",
            )  # fmt: skip
            failed += row[0] > USUALLY_MS or row[1] > MOST_OFF_MS or wrong > MOST_SHARE
    return failed


def closed_form(segment: Segment) -> float:
    """The bubble of the schedule's table with the nominal sleeps."""
    layout = segment.layout
    blocks = LAYERS / layout.pp / layout.vp
    table = schedule_named(segment.schedule).table(layout.pp, layout.vp, MICROBATCHES)
    costs = Costs(forward=blocks * COSTS.forward, input=blocks * COSTS.input, weight=blocks * COSTS.weight)
    found = simulate(table, costs)
    return float(np.mean([found.makespan - busy for busy in found.busy]))


def off_ms(folder: Path, segment: Segment, since: int) -> Any:
    """How far each merged beginning and end is from the truth. The common clock is the lowest rank's, so it is that
    one's error that is taken off."""
    first = segment.headers[segment.ranks[0]]
    found = []
    for rank in segment.ranks:
        raw = read_spans(folder / "trace" / span_file_name(rank, segment.start)).spans
        for name in ("begin_ns", "end_ns"):
            truth = Clock.of(rank, segment.start, since).truth(raw[name].astype(np.float64))
            shown = segment.spans[segment.spans["rank"] == rank][name] - (first.wall_ns - first.monotonic_ns)
            merged_ns = Clock.of(segment.ranks[0], segment.start, since).truth(shown.astype(np.float64))
            found.append(np.abs(merged_ns - truth) / 1e6)
    return np.concatenate(found)


def class_off(segment: Segment, slept: list[dict[str, Any]]) -> tuple[float, float]:
    """(by how much of a step a class is off at most, the bubble of the table with the blocks' own sleeps), means of
    ranks and medians of steps. What a rank computes is what its blocks slept; what it stood still, the replay says."""
    times, layout = step_times(segment), segment.layout
    mean = {name: float(value) for name, value in times.mean().items()}
    whole = sum(mean.values())
    table = schedule_named(segment.schedule).table(layout.pp, layout.vp, MICROBATCHES)
    bubbles, compute = [], []
    for step in range(len(STEPS)):
        replays = []
        for plane in range(layout.dp * layout.tp):
            costs: dict[Action, float] = {}
            for pp in range(layout.pp):
                costs |= of_actions(slept[pp * layout.dp * layout.tp + plane]["blocks"][step], table.actions[pp])
            replays.append(simulate(table, cost_of=costs.__getitem__))
        last = max(one.makespan for one in replays)
        bubbles.append(float(np.mean([last - busy for one in replays for busy in one.busy])))
        compute.append(float(np.mean([busy for one in replays for busy in one.busy])))
    of_class = {
        "compute": float(np.mean(compute)), "data": float(np.mean([one["data_s"] for one in slept])),
        "optimizer": float(np.mean([one["update_s"] for one in slept])), "bubble": float(np.mean(bubbles)),
    }  # fmt: skip
    return max(abs(mean[name] - value) / whole for name, value in of_class.items()), median(bubbles)


def of_actions(blocks: list[tuple[int, str, float]], row: tuple[Action, ...]) -> dict[Action, float]:
    """What the blocks slept in each action: they come in the order of the row's."""
    left = defaultdict(list)
    for stage, half, seconds in blocks:
        left[stage, half].append(seconds)
    halves = {Kind.FORWARD: ("F",), Kind.BACKWARD: ("I", "W"), Kind.INPUT: ("I",), Kind.WEIGHT: ("W",)}
    found = {}
    for action in row:
        layers = len(left[action.stage, halves[action.kind][0]]) // (MICROBATCHES - action.microbatch)
        some = [left[action.stage, half].pop(0) for half in halves[action.kind] for _ in range(layers)]
        found[action] = sum(some)
    return found


def work(folder: str, start: int, since_ns: int, parallel: dict[str, Any]) -> dict[str, Any]:
    """What this rank does: some steps, with a trace. Returns how long it really slept."""
    settings = ParallelSettings(**parallel)
    mesh = build_mesh(settings.layout, CPU, 60.0)
    clock = Clock.of(mesh.rank, start, since_ns)
    gpt = GPTSettings(num_layers=LAYERS, width=8, num_heads=1, vocab_size=16, vocab_multiple=1, seq_len=8)
    model = build_parallel(
        gpt, Fp32Settings(), ComputeSettings(device="cpu"), CPU, seed=1, training=True, mesh=mesh, parallel=settings
    )
    slept: list[tuple[int, str, float]] = []
    for number, stage in model.stages.items():
        for block in stage.blocks.values():
            block.forward = Slow(block, number, slept)
    tokens = torch.arange(8).view(1, 8)
    batch = [Batch(tokens, tokens + 1)] * MICROBATCHES
    numbers = np.arange(MICROBATCHES)
    path = Path(folder) / "trace" / span_file_name(mesh.rank, start)
    file = SpanFile(path, header(mesh.rank, start, clock, settings))
    recorder = recording.Recorder(file)
    told: dict[str, Any] = {"blocks": [], "data_s": 0.0, "update_s": 0.0}
    model.forward_backward(StepBatches(0, batch, MICROBATCHES, (64,), numbers, 64))  # connections are made here
    slept.clear()
    dist.barrier()
    vars(recording)["time"] = clock
    current_phase.set_recorder(recorder)
    try:
        for step in STEPS:
            recorder.begin_step(step)
            current_phase.enter("data", step)
            told["data_s"] += _sleep(DATA_S) / len(STEPS)
            current_phase.leave()
            model.forward_backward(StepBatches(step, batch, MICROBATCHES, (64,), numbers, 64))
            told["blocks"].append([*slept])
            slept.clear()
            model.finish_gradients(1.0)
            told["update_s"] += _sleep(UPDATE_S) / len(STEPS)
            current_phase.leave()
    finally:
        current_phase.set_recorder(None)
        recorder.close()
        vars(recording)["time"] = time
    return told


def header(rank: int, start: int, clock: Clock, settings: ParallelSettings) -> Header:
    layout: Layout = settings.layout
    at = layout.coordinate(rank)
    return Header(
        rank=rank, world_size=layout.world_size, coordinate=(at.pp, at.dp_replicate, at.dp_shard, at.tp),
        sizes=(layout.pp, layout.vp, layout.dp_replicate, layout.dp_shard, layout.tp), host=f"node{rank}",
        pid=os.getpid(), start=start, wall_ns=time.time_ns() + int(clock.offset_ns), monotonic_ns=clock.monotonic_ns(),
        capacity=1 << 15, schedule=settings.schedule, num_microbatches=MICROBATCHES,
    )  # fmt: skip


class Slow:
    """In the place of a block's forward: it only takes its time, and notes how long that was."""

    def __init__(self, block: nn.Module, stage: int, slept: list[tuple[int, str, float]]) -> None:
        self.weight, self.stage, self.slept = next(block.parameters()), stage, slept  # any weight will do

    def __call__(self, x_BTD: Tensor, around: BlockContext) -> Tensor:
        y: Tensor = _Pause.apply(x_BTD, self.weight, self)  # type: ignore[no-untyped-call]
        return y

    def pause(self, half: str, seconds: float) -> None:
        self.slept.append((self.stage, half, _sleep(seconds)))


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, slow: Slow) -> Tensor:
        ctx.weight, ctx.slow = weight, slow
        slow.pause("F", COSTS.forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, slow = ctx.weight, ctx.slow

        def product() -> Tensor:
            slow.pause("W", COSTS.weight)
            return torch.zeros_like(weight)

        slow.pause("I", COSTS.input)
        return grads[0], compute_or_defer(weight, product), None


def _sleep(seconds: float) -> float:
    began = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
