"""Detection of stragglers: each process reports its own work times, and rank 0 names slow ranks and common waits.

Each process also reports its memory use, which rank 0 passes on.

Called by requests, which send the numbers with the vote on a stop, so that no collective is added; by the costs of a
step, which mark its begin and end; and by the records, whose rows get `facts`. Peers are ranks that do the same work:
those of a stage of the pipeline, and of stages with equally many layers if neither is the first or the last.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.layout import Layout
from lmtrain.models.model_settings import ModelSettings
from lmtrain.observe.measure import phases
from lmtrain.observe.measure.memory import Memory
from lmtrain.observe.measure.phases import MESSAGES, PHASES, main
from lmtrain.observe.stragglers.detection import (
    MIN_EXCESS,
    MIN_EXCESS_S,
    MIN_LINK_EXCESS,
    MIN_LINK_EXCESS_S,
    PeerGroup,
    link_message,
    links,
    rank_label,
    rank_message,
)
from lmtrain.parallel.mesh import Mesh
from lmtrain.placement.places import stages_of_rank
from lmtrain.runtime.processes.process_group import gather_to_rank0
from lmtrain.train.config import RunConfig

OWN_WORK = ("data", "forward", "backward", "optimizer")  # work that only this process's own slowness makes longer
WAITING = ("messages", "collectives")
NUM_ENDS = 2  # links of a rank: to the next and to the previous rank along pp
COLUMNS = (*OWN_WORK, *WAITING, *(("sent", "came") * NUM_ENDS))
STEPS = 4  # steps per window
_WARM = 2  # because: the first steps of a process compile, fill caches and allocate memory
_KINDS = (*map(PHASES.index, OWN_WORK), MESSAGES, PHASES.index("collective"))


class WorkTimes:
    """The times of this process's own work and waits, collected in windows of STEPS steps."""

    def __init__(self) -> None:
        self.neighbours: tuple[int, ...] = ()  # neighbour ranks along pp, whose messages are timed
        self._steps_ns: list[list[int]] = []  # for each step of the window, nanoseconds by _KINDS
        self._before = [0] * len(_KINDS)
        self._warm = _WARM  # warm-up steps still to skip

    def begin_step(self) -> None:
        """Mark the begin of a step."""
        main.count_time(main.kind)
        self._before = [main.spent_ns[kind] for kind in _KINDS]
        links.in_step = bool(self.neighbours)

    def end_step(self, waited_s: float) -> None:
        """Record the end of a step, which waited `waited_s` for its data before it began."""
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
        """Return and clear the window, by COLUMNS: mean nanoseconds of the faster half of steps, and summed link times.

        Link times are summed over STEPS steps.

        because: a busy machine delays steps and never speeds one up
        """
        ends = [number for peer in self.neighbours for number in links.pop_times(peer, STEPS)]
        half = STEPS // 2
        quick = [sum(sorted(values)[:half]) // half for values in zip(*self._steps_ns, strict=True)]
        self._steps_ns = []
        return [*quick, *ends, *([0] * (2 * NUM_ENDS - len(ends)))]


_ENDS = COLUMNS.index("sent")  # (sent, came) of the next rank along pp, then of the one before


class StragglerWatch:
    """Sends this process's times and memory to rank 0, and on rank 0 compares all ranks."""

    def __init__(
        self, layout: Layout, rank: int, hosts: Sequence[str], kinds_of_stage: Sequence[object], memory: Memory,
        *, on_host: bool,
    ) -> None:  # fmt: skip
        """Prepare on each rank; `hosts` has each rank's host, on rank 0 only.

        `kinds_of_stage` has equal entries for pp ranks with equal stages. `on_host`: work, waits and messages are timed
        on the host, because the run has no accelerator.
        """
        self.layout, self.hosts, self.on_host = layout, hosts, on_host
        self.is_rank_0, self.memory, self.work = rank == 0, memory, WorkTimes()
        self.work.neighbours = neighbours(layout, rank) if on_host else ()
        # because: on a GPU, host times only cover launching kernels; the host runs ahead of its device, and waits for a
        # throttled device at the same place at which it waits for a peer
        groups = peer_groups(layout, kinds_of_stage) if on_host else []
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
        """Return the numbers to send to rank 0, on all processes after the same step; else an empty list."""
        return [*self.work.take_window(), self.memory.newest] if self.work.is_due else []

    def receive_rows(self, rows: NDArray[np.int64]) -> list[str]:
        """Take the numbers of each process, a row per rank, on rank 0.

        Return lines on the ranks and links that became slow or recovered.
        """
        self._newest = rows
        self.memory.update_peaks(rows[:, len(COLUMNS)].tolist())
        times = (rows[:, : len(OWN_WORK)] / 1e9).tolist()
        for watch in self.rank_watches:
            watch.add([times[rank] for rank in watch.members])
        numbers = rows.tolist()
        for watch in self.link_watches:
            watch.add([[_round_trip_s(numbers, self.layout, *self.pairs[pair])] for pair in watch.members])
        slow_ranks = {("rank", key): slow for peers in self.rank_watches for key, slow in peers.stragglers.items()}
        slow_links = {("link", key): slow for peers in self.link_watches for key, slow in peers.stragglers.items()}
        lines = []
        for key, slow in (slow_ranks | slow_links).items():
            if key not in self._reported:
                words = rank_message(self._rank_text(key[1]), slow) if key[0] == "rank" else ""
                lines.append(words or link_message(" and ".join(map(self._rank_text, self.pairs[key[1]])), slow))
        for kind, member in sorted(self._reported - slow_ranks.keys() - slow_links.keys()):
            ends = [member] if kind == "rank" else self.pairs[member]
            lines.append(
                f"{' and '.join(map(self._rank_text, ends))} {'keeps' if kind == 'rank' else 'keep'} pace again"
            )
        self._reported = slow_ranks.keys() | slow_links.keys()
        return lines

    def facts(self) -> dict[str, Any]:
        """Return straggler values for a row of metrics; empty before the first numbers and on ranks other than 0."""
        if self._newest is None:
            return {}
        rows, facts = self._newest, dict[str, Any]()
        slow = {member: slowness for watch in self.rank_watches for member, slowness in watch.stragglers.items()}
        excess = {m: float(by) for watch in self.rank_watches if len(watch.members) > 1
                  for m, by in zip(watch.members, watch.excess(), strict=True)}  # fmt: skip
        if excess:
            slowest = max(excess, key=lambda rank: excess[rank])
            facts |= {"straggler_slowest": slowest, "straggler_slowest_by": round(excess[slowest], 4)}
        if slow:
            rank = max(slow, key=lambda rank: slow[rank].by)
            slowness = slow[rank]
            facts |= {
                "straggler_rank": rank, "straggler_host": self._host_of(rank),
                "straggler_coordinate": self._coordinate_of(rank),
                "straggler_span": slowness.kind, "straggler_by": round(slowness.by, 4),
                "straggler_span_s": round(slowness.seconds, 6),
                "straggler_usual_s": round(slowness.usual_s, 6), "straggler_ranks": sorted(slow),
            }  # fmt: skip
        if slow_links := {member: slow for watch in self.link_watches for member, slow in watch.stragglers.items()}:
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

    def _rank_text(self, rank: int) -> str:
        """Return a rank as text, with its host and coordinate."""
        return rank_label(rank, self._host_of(rank), self._coordinate_of(rank))

    def _host_of(self, rank: int) -> str:
        """Return the rank's host, or "" if hosts are unknown."""
        return self.hosts[rank] if self.hosts else ""

    def _coordinate_of(self, rank: int) -> dict[str, int]:
        """Return the rank's index on each axis of the layout that is cut."""
        at = vars(self.layout.coordinate(rank))
        return {axis: index for axis, index in at.items() if getattr(self.layout, axis) > 1}


def build_straggler_watch(config: RunConfig, model: ModelSettings, mesh: Mesh, memory: Memory) -> StragglerWatch | None:
    """Build the StragglerWatch of a run; None for a single process. All ranks take part, in a gather of host names."""
    if mesh.world.size == 1:
        return None
    with phases.within("collective", "an agreement"):
        hosts = [name.decode(errors="replace") for name in gather_to_rank0(socket.gethostname().encode()[:64], 64)]
    return StragglerWatch(
        mesh.layout, mesh.rank, hosts, stage_kinds(config, model), memory, on_host=mesh.device_type == "cpu"
    )


def stage_kinds(config: RunConfig, model: ModelSettings) -> list[object]:
    """Return a key per pp rank; ranks with equal keys do equal work."""
    stages_by_rank = [stages_of_rank(model, config.parallel, pp) for pp in range(config.parallel.pp)]
    return [
        (tuple(len(stage.layers) for stage in stages), pp if any(stage.first or stage.last for stage in stages) else -1)
        for pp, stages in enumerate(stages_by_rank)
    ]


def peer_groups(layout: Layout, kinds_of_stage: Sequence[object]) -> list[list[int]]:
    """Return groups of ranks that do the same work; `kinds_of_stage` has a key per pp rank."""
    groups: dict[object, list[int]] = {}
    for rank in range(layout.world_size):
        groups.setdefault(kinds_of_stage[layout.coordinate(rank).pp], []).append(rank)
    return list(groups.values())


def neighbours(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the next and the previous rank along pp; with two stages, the other rank alone."""
    step, at = layout.world_size // layout.pp, layout.coordinate(rank).pp
    ends = [(at + 1) % layout.pp, (at - 1) % layout.pp][: min(layout.pp - 1, 2)]
    return tuple(rank + (end - at) * step for end in ends)


def neighbour_pairs(layout: Layout) -> list[tuple[int, int]]:
    """Return all pairs of ranks that send to each other between stages, each pair once."""
    step = layout.world_size // layout.pp
    ring = layout.pp if layout.vp > 1 and layout.pp > 2 else layout.pp - 1
    return [(i * step + k, (i + 1) % layout.pp * step + k) for i in range(ring) for k in range(step)]


def group_by_host(pairs: Sequence[tuple[int, int]], hosts: Sequence[str]) -> list[list[int]]:
    """Return the indices of pairs in two groups: pairs within a host, and pairs between hosts."""
    within = [bool(hosts) and hosts[a] == hosts[b] for a, b in pairs]
    return [[index for index, is_same in enumerate(within) if is_same == same] for same in (True, False)]


def _round_trip_s(rows: Sequence[Sequence[int]], layout: Layout, first: int, second: int) -> float:
    """Return mean seconds of a message from `first` to `second` plus a message back.

    Return NaN if either end did not record it in every step.
    """
    second_end = _ENDS if layout.pp == 2 else _ENDS + 2
    sent, received = rows[first][_ENDS : _ENDS + 2]
    back_sent, back_received = rows[second][second_end : second_end + 2]
    if not (sent and received and back_sent and back_received):
        return float("nan")
    return (back_received - sent + received - back_sent) / (STEPS * 1e9)
