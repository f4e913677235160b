"""A journal of an evaluation's answers on disk, batch by batch, so that a killed evaluation resumes without rescoring.

The head names the command that scores, so that another one does not take the file for its own. The scorer looks a batch
up before it scores it, and adds the answers afterwards. Every record carries a checksum and a hash of its question: the
model, how it computes, and the batch's tokens. So an answer is never used for another question, whatever differs
between two calls. Batches depend only on requests and options: after a resume the remaining batches, and so the digits
of the result, are the same as without the interruption.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST, MAX_MANIFEST_BYTES
from lmtrain.errors import OutputError
from lmtrain.runtime.files.atomic_files import open_output, read_bytes, read_range, storage_errors
from lmtrain.runtime.processes.fault_injection import fault_point

if TYPE_CHECKING:
    from lmtrain.eval.score_targets import TargetScores
    from lmtrain.eval.windows import Request

_MARK = b"lmtrain evaluation journal 2 of "
_HEAD_BYTES = len(_MARK) + 65  # then the command, 64 characters, and a newline
NO_COMMAND = "0" * 64
_FRAME = struct.Struct("<II")  # length of the record in bytes, and its CRC-32
_KEY_BYTES = 16
Report = Callable[[str], None]
Share = Callable[[bytes], bytes]  # returns rank 0's bytes on every rank


class Journal:
    """The journal of a scorer. Only rank 0 has a file; all ranks share its answers, and so skip the same batches."""

    def __init__(
        self, path: Path | None, report: Report = lambda text: None, share: Share = lambda data: data,
        command: str = NO_COMMAND,
    ) -> None:  # fmt: skip
        self._path, self._report, self._share, self._identity = path, report, share, b""
        self._head = _MARK + command.encode() + b"\n"
        self._fd = None if path is None else _open_locked(path)
        data = b"" if self._fd is None else read_range(self._fd, 0, os.fstat(self._fd).st_size)
        self._data = share(self._undamaged_part(data))
        self._records = _record_ranges(self._data)
        self._next = 0

    def set_identity(self, identity: str) -> None:
        """Set which model computes the following answers, and how: a text from `model_identity`, of which rank 0's
        counts. Collective: all ranks must call this.
        """
        # because: each node may have a copy of the model with times of its own, or another device, and a rank that
        # finds no answer where rank 0 does would score a batch that rank 0 skips
        self._identity = self._share(identity.encode())

    def find(self, requests: Sequence[Request]) -> list[TargetScores] | None:
        """Return the recorded answers if the next record of the journal has the answers to exactly these requests. If
        it is of other requests, delete it and all records after it. Return None in that case, and at the end of the
        journal.
        """
        if self._next == len(self._records):
            return None
        start, stop = self._records[self._next]
        answers = _decode_record(self._data[start:stop], self._key(requests), len(requests))
        if answers is None:
            self._discard_rest()
            return None
        if self._next == 0:
            self._report(f"{self._path} holds answers of an earlier call: they are not scored again.")
        self._next += 1
        return answers

    def add(self, requests: Sequence[Request], answers: Sequence[TargetScores]) -> None:
        """Append the answers to a batch of requests to the journal file. Ranks other than 0 have no file and do
        nothing.
        """
        if self._fd is not None and self._path is not None:
            record = _encode_record(self._key(requests), answers)
            with storage_errors(self._path, "Writing"):
                os.write(self._fd, _FRAME.pack(len(record), zlib.crc32(record)))
                fault_point("eval.journal")
                os.write(self._fd, record)

    def close(self, *, done: bool) -> None:
        """Close the journal file. Delete it if `done` (the evaluation has finished) or if no answers were recorded."""
        if self._fd is not None and self._path is not None:
            if done or os.fstat(self._fd).st_size <= _HEAD_BYTES:
                self._path.unlink(missing_ok=True)
            os.close(self._fd)

    def _undamaged_part(self, data: bytes) -> bytes:
        """Truncate the journal file after its last undamaged record, and return the content that remains. `data` is the
        file's content. A new file gets a header; raise OutputError if the file is not a journal.

        Without a file, as on ranks other than 0, return empty bytes.
        """
        if self._fd is None or self._path is None:
            return b""
        if data.startswith(self._head):
            records = _record_ranges(data)
            num_bytes = records[-1][1] if records else _HEAD_BYTES
            if num_bytes < len(data):
                self._report(f"{self._path} is damaged after {len(records)} batches; the rest is scored again.")
            data = data[:num_bytes]
        else:
            if not data.startswith(_MARK[: len(data)]):
                raise OutputError(
                    f"{self._path} is in the place of the evaluation's journal, but is no journal. Remove or rename it."
                )
            if len(data) > _HEAD_BYTES:
                self._report(f"{self._path} is of another command, so it is started again.")
            data = b""
        with storage_errors(self._path, "Writing"):
            os.ftruncate(self._fd, len(data))
            os.lseek(self._fd, 0, os.SEEK_END)
            if not data:
                os.write(self._fd, self._head)
        return data or self._head

    def _discard_rest(self) -> None:
        num_bytes = self._records[self._next][0] - _FRAME.size
        self._records = self._records[: self._next]
        self._report(
            f"{self._path} is of another evaluation (other weights, text or options), so it is started again"
            + (f" after {self._next} batches." if self._next else ".")
        )
        if self._fd is not None:
            os.ftruncate(self._fd, num_bytes)
            os.lseek(self._fd, 0, os.SEEK_END)

    def _key(self, requests: Sequence[Request]) -> bytes:
        digest = hashlib.blake2b(self._identity, digest_size=_KEY_BYTES)
        for request in requests:
            digest.update(struct.pack("<QQ", len(request.key), request.num_scored))
            digest.update(request.key)
        return digest.digest()


def journal_file(output: Path) -> Path:
    """Return the path of the journal of an evaluation with this results file."""
    return output.with_name(f"{output.name}.journal")


def is_journal(path: Path, command: str = "") -> bool:
    """Return whether the file at a path is a journal of answers, and of this command if one is given."""
    with suppress(OSError), open(path, "rb") as file:
        head, expected = file.read(_HEAD_BYTES), _MARK + command.encode()
        return head.startswith(expected) or expected.startswith(head)  # because: a kill may have torn it
    return False


@contextmanager
def open_journal(
    output: Path | None, report: Report = lambda text: None, share: Share = lambda data: data,
    command: str = NO_COMMAND,
) -> Iterator[Journal]:  # fmt: skip
    """Open the journal of computed answers next to the results file `output` for the `with` block. If the block raises,
    the file stays, and the next call of this `command`, 64 characters, resumes from it; otherwise it is deleted.
    `report` receives messages; `share` must return rank 0's bytes on every rank.
    """
    path = None if output is None else journal_file(output)
    if path is not None:
        with storage_errors(path, "Writing"):
            path.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(path, report, share, command)
    try:
        yield journal
    except BaseException:
        journal.close(done=False)
        raise
    journal.close(done=True)


def model_identity(checkpoint: Path, *computation: str) -> str:
    """Return a text that identifies a model and how it computes: a hash of the files in `checkpoint`, then the texts in
    `computation`.

    A checkpoint is hashed by its manifest, another program's folder by the names, sizes and times of its files.
    """
    digest = hashlib.sha256()
    if (checkpoint / MANIFEST).is_file():
        digest.update(read_bytes(checkpoint / MANIFEST, MAX_MANIFEST_BYTES, follow_links=False))
    else:
        for file in sorted(checkpoint.iterdir()):
            status = file.stat()
            digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="replace"))
    return "\0".join([digest.hexdigest(), *computation])


def _open_locked(path: Path) -> int:
    """Open or create the file `path` with an exclusive lock, and return its file descriptor. Raise OutputError if
    another process holds the lock.
    """
    with storage_errors(path, "Opening"):
        fd = open_output(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise OutputError(f"{path} is in use by another evaluation. Wait for it or choose another --output.") from error
    return fd


def _record_ranges(data: bytes) -> list[tuple[int, int]]:
    """Return (start, stop) of each whole record in `data`, the content of a journal file, up to the first record that
    is torn or damaged.
    """
    ranges, at = [], _HEAD_BYTES
    while at + _FRAME.size <= len(data):
        size, crc = _FRAME.unpack_from(data, at)
        start, stop = at + _FRAME.size, at + _FRAME.size + size
        if zlib.crc32(data[start:stop]) != crc or stop > len(data):
            break
        ranges.append((start, stop))
        at = stop
    return ranges


def _encode_record(key: bytes, answers: Sequence[TargetScores]) -> bytes:
    arrays = [
        np.array([len(answer.nll) for answer in answers], "<u4"),
        np.concatenate([answer.nll for answer in answers]).astype("<f8"),
        np.concatenate([answer.greedy for answer in answers]).astype(np.uint8),
    ]
    return key + b"".join(array.tobytes() for array in arrays)


def _decode_record(record: bytes, key: bytes, num_requests: int) -> list[TargetScores] | None:
    """Return the answers to the `num_requests` requests of a journal record; None if it is a record of other requests,
    whose key is not `key`.
    """
    from lmtrain.eval.score_targets import TargetScores  # because: it brings torch, which opening a journal needs not

    if record[:_KEY_BYTES] != key:
        return None
    counts = np.frombuffer(record, "<u4", num_requests, _KEY_BYTES)
    ends, total = np.cumsum(counts), int(counts.sum())
    at = _KEY_BYTES + counts.nbytes
    nll = np.frombuffer(record, "<f8", total, at).astype(np.float64)
    greedy = np.frombuffer(record, np.uint8, total, at + 8 * total).astype(np.bool_)
    return [TargetScores(n, g) for n, g in zip(np.split(nll, ends[:-1]), np.split(greedy, ends[:-1]), strict=True)]
