"""The base class of pipeline schedules, the built-in schedules, and the lookup of a schedule by name. No torch.

Called by placement, parallel/pipeline and the planner. A schedule is a class here, in a file of this folder, or in a
plugin's `*_schedule.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import ClassVar

from lmtrain.config.settings_base import Choice, kinds
from lmtrain.schedules.table import Action, Kind, ScheduleTable


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule(Choice):
    """A pipeline schedule: which rank holds which stage, and the order of each rank's actions.

    In all methods `chunks` is the number of stages per rank, and `num_ranks` the number of pipeline ranks.
    """

    package: ClassVar[str] = "lmtrain.schedules"
    file_ending: ClassVar[str] = ""

    chunks: ClassVar[int] = 1  # default number of stages per rank
    rule: ClassVar[str] = "has one stage a rank"  # the condition of `allows`, for messages
    splits_backward: ClassVar[bool] = False  # True if I and W run as separate actions

    def allows(self, chunks: int) -> bool:
        """Return True if the schedule can run with this many stages per rank."""
        return chunks == self.chunks

    def ranks_of_stages(self, num_ranks: int, chunks: int) -> tuple[int, ...]:
        """Return the rank of each stage. The default deals stages round-robin: rank r holds r, r + p, r + 2p, ..."""
        return tuple(range(num_ranks)) * chunks

    @abstractmethod
    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        """Return the actions of a rank in execution order."""

    def table(self, num_ranks: int, chunks: int, num_microbatches: int) -> ScheduleTable:
        """Return the ordered actions (forwards and backwards) of all `num_ranks` pipeline ranks for one training step,
        checked for consistency. `chunks` is the number of stages per rank. Raise ValueError if the schedule does not
        allow that number.
        """
        if not self.allows(chunks):
            raise ValueError(f"The pipeline schedule {self.kind} cannot have {chunks} stages a rank: it {self.rule}.")
        rows = (tuple(self.row(rank, num_ranks, chunks, num_microbatches)) for rank in range(num_ranks))
        return ScheduleTable(self.ranks_of_stages(num_ranks, chunks), num_microbatches, tuple(rows))


class GPipe(PipelineSchedule):
    """GPipe, all forwards and then all backwards: simple, but the activations of every micro-batch are held at once."""

    kind: ClassVar[str] = "gpipe"

    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        return [Action(kind, rank, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(num_microbatches)]


def _alternate(forwards: Sequence[Action], ahead: int, backwards: Iterable[Sequence[Action]]) -> list[Action]:
    """Return `ahead` forwards, then a forward and a backward alternately, then the remaining backwards."""
    turns = ((*forwards[ahead + n : ahead + n + 1], *backward) for n, backward in enumerate(backwards))
    return [*forwards[:ahead], *chain.from_iterable(turns)]


class OneFOneB(PipelineSchedule):
    """The 1F1B schedule: forwards fill the pipeline, forwards and backwards alternate, backwards drain the pipeline.

    The bubble is as long as GPipe's, but a rank holds activations of at most as many micro-batches as there are ranks
    from it to the last.
    """

    kind: ClassVar[str] = "1f1b"

    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        forwards = [Action(Kind.FORWARD, rank, m) for m in range(num_microbatches)]
        return _alternate(forwards, num_ranks - rank - 1, [self.backward(rank, m) for m in range(num_microbatches)])

    def backward(self, rank: int, m: int) -> list[Action]:
        """Return the actions that run after a forward in the steady phase: the backward of micro-batch `m`."""
        return [Action(Kind.BACKWARD, rank, m)]


class ZBH1(OneFOneB):
    """ZB-H1 (zero-bubble pipelining, handcrafted): 1F1B with backwards in halves and delayed weight halves.

    Rank r runs weight halves r micro-batches late, which fills the gap in which 1F1B waits for gradients. The bubble is
    (p - 1)(F + I - W); 1F1B's is (p - 1)(F + I + W). Every rank holds p micro-batches, as 1F1B's first rank does.
    """

    kind: ClassVar[str] = "zb_h1"
    splits_backward: ClassVar[bool] = True

    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        row = super().row(rank, num_ranks, chunks, num_microbatches)
        deferred_weights = range(max(num_microbatches - rank, 0), num_microbatches)
        return [*row, *(Action(Kind.WEIGHT, rank, m) for m in deferred_weights)]

    def backward(self, rank: int, m: int) -> list[Action]:
        deferred = [Action(Kind.WEIGHT, rank, m - rank)] if m >= rank else []
        return [Action(Kind.INPUT, rank, m), *deferred]


class Interleaved(PipelineSchedule):
    """Interleaved 1F1B (Megatron-LM 2021): each rank holds several stages, and the bubble shrinks by their number.

    Micro-batches run in groups of at least `num_ranks`: a rank runs a group through its first stage, then through its
    second, and so on. If the ranks do not divide the micro-batches, the first groups are larger by one.
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
        # because: the first backward can start only after its micro-batch has passed all ranks once for each chunk
        ahead = 2 * (num_ranks - rank - 1) + (chunks - 1) * firsts[1]
        return _alternate(forwards, ahead, ([backward] for backward in backwards))


