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
from lmtrain.observe.stragglers.judge import (
    LEAST,
    LEAST_S,
    LINK_LEAST,
    LINK_LEAST_S,
    Watched,
    link_words,
    links,
    rank_words,
    who,
)
from lmtrain.parallel.mesh import Mesh
from lmtrain.placement.places import stages_of_rank
from lmtrain.runtime.processes.process_group import gather_to_rank0
from lmtrain.train.config import RunConfig

OWN = ("data", "forward", "backward", "optimizer")  # work that only this process's own slowness makes longer
WAITS = ("messages", "collectives")
NUM_ENDS = 2  # links of a rank: to the next and to the previous rank along pp
COLUMNS = (*OWN, *WAITS, *(("sent", "came") * NUM_ENDS))
STEPS = 4  # steps per window
_WARM = 2  # because: the first steps of a process compile, fill caches and allocate memory
_KINDS = (*map(PHASES.index, OWN), MESSAGES, PHASES.index("collective"))


class Work:
    def __init__(self) -> None:
        self.neighbours: tuple[int, ...] = ()  # neighbour ranks along pp, whose messages are timed
        self._seen_ns: list[list[int]] = []  # for each step of the window, nanoseconds by _KINDS
        self._before = [0] * len(_KINDS)
        self._warm = _WARM  # warm-up steps still to skip

    def begin_step(self) -> None:
        main.count_time(main.kind)
        self._before = [main.spent_ns[kind] for kind in _KINDS]
        links.open = bool(self.neighbours)

    def end_step(self, waited_s: float) -> None:
        """Record the end of a step, which waited `waited_s` for its data before it began."""
        main.count_time(main.kind)
        links.open = False
        if self._warm:
            self._warm -= 1
            links.clear()
            return
        seen = [main.spent_ns[kind] - was for kind, was in zip(_KINDS, self._before, strict=True)]
        seen[0] += int(waited_s * 1e9)
        self._seen_ns.append(seen)

    @property
    def is_due(self) -> bool:
        """True if a window is full, which is after the same step on all processes."""
        return len(self._seen_ns) >= STEPS

    def take(self) -> list[int]:
        """Return and clear the window, by COLUMNS: mean nanoseconds of the faster half of steps, and summed link times.

        Link times are summed over STEPS steps.

        because: a busy machine delays steps and never speeds one up
        """
        ends = [number for peer in self.neighbours for number in links.take(peer, STEPS)]
        half = STEPS // 2
        quick = [sum(sorted(values)[:half]) // half for values in zip(*self._seen_ns, strict=True)]
        self._seen_ns = []
        return [*quick, *ends, *([0] * (2 * NUM_ENDS - len(ends)))]


_ENDS = COLUMNS.index("sent")  # (sent, came) of the next rank along pp, then of the one before


class Pace:
    def __init__(
        self, layout: Layout, rank: int, hosts: Sequence[str], kinds_of_stage: Sequence[object], memory: Memory,
        *, on_host: bool,
    ) -> None:  # fmt: skip
        """Prepare on each rank; `hosts` is by rank and given on rank 0 alone.

        `kinds_of_stage` has equal entries for pp ranks with equal stages. `on_host`: work, waits and messages are timed
        on the host, because the run has no accelerator.
        """
        self.layout, self.hosts, self.on_host = layout, hosts, on_host
        self.leads, self.memory, self.work = rank == 0, memory, Work()
        self.work.neighbours = neighbours(layout, rank) if on_host else ()
        # because: on a GPU, host times only cover launching kernels; the host runs ahead of its device, and waits for a
        # throttled device at the same place at which it waits for a peer
        judged = peers_of(layout, kinds_of_stage) if on_host else []
        self.ranks = [Watched(some, OWN, LEAST, LEAST_S) for some in judged]
        self.pairs = pairs_of(layout) if on_host else []
        self.links = [
            Watched(some, ["message"], LINK_LEAST, LINK_LEAST_S) for some in alike(self.pairs, hosts) if self.pairs
        ]
        self._newest: NDArray[np.int64] | None = None
        self._named: set[tuple[str, int]] = set()

    def tell(self) -> list[int]:
        """Return the numbers to send to rank 0, on all processes after the same step; else an empty list."""
        return [*self.work.take(), self.memory.newest] if self.work.is_due else []

    def hear(self, rows: NDArray[np.int64]) -> list[str]:
        """Take a row of each process, on rank 0, and return lines on ranks and links that became slow or recovered."""
        self._newest = rows
        self.memory.hear_all(rows[:, len(COLUMNS)].tolist())
        times = (rows[:, : len(OWN)] / 1e9).tolist()
        for some in self.ranks:
            some.add([times[rank] for rank in some.members])
        numbers = rows.tolist()
        for some in self.links:
            some.add([[_there_and_back(numbers, self.layout, *self.pairs[pair])] for pair in some.members])
        slow_ranks = {("rank", member): slow for some in self.ranks for member, slow in some.slow.items()}
        slow_links = {("link", member): slow for some in self.links for member, slow in some.slow.items()}
        lines = []
        for key, slow in (slow_ranks | slow_links).items():
            if key not in self._named:
                words = rank_words(self._who(key[1]), slow) if key[0] == "rank" else ""
                lines.append(words or link_words(" and ".join(map(self._who, self.pairs[key[1]])), slow))
        for kind, member in sorted(self._named - slow_ranks.keys() - slow_links.keys()):
            ends = [member] if kind == "rank" else self.pairs[member]
            lines.append(f"{' and '.join(map(self._who, ends))} {'keeps' if kind == 'rank' else 'keep'} pace again")
        self._named = slow_ranks.keys() | slow_links.keys()
        return lines

    def facts(self) -> dict[str, Any]:
        """Return straggler values for a row of metrics; empty before the first numbers and on ranks other than 0."""
        if self._newest is None:
            return {}
        rows, found = self._newest, dict[str, Any]()
        slow = {member: one for some in self.ranks for member, one in some.slow.items()}
        excess = {m: float(by) for some in self.ranks if len(some.members) > 1
                  for m, by in zip(some.members, some.excess(), strict=True)}  # fmt: skip
        if excess:
            slowest = max(excess, key=lambda rank: excess[rank])
            found |= {"straggler_slowest": slowest, "straggler_slowest_by": round(excess[slowest], 4)}
        if slow:
            rank = max(slow, key=lambda rank: slow[rank].by)
            one = slow[rank]
            found |= {
                "straggler_rank": rank, "straggler_host": self._host(rank), "straggler_coordinate": self._place(rank),
                "straggler_span": one.kind, "straggler_by": round(one.by, 4), "straggler_span_s": round(one.seconds, 6),
                "straggler_usual_s": round(one.usual_s, 6), "straggler_ranks": sorted(slow),
            }  # fmt: skip
        if slow_links := {member: one for some in self.links for member, one in some.slow.items()}:
            member = max(slow_links, key=lambda link: slow_links[link].by)
            found |= {
                "straggler_link": list(self.pairs[member]), "straggler_link_s": round(slow_links[member].seconds, 6),
                "straggler_link_usual_s": round(slow_links[member].usual_s, 6),
            }  # fmt: skip
        if self.on_host and (total := float(rows[:, : len(OWN) + len(WAITS)].sum())):
            messages, collectives = rows[:, len(OWN) : len(OWN) + len(WAITS)].sum(axis=0) / total
            found["straggler_exposed"] = round(float(collectives), 4)
            found |= {"straggler_bubble": round(float(messages), 4)} if self.layout.pp > 1 else {}
        return found

    def _who(self, rank: int) -> str:
        return who(rank, self._host(rank), self._place(rank))

    def _host(self, rank: int) -> str:
        return self.hosts[rank] if self.hosts else ""

    def _place(self, rank: int) -> dict[str, int]:
        at = vars(self.layout.coordinate(rank))
        return {axis: index for axis, index in at.items() if getattr(self.layout, axis) > 1}


def pace_of(config: RunConfig, model: ModelSettings, mesh: Mesh, memory: Memory) -> Pace | None:
    """Build the Pace of a run, or return None for a single process. All ranks take part, in a gather of host names."""
    if mesh.world.size == 1:
        return None
    with phases.within("collective", "an agreement"):
        hosts = [name.decode(errors="replace") for name in gather_to_rank0(socket.gethostname().encode()[:64], 64)]
    return Pace(
        mesh.layout, mesh.rank, hosts, kinds_of_stages(config, model), memory, on_host=mesh.device_type == "cpu"
    )


def kinds_of_stages(config: RunConfig, model: ModelSettings) -> list[object]:
    """Return a key per pp rank; equal keys mean equal work."""
    held = [stages_of_rank(model, config.parallel, pp) for pp in range(config.parallel.pp)]
    return [
        (tuple(len(stage.layers) for stage in some), pp if any(stage.first or stage.last for stage in some) else -1)
        for pp, some in enumerate(held)
    ]


def peers_of(layout: Layout, kinds_of_stage: Sequence[object]) -> list[list[int]]:
    """Return groups of ranks that do the same work."""
    found: dict[object, list[int]] = {}
    for rank in range(layout.world_size):
        found.setdefault(kinds_of_stage[layout.coordinate(rank).pp], []).append(rank)
    return list(found.values())


def neighbours(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the next and the previous rank along pp; with two stages, the other rank alone."""
    step, at = layout.world_size // layout.pp, layout.coordinate(rank).pp
    ends = [(at + 1) % layout.pp, (at - 1) % layout.pp][: min(layout.pp - 1, 2)]
    return tuple(rank + (end - at) * step for end in ends)


def pairs_of(layout: Layout) -> list[tuple[int, int]]:
    """Return all pairs of ranks that send to each other between stages, each pair once."""
    step = layout.world_size // layout.pp
    ring = layout.pp if layout.vp > 1 and layout.pp > 2 else layout.pp - 1
    return [(i * step + k, (i + 1) % layout.pp * step + k) for i in range(ring) for k in range(step)]


def alike(pairs: Sequence[tuple[int, int]], hosts: Sequence[str]) -> list[list[int]]:
    """Return pair indices in two groups: pairs within a host, and pairs between hosts."""
    within = [bool(hosts) and hosts[a] == hosts[b] for a, b in pairs]
    return [[at for at, inside in enumerate(within) if inside == wanted] for wanted in (True, False)]


def _there_and_back(rows: Sequence[Sequence[int]], layout: Layout, first: int, second: int) -> float:
    """Return mean seconds of a message there plus a message back; NaN if either end did not record it in every step."""
    other = _ENDS if layout.pp == 2 else _ENDS + 2
    sent, came = rows[first][_ENDS : _ENDS + 2]
    back_sent, back_came = rows[second][other : other + 2]
    if not (sent and came and back_sent and back_came):
        return float("nan")
    return (back_came - sent + came - back_sent) / (STEPS * 1e9)
