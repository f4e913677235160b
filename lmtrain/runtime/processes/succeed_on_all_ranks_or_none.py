"""Agreement between the ranks of a run: they exchange numbers, and a phase succeeds on all of them or on none.

Called wherever a rank must not go on without the others, after the rendezvous; before it, rendezvous.py reports missing
ranks. Torch-free: `Peers` are passed in and implement the communication.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from lmtrain.errors import LmtrainError, error_from_peer

_MESSAGE_FORMAT = "<128q"  # an error message of at most 1 KiB, packed into integers so that `gather` can send it


class Peers(Protocol):
    """The ranks of a run, as one rank sees them: its number, their count, and how it exchanges numbers with all of
    them.
    """

    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return every rank's numbers, by rank.

        Collective: all ranks call it, in the same order and with equally many numbers.
        """


@dataclass(frozen=True)
class SingleProcess:
    """The peers of a run with a single process."""

    rank: int = 0
    num_ranks: int = 1

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers)]


SINGLE_PROCESS = SingleProcess()


def all_equal(peers: Peers, number: int) -> bool:
    """Return whether all ranks pass the same number; collective, and the result is the same on all ranks."""
    return all(each == number for (each,) in peers.gather([number]))


class Agreement:
    """The integers that ranks exchange at the end of a `collective_phase`: each rank sets its own and receives those of
    all ranks.
    """

    def __init__(self, num_numbers: int) -> None:
        self.own_numbers: tuple[int, ...] = (0,) * num_numbers  # what this rank contributes; set within the phase
        self.all_numbers: list[list[int]] = []  # every rank's numbers, by rank; filled when the phase is over


@contextmanager
def collective_phase(peers: Peers, num_numbers: int = 0) -> Iterator[Agreement]:
    """Run a `with` block that succeeds on every rank or raises on every rank, and exchange `num_numbers` integers of
    each rank at its end. In the block a rank sets `own_numbers` of the yielded Agreement; after the block `all_numbers`
    holds those of all ranks.

    Collective at the end of the block. A rank whose block fails raises its own error; the others raise the error of the
    first failed rank, with its exit code.
    """
    agreement, error = Agreement(num_numbers), None
    try:
        yield agreement
    except Exception as caught:
        error = caught
    code = 0 if error is None else getattr(error, "exit_code", LmtrainError.exit_code)
    rows = peers.gather([code, *(agreement.own_numbers if error is None else [0] * num_numbers)])
    failed = [rank for rank, (code, *_) in enumerate(rows) if code]
    if failed:
        own_text = str(error) if isinstance(error, LmtrainError | None) else f"{type(error).__name__}: {error}"
        size = struct.calcsize(_MESSAGE_FORMAT)
        encoded_texts = peers.gather(struct.unpack(_MESSAGE_FORMAT, own_text.encode()[:size].ljust(size, b"\0")))
        if error is not None:
            raise error
        rank = failed[0]
        failure = struct.pack(_MESSAGE_FORMAT, *encoded_texts[rank]).rstrip(b"\0").decode(errors="ignore")
        raise error_from_peer(rows[rank][0], f"rank {rank} of {peers.num_ranks}: {failure}")
    agreement.all_numbers = [row[1:] for row in rows]
