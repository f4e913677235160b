"""A pipeline schedule as a table: the actions of each rank, in order. No torch, no clock.

Called by the schedules (which build tables), by parallel/pipeline (which runs them), by the simulator and the planner.
A table is checked when it is built: each action occurs once, on the rank that holds its stage, in an order that cannot
deadlock.

    F forward        needs F of the previous stage
    B backward       needs its own F and the next stage's gradient; computes the gradients of input and weights
    I input          the half of B that the previous stage waits for
    W weight         the other half of B, which may run at any later time
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kind of an action; see the module docstring."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


class Action(NamedTuple):
    """A forward or backward (or half of it) of a stage on a micro-batch."""

    kind: Kind
    stage: int  # index among all stages, virtual stages included; stage 0 holds the embedding
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class ScheduleTable:
    """The checked actions of a schedule."""

    rank_of: tuple[int, ...]  # stage -> the rank that holds it
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]  # per rank, in execution order

    def __post_init__(self) -> None:
        """Raise ValueError unless the table has each action of every stage and micro-batch exactly once, on the rank
        that holds the stage, in an order that cannot deadlock.
        """
        actual = Counter(action for actions in self.actions for action in actions)
        halves = any(action.kind is Kind.INPUT for action in actual)
        kinds = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT) if halves else (Kind.FORWARD, Kind.BACKWARD)
        expected = Counter(
            Action(kind, stage, microbatch)
            for kind in kinds for stage in range(self.num_stages) for microbatch in range(self.num_microbatches)
        )  # fmt: skip
        if actual != expected:
            wrong_actions = sorted(map(str, (actual - expected) + (expected - actual)))
            raise ValueError(
                f"The schedule must have each action once, but repeats or lacks {', '.join(wrong_actions[:5])}."
            )
        for rank, actions in enumerate(self.actions):
            for action in actions:
                if self.rank_of[action.stage] != rank:
                    raise ValueError(
                        f"The schedule has the action {action} on rank {rank}, which does not hold its stage."
                    )
        for _ in executable_order(self.actions, self.num_stages - 1):
            pass

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)


def prerequisites(action: Action, last_stage: int) -> list[Action]:
    """Return the actions on the same micro-batch that must end before `action` can run: for a forward, the previous
    stage's forward; for a backward (or its input half), the stage's own forward and the next stage's backward; for a
    weight half, its input half. `last_stage` is the number of the last stage.
    """
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind is Kind.FORWARD:
        return [Action(Kind.FORWARD, stage - 1, microbatch)] if stage else []
    if kind is Kind.WEIGHT:
        return [Action(Kind.INPUT, stage, microbatch)]
    from_next_stage = [Action(kind, stage + 1, microbatch)] if stage < last_stage else []
    return [Action(Kind.FORWARD, stage, microbatch), *from_next_stage]


def executable_order(actions: Sequence[Sequence[Action]], last_stage: int) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) for the actions of all ranks, in an order in which each action comes after its prerequisites
    and each rank keeps its own order. `actions[rank]` lists that rank's actions, and `last_stage` is the number of the
    last stage. Raise ValueError if the ranks would deadlock.
    """
    done: set[Action] = set()
    at, ready = [0] * len(actions), deque(range(len(actions)))
    waiting: dict[Action, list[int]] = {}  # action -> ranks that wait for it
    while ready:
        rank = ready.popleft()
        while at[rank] < len(actions[rank]):
            action = actions[rank][at[rank]]
            missing = next((needed for needed in prerequisites(action, last_stage) if needed not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done.add(action)
            at[rank] += 1
            ready.extend(waiting.pop(action, ()))
            yield rank, action
    stuck = [(rank, mine[i]) for rank, (mine, i) in enumerate(zip(actions, at, strict=True)) if mine[i:]]
    if stuck:
        waiting_ranks = ", ".join(f"rank {rank} at {action}" for rank, action in stuck)
        raise ValueError(f"The schedule deadlocks, since these ranks wait for each other: {waiting_ranks}.")
