"""Detection of stragglers: each rank measures its own work, and rank 0 compares the ranks and names the slow ones.

Each rank also reports its memory use, which rank 0 passes on.

Called by save_and_stop_requests.py, which sends the numbers with the vote on a stop and adds no collective; by
step_and_save_durations.py at the begin and end of a step; and by metrics_writer.py, whose rows get `facts`. Ranks are
compared if they do the same work: ranks of the same pipeline stage, and of stages with equally many layers if none of
them is the first or the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.layout import Layout
from lmtrain.models.model_settings import ModelSettings
from lmtrain.observe.measure.process_and_gpu_memory import Memory
from lmtrain.observe.stragglers.find_slow_ranks import (
    MIN_EXCESS,
    MIN_EXCESS_S,
    MIN_LINK_EXCESS,
    MIN_LINK_EXCESS_S,
    PeerGroup,
    Straggler,
    link_message,
    rank_label,
    rank_message,
)
from lmtrain.parallel.mesh import Mesh
from lmtrain.parallel.pipeline.stage_to_stage_messages import links
from lmtrain.placement.layers_and_shards_of_ranks import stages_of_rank
from lmtrain.runtime.processes.current_phase import MESSAGES, PHASES, main
from lmtrain.train.run_config import RunConfig

OWN_WORK = ("data", "forward", "backward", "optimizer")  # work that only this process's own slowness makes longer
WAITING = ("messages", "collectives")
NUM_ENDS = 2  # links of a rank: to the next and to the previous rank along pp
COLUMNS = (*OWN_WORK, *WAITING, *(("sent", "came") * NUM_ENDS))
STEPS = 4  # steps per window
_WARM = 2  # because: the first steps of a process compile, fill caches and allocate memory
_KINDS = (*map(PHASES.index, OWN_WORK), MESSAGES, PHASES.index("collective"))


class WorkTimes:
    """The times that this process spends on its own work and on waiting, collected over windows of STEPS steps."""

    def __init__(self) -> None:
        self.neighbours: tuple[int, ...] = ()  # neighbour ranks along pp, whose messages are timed
        self._steps_ns: list[list[int]] = []  # for each step of the window, nanoseconds by _KINDS
        self._before = [0] * len(_KINDS)
        self._warm = _WARM  # warm-up steps still to skip

    def begin_step(self) -> None:
        """Store the total times spent on each kind of work up to now; `end_step` subtracts them from those at the
        step's end.
        """
        main.count_time(main.kind)
        self._before = [main.spent_ns[kind] for kind in _KINDS]
        links.in_step = bool(self.neighbours)

    def end_step(self, waited_s: float) -> None:
        """Record the times spent on each kind of work during the step; `waited_s`, the wait for its data before it
        began, counts as data time. The first steps of a process, which compile and allocate, are skipped.
        """
        main.count_time(main.kind)
        links.in_step = False
        if self._warm:
            self._warm -= 1
            links.clear()
            return
        spent = [main.spent_ns[kind] - before for kind, before in zip(_KINDS, self._before, strict=True)]
        spent[0] += int(waited_s * 1e9)
        self._steps_ns.append(spent)

    @property
    def is_due(self) -> bool:
        """True if a window is full, which is after the same step on all processes."""
        return len(self._steps_ns) >= STEPS

    def take_window(self) -> list[int]:
        """Return the times of the last STEPS steps in nanoseconds, in the order of COLUMNS, and start a new window.
        Work and waits are the mean of the faster half of the steps; send and arrival times of messages are sums over
        the steps.

        because: a busy machine delays steps and never speeds one up
        """
        ends = [number for peer in self.neighbours for number in links.pop_times(peer, STEPS)]
        half = STEPS // 2
        quick = [sum(sorted(values)[:half]) // half for values in zip(*self._steps_ns, strict=True)]
        self._steps_ns = []
        return [*quick, *ends, *([0] * (2 * NUM_ENDS - len(ends)))]


_ENDS = COLUMNS.index("sent")  # (sent, came) of the next rank along pp, then of the one before


class StragglerWatch:
    """Sends this process's step times and memory use to rank 0, where the ranks are compared to find slow ones."""

    def __init__(
        self, layout: Layout, rank: int, hosts: Sequence[str], stage_keys: Sequence[object], memory: Memory,
        *, on_host: bool,
    ) -> None:  # fmt: skip
        """Create the watch of this rank. `hosts` has each rank's host name, on rank 0 only.

        `stage_keys` has a key per pp rank; pp ranks with equal keys do equal work. `on_host`: work, waits and messages
        are timed on the host, because the run has no accelerator.
        """
        self.layout, self.hosts, self.on_host = layout, hosts, on_host
        self.is_rank_0, self.memory, self.work = rank == 0, memory, WorkTimes()
        self.work.neighbours = neighbours(layout, rank) if on_host else ()
        # because: on a GPU, host times only cover launching kernels; the host runs ahead of its device, and waits for a
        # throttled device at the same place at which it waits for a peer
        groups = peer_groups(layout, stage_keys) if on_host else []
        self.rank_watches = [PeerGroup(group, OWN_WORK, MIN_EXCESS, MIN_EXCESS_S) for group in groups]
        self.pairs = neighbour_pairs(layout) if on_host else []
        self.link_watches = [
            PeerGroup(group, ["message"], MIN_LINK_EXCESS, MIN_LINK_EXCESS_S)
            for group in group_by_host(self.pairs, hosts)
            if self.pairs
        ]
        self._newest: NDArray[np.int64] | None = None
        self._reported: set[tuple[str, int]] = set()

    def numbers_to_send(self) -> list[int]:
        """Return this process's times (see COLUMNS) and memory use, to send to rank 0, if a window of steps is full;
        else []. All processes send after the same step.
        """
        return [*self.work.take_window(), self.memory.newest] if self.work.is_due else []

    def receive_rows(self, rows: NDArray[np.int64]) -> list[str]:
        """Compare the ranks on rank 0, and return a line of text for each rank or pair of ranks that became slow or
        recovered. `rows` has what `numbers_to_send` returned on each rank, one row per rank.
        """
        self._newest = rows
        self.memory.update_peaks(rows[:, len(COLUMNS)].tolist())
        times = (rows[:, : len(OWN_WORK)] / 1e9).tolist()
        for watch in self.rank_watches:
            watch.add([times[rank] for rank in watch.members])
        numbers = rows.tolist()
        for watch in self.link_watches:
            watch.add([[_round_trip_s(numbers, self.layout, *self.pairs[pair])] for pair in watch.members])
        slow = {("rank", rank): slowness for rank, slowness in _slow_members(self.rank_watches).items()}
        slow |= {("link", pair): slowness for pair, slowness in _slow_members(self.link_watches).items()}
        lines = [
            (rank_message if kind == "rank" else link_message)(self._member_text(kind, member), slowness)
            for (kind, member), slowness in slow.items() if (kind, member) not in self._reported
        ]  # fmt: skip
        for kind, member in sorted(self._reported - slow.keys()):
            lines.append(f"{self._member_text(kind, member)} {'keeps' if kind == 'rank' else 'keep'} pace again")
        self._reported = set(slow)
        return lines

    def facts(self) -> dict[str, Any]:
        """Return entries of a metrics row on the slowest rank and link and on the share of time spent waiting. Empty
        before the first comparison, and on ranks other than 0.
        """
        if self._newest is None:
            return {}
        rows, facts = self._newest, dict[str, Any]()
        excess = {m: float(by) for watch in self.rank_watches if len(watch.members) > 1
                  for m, by in zip(watch.members, watch.excess(), strict=True)}  # fmt: skip
        if excess:
            slowest = max(excess, key=lambda rank: excess[rank])
            facts |= {"straggler_slowest": slowest, "straggler_slowest_by": round(excess[slowest], 4)}
        if slow := _slow_members(self.rank_watches):
            rank = max(slow, key=lambda rank: slow[rank].by)
            slowness = slow[rank]
            facts |= {
                "straggler_rank": rank, "straggler_host": self._host_of(rank),
                "straggler_coordinate": self._coordinate_of(rank),
                "straggler_span": slowness.kind, "straggler_by": round(slowness.by, 4),
                "straggler_span_s": round(slowness.seconds, 6),
                "straggler_usual_s": round(slowness.usual_s, 6), "straggler_ranks": sorted(slow),
            }  # fmt: skip
        if slow_links := _slow_members(self.link_watches):
            member = max(slow_links, key=lambda link: slow_links[link].by)
            facts |= {
                "straggler_link": list(self.pairs[member]), "straggler_link_s": round(slow_links[member].seconds, 6),
                "straggler_link_usual_s": round(slow_links[member].usual_s, 6),
            }  # fmt: skip
        if self.on_host and (total := float(rows[:, : len(OWN_WORK) + len(WAITING)].sum())):
            messages, collectives = rows[:, len(OWN_WORK) : len(OWN_WORK) + len(WAITING)].sum(axis=0) / total
            facts["straggler_exposed"] = round(float(collectives), 4)
            facts |= {"straggler_bubble": round(float(messages), 4)} if self.layout.pp > 1 else {}
        return facts

    def _member_text(self, kind: str, member: int) -> str:
        """Return a rank, or the two ranks of a link, with hosts and coordinates as text. `kind` is "rank" or "link".
        """
        ranks = [member] if kind == "rank" else self.pairs[member]
        return " and ".join(rank_label(rank, self._host_of(rank), self._coordinate_of(rank)) for rank in ranks)

    def _host_of(self, rank: int) -> str:
        """Return the rank's host, or "" if hosts are unknown."""
        return self.hosts[rank] if self.hosts else ""

    def _coordinate_of(self, rank: int) -> dict[str, int]:
        """Return the rank's index on each axis of the layout that is cut."""
        at = vars(self.layout.coordinate(rank))
        return {axis: index for axis, index in at.items() if getattr(self.layout, axis) > 1}