class _RowBuilder:
    """A builder of a rank's list of actions; each kind of action takes the micro-batches of a stage in order."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.stages = (rank, 2 * num_ranks - 1 - rank)
        self.count = {(kind, chunk): 0 for kind in Kind for chunk in (0, 1)}
        self.actions: list[Action] = []

    def add(self, chunk: int, *kinds: Kind) -> None:
        """Append an action of each of `kinds` to the rank's list, in this order. `chunk` is the index (0 or 1) of the
        stage among the rank's stages; each action is for the next micro-batch that had no action of this kind in that
        stage.
        """
        for kind in kinds:
            self.actions.append(Action(kind, self.stages[chunk], self.count[kind, chunk]))
            self.count[kind, chunk] += 1


class ZBV(PipelineSchedule):
    """ZB-V (zero-bubble pipelining): two stages per rank, folded as a V, with backwards in halves.

    A micro-batch goes down the ranks and up again, so that its first gradient starts on the first rank, which would
    otherwise wait longest for a gradient. If F, I and W take equal time and there are at least 2p micro-batches, no
    rank waits between its first and last action. A rank holds the activations of 2p half-size stages, as many as 1F1B's
    first rank.
    """

    kind: ClassVar[str] = "zb_v"
    chunks: ClassVar[int] = 2
    rule: ClassVar[str] = "has exactly two stages a rank"
    splits_backward: ClassVar[bool] = True

    def ranks_of_stages(self, num_ranks: int, chunks: int) -> tuple[int, ...]:
        """Return the ranks down and up again as a V: the first rank holds the first and the last stage."""
        return (*range(num_ranks), *reversed(range(num_ranks)))

    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        f, i, w = Kind.FORWARD, Kind.INPUT, Kind.WEIGHT
        row, num_after = _RowBuilder(rank, num_ranks), num_ranks - rank
        count = row.count
        # the pattern's minimum; actions of micro-batches beyond `num_microbatches` are dropped at the end
        total = max(num_microbatches, 2 * num_ranks - 1)
        for _ in range(2 * num_after - 1):  # fill: forwards until the first micro-batch comes back up
            row.add(0, f)
        for _ in range(rank):
            row.add(1, f)
            row.add(0, f)
        for _ in range(num_after):
            row.add(1, f, i, w)
        while count[f, 1] < count[f, 0] or count[f, 0] < total:  # steady: a stage alternates forward and backward
            if count[f, 0] < total:
                row.add(0, f)
            row.add(0, i, w)
            row.add(1, f, i, w)
        for _ in range(rank):  # input halves first, because the previous ranks wait for these gradients
            row.add(0, i)
            row.add(1, i)
        for _ in range(num_after):
            row.add(0, i, w)
        for chunk in (1, 0):
            while count[w, chunk] < count[i, chunk]:
                row.add(chunk, w)
        return [action for action in row.actions if action.microbatch < num_microbatches]


def schedule_named(name: str) -> PipelineSchedule:
    """Return an instance of the pipeline schedule with this name, such as "1f1b" or "interleaved"; raise KeyError if
    there is none.
    """
    schedule = kinds(PipelineSchedule)[name]()
    assert isinstance(schedule, PipelineSchedule)
    return schedule
