"""How the processes of a run agree: all hear what each has said, and a phase succeeds on all of them or on none.

Called wherever one process must not go on without the others, once they have met; until then the meeting itself says
who does not come. Torch-free: it knows processes as numbers; `Peers` are handed in, and know by what way they talk.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from lmtrain.errors import LmtrainError, error_from_peer

_TEXT = "<128q"  # a message of at most 1 KiB, told as numbers


class Peers(Protocol):
    """The processes of one run, seen from one of them. `gather` is called by all, in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Everybody's numbers, by rank; each hands in equally many."""


@dataclass(frozen=True)
class Alone:
    """A run with one process."""

    rank: int = 0
    num_ranks: int = 1

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers)]


ALONE = Alone()


def are_alike(peers: Peers, number: int) -> bool:
    """Return whether all processes have the same number: on each of them the same answer."""
    return all(each == number for (each,) in peers.gather([number]))


class Agreement:
    """What one process tells in a phase of the work, zeros unless set, and what all have told once it is over."""

    def __init__(self, num_numbers: int) -> None:
        self.give: tuple[int, ...] = (0,) * num_numbers
        self.all: list[list[int]] = []


@contextmanager
def together(peers: Peers, num_numbers: int = 0) -> Iterator[Agreement]:
    """Run a phase that succeeds on every process or fails on every process, and exchange numbers at its end.

    A process that fails raises its own error; the others raise the error of the first failed rank, with its exit code.
    """
    agreement, error = Agreement(num_numbers), None
    try:
        yield agreement
    except Exception as found:
        error = found
    code = 0 if error is None else getattr(error, "exit_code", LmtrainError.exit_code)
    rows = peers.gather([code, *(agreement.give if error is None else [0] * num_numbers)])
    failed = [rank for rank, (code, *_) in enumerate(rows) if code]
    if failed:
        said = str(error) if error is None or isinstance(error, LmtrainError) else f"{type(error).__name__}: {error}"
        size = struct.calcsize(_TEXT)
        texts = peers.gather(struct.unpack(_TEXT, said.encode()[:size].ljust(size, b"\0")))
        if error is not None:
            raise error
        rank = failed[0]
        text = struct.pack(_TEXT, *texts[rank]).rstrip(b"\0").decode(errors="ignore")
        raise error_from_peer(rows[rank][0], f"rank {rank} of {peers.num_ranks}: {text}")
    agreement.all = [row[1:] for row in rows]
