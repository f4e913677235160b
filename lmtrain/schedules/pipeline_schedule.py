"""What a pipeline schedule is, those that there are, and how one is found by its word. No torch.

Called by placement, parallel/pipeline and the planner. A schedule is one class: here, in a file beside this one, or in
a plugin's `*_schedule.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import ClassVar

from lmtrain.config.base import Choice, kinds
from lmtrain.schedules.table import Action, Kind, Table


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule(Choice):
    room: ClassVar[str] = "lmtrain.schedules"
    files: ClassVar[str] = ""

    chunks: ClassVar[int] = 1  # stages a rank has, where one number has to be named
    rule: ClassVar[str] = "has one stage a rank"
    splits_backward: ClassVar[bool] = False  # runs I and W apart

    def allows(self, chunks: int) -> bool:
        return chunks == self.chunks

    def ranks_of_stages(self, num_ranks: int, chunks: int) -> tuple[int, ...]:
        """Stages dealt round and round: rank r holds r, r + p, r + 2p, ..."""
        return tuple(range(num_ranks)) * chunks

    @abstractmethod
    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        """Return the actions of a rank, in order."""

    def table(self, num_ranks: int, chunks: int, num_microbatches: int) -> Table:
        if not self.allows(chunks):
            raise ValueError(f"the schedule {self.kind} {self.rule}, not {chunks}")
        rows = (tuple(self.row(rank, num_ranks, chunks, num_microbatches)) for rank in range(num_ranks))
        return Table(self.ranks_of_stages(num_ranks, chunks), num_microbatches, tuple(rows))


class GPipe(PipelineSchedule):
    """All forwards, then all backwards. Simple, and every microbatch's activations are held at once."""

    kind: ClassVar[str] = "gpipe"

    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        return [Action(kind, rank, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(num_microbatches)]


def _in_turn(forwards: Sequence[Action], ahead: int, backwards: Iterable[Sequence[Action]]) -> list[Action]:
    """Return `ahead` forwards, then a backward after each further forward, then the backwards that are left."""
    turns = ((*forwards[ahead + n : ahead + n + 1], *backward) for n, backward in enumerate(backwards))
    return [*forwards[:ahead], *chain.from_iterable(turns)]


class OneFOneB(PipelineSchedule):
    """A few forwards to fill the pipeline, then a forward and a backward in turn, then the backwards that are left.

    As long a bubble as GPipe's, but a rank holds the activations of at most as many microbatches as ranks follow it.
    """

    kind: ClassVar[str] = "1f1b"

    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        forwards = [Action(Kind.FORWARD, rank, m) for m in range(num_microbatches)]
        return _in_turn(forwards, num_ranks - rank - 1, [self.backward(rank, m) for m in range(num_microbatches)])

    def backward(self, rank: int, m: int) -> list[Action]:
        """Return the actions of a micro-batch's backward."""
        return [Action(Kind.BACKWARD, rank, m)]


class ZBH1(OneFOneB):
    """ZB-H1 (zero-bubble pipelining, handcrafted): 1F1B with backwards in halves, the weights' halves put off.

    Rank r is r weight halves behind: that fills the gap in which 1F1B waits for gradients. The bubble is
    (p - 1)(F + I - W) where 1F1B's is (p - 1)(F + I + W), and every rank holds p microbatches, as 1F1B's first does.
    """

    kind: ClassVar[str] = "zb_h1"
    splits_backward: ClassVar[bool] = True

    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        row = super().row(rank, num_ranks, chunks, num_microbatches)
        behind = range(max(num_microbatches - rank, 0), num_microbatches)
        return [*row, *(Action(Kind.WEIGHT, rank, m) for m in behind)]

    def backward(self, rank: int, m: int) -> list[Action]:
        put_off = [Action(Kind.WEIGHT, rank, m - rank)] if m >= rank else []
        return [Action(Kind.INPUT, rank, m), *put_off]


class Interleaved(PipelineSchedule):
    """Interleaved 1F1B (Megatron-LM 2021): each rank holds several stages, and the bubble shrinks by their number.

    Microbatches pass in groups of at least as many as there are ranks: a rank runs a group through its first stage,
    then through its second, and so on. Where the ranks do not divide the microbatches, the first groups are larger by
    one.
    """

    kind: ClassVar[str] = "interleaved"
    chunks: ClassVar[int] = 2
    rule: ClassVar[str] = "needs two stages a rank or more"

    def allows(self, chunks: int) -> bool:
        return chunks > 1

    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        num_groups = max(num_microbatches // num_ranks, 1)
        size, larger = divmod(num_microbatches, num_groups)
        firsts = [group * size + min(group, larger) for group in range(num_groups + 1)]
        turns = [
            (chunk, m) for first, stop in pairwise(firsts) for chunk in range(chunks) for m in range(first, stop)
        ]
        forwards = [Action(Kind.FORWARD, chunk * num_ranks + rank, m) for chunk, m in turns]
        backwards = [Action(Kind.BACKWARD, (chunks - 1 - chunk) * num_ranks + rank, m) for chunk, m in turns]
        # because: the first backward comes after its microbatch has gone through all ranks once more for each chunk
        ahead = 2 * (num_ranks - rank - 1) + (chunks - 1) * firsts[1]
        return _in_turn(forwards, ahead, ([backward] for backward in backwards))


class _Row:
    """One rank's actions; each kind takes its stage's microbatches in order."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.stages = (rank, 2 * num_ranks - 1 - rank)
        self.count = {(kind, chunk): 0 for kind in Kind for chunk in (0, 1)}
        self.actions: list[Action] = []

    def add(self, chunk: int, *kinds: Kind) -> None:
        for kind in kinds:
            self.actions.append(Action(kind, self.stages[chunk], self.count[kind, chunk]))
            self.count[kind, chunk] += 1


class ZBV(PipelineSchedule):
    """ZB-V (zero-bubble pipelining): two stages a rank, folded as a V, backwards in halves.

    A microbatch goes down the ranks and up again, so that its first gradient starts on the first rank, where it is
    needed last. Where F, I and W take the same time and there are at least 2p microbatches, no rank waits between its
    first action and its last. A rank holds 2p half-size stages' activations: as many as 1F1B's first rank.
    """

    kind: ClassVar[str] = "zb_v"
    chunks: ClassVar[int] = 2
    rule: ClassVar[str] = "has exactly two stages a rank"
    splits_backward: ClassVar[bool] = True

    def ranks_of_stages(self, num_ranks: int, chunks: int) -> tuple[int, ...]:
        """Down and up again as a V: the first rank holds the first and the last."""
        return (*range(num_ranks), *reversed(range(num_ranks)))

    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        f, i, w = Kind.FORWARD, Kind.INPUT, Kind.WEIGHT
        row, after = _Row(rank, num_ranks), num_ranks - rank
        count = row.count
        # what the pattern needs; microbatches that are not there fall out
        total = max(num_microbatches, 2 * num_ranks - 1)
        for _ in range(2 * after - 1):  # down, until the first comes back up
            row.add(0, f)
        for _ in range(rank):
            row.add(1, f)
            row.add(0, f)
        for _ in range(after):
            row.add(1, f, i, w)
        while count[f, 1] < count[f, 0] or count[f, 0] < total:  # steady: each stage a forward and a backward in turn
            if count[f, 0] < total:
                row.add(0, f)
            row.add(0, i, w)
            row.add(1, f, i, w)
        for _ in range(rank):  # gradients first: the ranks before wait for them
            row.add(0, i)
            row.add(1, i)
        for _ in range(after):
            row.add(0, i, w)
        for chunk in (1, 0):
            while count[w, chunk] < count[i, chunk]:
                row.add(chunk, w)
        return [action for action in row.actions if action.microbatch < num_microbatches]


def schedule_named(word: str) -> PipelineSchedule:
    schedule = kinds(PipelineSchedule)[word]()
    assert isinstance(schedule, PipelineSchedule)
    return schedule