def build_straggler_watch(
    config: RunConfig, model: ModelSettings, mesh: Mesh, memory: Memory, hosts: Sequence[str]
) -> StragglerWatch | None:
    """Build this rank's StragglerWatch; None for a run of a single process. `hosts` has each rank's host name, on rank
    0 only.
    """
    if mesh.world.size == 1:
        return None
    return StragglerWatch(
        mesh.layout, mesh.rank, hosts, stage_work_keys(config, model), memory, on_host=mesh.device_type == "cpu"
    )


def _slow_members(watches: Sequence[PeerGroup]) -> dict[int, Straggler]:
    """Return the slow ranks or links of several groups of equals, by their numbers."""
    return {member: slowness for watch in watches for member, slowness in watch.stragglers.items()}


def stage_work_keys(config: RunConfig, model: ModelSettings) -> list[object]:
    """Return a key per pp rank that describes the work of its pipeline stages: their layers, and whether they hold the
    embedding or the loss. Ranks with equal keys should take equally long.
    """
    stages_by_rank = [stages_of_rank(model, config.parallel, pp) for pp in range(config.parallel.pp)]
    return [
        (tuple(len(stage.layers) for stage in stages), pp if any(stage.first or stage.last for stage in stages) else -1)
        for pp, stages in enumerate(stages_by_rank)
    ]


