"""Files of spans whose truth is known: a pipeline of any schedule replayed, on clocks that are off and drift.

Called by the tests of the timeline. The truth is on the lowest rank's clock, which is kept right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.layout import Layout
from lmtrain.observe.spans.span_file import SPAN, Axis, Header, Kind, SpanFile, span_file_name
from lmtrain.schedules.pipeline_schedule import schedule_named
from lmtrain.schedules.schedule_simulator import Costs, simulate
from lmtrain.schedules.table import Action, prerequisites
from lmtrain.schedules.table import Kind as Work

KINDS = {Work.FORWARD: Kind.FORWARD, Work.BACKWARD: Kind.BACKWARD, Work.INPUT: Kind.INPUT, Work.WEIGHT: Kind.WEIGHT}
NAMES = ("", "the gradient norm", "a sum of activations")
MS = 1_000_000
WALL_NS = 1_790_000_000 * 10**9


@dataclass
class Made:
    """A start of a run. Times in ms; all of it can be changed before `write`."""

    layout: Layout = field(default_factory=lambda: Layout(pp=4))
    schedule: str = "1f1b"
    num_microbatches: int = 8
    steps: tuple[int, ...] = (10, 11, 12, 13)
    costs: Costs = field(default_factory=lambda: Costs(forward=3.0, input=4.0, weight=2.0))
    message: float = 0.1  # on its way
    handing: float = 0.02
    data: float = 0.5
    update: float = 1.0
    summing: float = 0.3  # a collective, from the last member's beginning
    noise: float = 0.03  # by which an end is late, at most
    offset_s: float = 2.0  # of clocks
    drift: float = 1e-4
    slow: dict[int, float] = field(default_factory=dict)  # rank: factor
    start: int = 0
    began_s: float = 100.0
    gap_s: float = 0.0  # between steps
    seed: int = 0
    hosts: int = 2
    truth: dict[int, NDArray[Any]] = field(default_factory=dict)  # rank: spans in true time, in the file's order
    timelines: list[Any] = field(default_factory=list)

    def write(self, folder: Path) -> Made:
        """Into a run's folder."""
        (folder / "trace").mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        self.rng = np.random.default_rng(self.seed + 1000 * self.start)
        rows: dict[int, list[tuple[Any, ...]]] = {rank: [] for rank in range(self.layout.world_size)}
        now = self.began_s * 1e3
        for step in self.steps:
            now = self._step(rows, step, now) + self.gap_s * 1e3
        for rank, mine in rows.items():
            self._write_rank(folder, rank, mine)
        return self

    def _step(self, rows: dict[int, list[tuple[Any, ...]]], step: int, began: float) -> float:
        layout, ready = self.layout, {}
        for rank in rows:
            late = self.rng.uniform(0, self.noise)
            rows[rank].append((began, began + self.data + late, step, Kind.DATA))
            ready[rank] = began + self.data + late
        for dp in range(layout.dp):
            for tp in range(layout.tp):
                pipe = [((pp * layout.dp) + dp) * layout.tp + tp for pp in range(layout.pp)]
                self._pipeline(rows, step, pipe, ready)
        last = max(ready.values())
        ends = {}
        for rank in rows:
            norm_end = last + self.summing + self.rng.uniform(0, self.noise)
            if layout.world_size > 1:
                norm = (step, Kind.COLLECTIVE, Axis.WORLD, 0, -1, -1, -1, 4, 1)
                rows[rank].append((ready[rank], norm_end, *norm))
            ends[rank] = norm_end + self.update
            rows[rank].append((ready[rank], ends[rank], step, Kind.OPTIMIZER))
        over = max(ends.values())
        for rank in rows:
            rows[rank].append((began, over, step, Kind.STEP))
        return over

    def _pipeline(
        self, rows: dict[int, list[tuple[Any, ...]]], step: int, pipe: list[int], ready: dict[int, float]
    ) -> None:
        table = schedule_named(self.schedule).table(self.layout.pp, self.layout.vp, self.num_microbatches)
        last, begins = table.num_stages - 1, max(ready[rank] for rank in pipe)

        def passes_on(action: Action) -> int | None:
            """To which stage."""
            to = action.stage + (1 if action.kind is Work.FORWARD else -1)
            there = 0 <= to <= last and action.kind is not Work.WEIGHT
            return to if there and table.rank_of[to] != table.rank_of[action.stage] else None

        def work(action: Action) -> float:
            return self.costs.of(action) * self.slow.get(pipe[table.rank_of[action.stage]], 1.0)

        found = simulate(
            table, Costs(send=self.message),
            lambda action: work(action) + (0.0 if passes_on(action) is None else self.handing),
        )  # fmt: skip
        self.timelines.append(found)
        free = dict.fromkeys(range(table.num_ranks), 0.0)
        sent: dict[tuple[int, int], int] = {}
        numbers: dict[Action, int] = {}
        for span in sorted(found.spans, key=lambda one: one.end):
            if (to := passes_on(span.action)) is not None:
                pair = (span.rank, table.rank_of[to])
                numbers[span.action] = sent[pair] = sent.get(pair, -1) + 1
        for span in sorted(found.spans, key=lambda one: one.start):
            action, rank = span.action, pipe[span.rank]
            for need in prerequisites(action, last):
                if need in numbers and action.kind is not Work.WEIGHT and need.stage != action.stage:
                    peer = pipe[table.rank_of[need.stage]]
                    rows[rank].append((
                        begins + free[span.rank], begins + span.start, step, Kind.RECEIVE, Axis.PP, numbers[need],
                        action.microbatch, peer, action.stage, 4096,
                    ))  # fmt: skip
            done = span.start + work(action)
            about = (step, KINDS[action.kind], Axis.NONE, 0, action.microbatch, -1, action.stage)
            rows[rank].append((begins + span.start, begins + done, *about))
            if (to := passes_on(action)) is not None:
                rows[rank].append((
                    begins + done, begins + span.end, step, Kind.SEND, Axis.PP, numbers[action], action.microbatch,
                    pipe[table.rank_of[to]], to, 4096,
                ))  # fmt: skip
            free[span.rank] = span.end
        for number, rank in enumerate(pipe):
            ready[rank] = begins + free[number]

    def _write_rank(self, folder: Path, rank: int, rows: list[tuple[Any, ...]]) -> None:
        defaults = (0, 0, 0, Kind.OTHER, Axis.NONE, 0, -1, -1, -1, 0, 0)
        spans = np.zeros(len(rows), SPAN)
        full = [row + defaults[len(row) :] for row in rows]
        columns = [
            "begin_ns", "end_ns", "step", "kind", "axis", "number", "microbatch", "peer", "stage", "num_bytes", "name"
        ]  # fmt: skip
        for name, values in zip(columns, zip(*full, strict=True), strict=bool(full)):
            spans[name] = np.rint(np.array(values) * MS) if name in ("begin_ns", "end_ns") else values
        self.truth[rank] = spans[np.lexsort((-spans["end_ns"], spans["begin_ns"]))]
        offset = self.rng.uniform(-1, 1) * self.offset_s * 1e9 if rank else 0.0
        drift = self.rng.uniform(-1, 1) * self.drift if rank else 0.0
        skewed = spans.copy()
        for name in ("begin_ns", "end_ns"):
            skewed[name] += np.rint(offset + drift * (spans[name] - self.began_s * 1e9)).astype(np.int64)
        at, layout = self.layout.coordinate(rank), self.layout
        header = Header(
            rank, layout.world_size, (at.pp, at.dp_replicate, at.dp_shard, at.tp),
            (layout.pp, layout.vp, layout.dp_replicate, layout.dp_shard, layout.tp),
            f"node{rank * self.hosts // layout.world_size}", 1000 + rank, self.start,
            wall_ns=WALL_NS, monotonic_ns=0, capacity=len(rows) + 1, schedule=self.schedule,
            num_microbatches=self.num_microbatches, names=NAMES,
        )  # fmt: skip
        write_spans(folder / "trace" / span_file_name(rank, self.start), header, skewed)


def write_spans(path: Path, header: Header, spans: NDArray[Any]) -> None:
    file = SpanFile(path, header)
    for span in spans:
        file.write(*span.tolist()[:-1])
    file.close()
