"""How the processes of a run save one checkpoint together. Torch-free; knows processes as numbers, never a mesh.

Called by commit. All that processes tell each other while saving is a few integers, through `Peers`, which whoever
starts the run hands in; what each has written lies in a part manifest beside its files, for the one that commits.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lmtrain.checkpoint.disk.boxes import Box
from lmtrain.checkpoint.disk.format import MAX_FILE_BYTES, FileEntry, PieceEntry
from lmtrain.checkpoint.disk.tensor_file import PieceSpec
from lmtrain.errors import CheckpointError, LmtrainError, passed_on
from lmtrain.runtime.files.files import parse_json, read_bytes


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
_TEXT = "<128q"  # a message of at most 1 KiB, told as numbers


class Agreement:
    """What one process tells in a phase of the work, zeros unless set, and what all have told once it is over."""

    def __init__(self, num_numbers: int) -> None:
        self.give: tuple[int, ...] = (0,) * num_numbers
        self.all: list[list[int]] = []


@contextmanager
def together(peers: Peers, num_numbers: int = 0) -> Iterator[Agreement]:
    """A phase that succeeds on every process or fails on every process, and the numbers exchanged at its end.

    Whoever fails raises its own error; the others raise what the first who failed has to say, with its exit code.
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
        texts = peers.gather(_to_numbers(_words(error)))
        if error is not None:
            raise error
        rank = failed[0]
        raise passed_on(rows[rank][0], f"rank {rank} of {peers.num_ranks}: {_to_text(texts[rank])}")
    agreement.all = [row[1:] for row in rows]


def _words(error: Exception | None) -> str:
    return str(error) if error is None or isinstance(error, LmtrainError) else f"{type(error).__name__}: {error}"


def _to_numbers(text: str) -> list[int]:
    return list(struct.unpack(_TEXT, text.encode()[: struct.calcsize(_TEXT)].ljust(struct.calcsize(_TEXT), b"\0")))


def _to_text(numbers: Sequence[int]) -> str:
    return struct.pack(_TEXT, *numbers).rstrip(b"\0").decode(errors="ignore")


@dataclass(frozen=True)
class RankRecord:
    """What one process has written."""

    files: Mapping[str, FileEntry]
    pieces: Sequence[tuple[PieceSpec, PieceEntry]]


def part_file(rank: int) -> str:
    return f"rank_{rank:05d}.part.json"


def encode_part(record: RankRecord) -> bytes:
    files = {name: [entry.size, entry.root] for name, entry in record.files.items()}
    pieces = [[s.name, s.dtype, s.global_shape, p.file, p.key, p.box.offset, p.box.shape] for s, p in record.pieces]
    return json.dumps({"files": files, "pieces": pieces}).encode()


def read_part(path: Path) -> RankRecord:
    """A part manifest that another process of this run has just written."""
    value: Any = parse_json(read_bytes(path, MAX_FILE_BYTES, follow_links=False), path)
    try:
        files = {name: FileEntry(size, root) for name, (size, root) in value["files"].items()}
        pieces = []
        for name, dtype, shape, file, key, offset, extent in value["pieces"]:
            box = Box(tuple(offset), tuple(extent))
            pieces.append((PieceSpec(name, dtype, tuple(shape), box), PieceEntry(file, key, box)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not what a process of this run writes ({error}). Save again.") from error
    return RankRecord(files, pieces)