def peer_groups(layout: Layout, stage_keys: Sequence[object]) -> list[list[int]]:
    """Group the ranks that do equal work, and return the rank numbers of each group. `stage_keys` has a key per pp
    rank; equal keys stand for equal work.
    """
    groups: dict[object, list[int]] = {}
    for rank in range(layout.world_size):
        groups.setdefault(stage_keys[layout.coordinate(rank).pp], []).append(rank)
    return list(groups.values())


def neighbours(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the next and the previous rank along the pipeline (pp) as seen from `rank`; with two stages only the other
    rank, without a pipeline ().
    """
    step, at = layout.world_size // layout.pp, layout.coordinate(rank).pp
    ends = [(at + 1) % layout.pp, (at - 1) % layout.pp][: min(layout.pp - 1, 2)]
    return tuple(rank + (end - at) * step for end in ends)


def neighbour_pairs(layout: Layout) -> list[tuple[int, int]]:
    """Return all pairs of ranks that exchange messages as neighbours in the pipeline, each pair once."""
    step = layout.world_size // layout.pp
    ring = layout.pp if layout.vp > 1 and layout.pp > 2 else layout.pp - 1
    return [(i * step + k, (i + 1) % layout.pp * step + k) for i in range(ring) for k in range(step)]


def group_by_host(pairs: Sequence[tuple[int, int]], hosts: Sequence[str]) -> list[list[int]]:
    """Return two lists of indices into `pairs`: of pairs of ranks on the same host, and of pairs on different hosts.
    `hosts` has each rank's host name.
    """
    within = [bool(hosts) and hosts[a] == hosts[b] for a, b in pairs]
    return [[index for index, is_same in enumerate(within) if is_same == same] for same in (True, False)]


def _round_trip_s(rows: Sequence[Sequence[int]], layout: Layout, first_rank: int, second_rank: int) -> float:
    """Return the mean seconds that a pipeline message from `first_rank` to `second_rank` and one back take together.
    They are computed from the send and arrival times in `rows`, a row per rank with the columns COLUMNS.

    Return NaN if either end did not record it in every step.
    """
    second_end = _ENDS if layout.pp == 2 else _ENDS + 2
    sent, received = rows[first_rank][_ENDS : _ENDS + 2]
    back_sent, back_received = rows[second_rank][second_end : second_end + 2]
    if not (sent and received and back_sent and back_received):
        return float("nan")
    return (back_received - sent + received - back_sent) / (STEPS * 1e9)
