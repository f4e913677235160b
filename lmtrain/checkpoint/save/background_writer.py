"""Save a run's tensors and state in the background. Called by the training loop; commit.py writes the files.

`save` waits for the previous save, copies the tensors to host memory, and leaves hashing and writing to a thread. An
error in the thread is raised by the next `save` or `wait`, once. In a run of several ranks each has a writer, all save
the same steps, and a failure of one is raised by all.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lmtrain.checkpoint.disk.safetensors_file import Array, RankData, array_bytes, piece_spec, sort_for_file
from lmtrain.checkpoint.find_and_prune import prune_checkpoints
from lmtrain.checkpoint.save.commit import save_checkpoint
from lmtrain.layout import Piece
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.succeed_on_all_ranks_or_none import SINGLE_PROCESS, Peers

# because: torch's allocator of pinned memory rounds each request up to a power of two
CHUNK_BYTES = 64 << 20
_PAGE_BYTES = 4096


class HostMemory:
    """Host memory for one snapshot of the tensors; the next snapshot overwrites it."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Allocate enough host memory for a copy of the data of `pieces`, this rank's parts of the tensors, and touch
        its pages. It is pinned if some of the data is on a GPU.
        """
        num_bytes, pin = sum(p.block.nbytes for p in pieces), bool(_devices(pieces))
        while len(self._chunks) * self._chunk_bytes < num_bytes:
            chunk = torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=pin)
            chunk[::_PAGE_BYTES] = 0
            self._chunks.append(chunk)

    def capture(self, pieces: Sequence[Piece]) -> RankData:
        """Copy the data of `pieces`, this rank's parts of the tensors, to host memory, and return the copy as the
        content of this rank's tensor file. When this returns, the run may change its tensors.
        """
        self.reserve(pieces)
        ordered = sort_for_file(pieces)
        position = 0
        for piece in ordered:
            position = self._copy_to_chunks(_as_bytes(piece.block), position)
        for device in _devices(pieces):
            torch.cuda.synchronize(device)  # sync: the copies have to arrive before the next update of the weights
        starts = zip(range(0, position, self._chunk_bytes), self._chunks, strict=False)
        parts = [chunk.numpy()[: position - start].data for start, chunk in starts]
        return RankData([piece_spec(p) for p in ordered], parts)

    def _copy_to_chunks(self, source: Tensor, position: int) -> int:
        done = 0
        while done < len(source):
            chunk, chunk_offset = divmod(position, self._chunk_bytes)
            count = min(len(source) - done, self._chunk_bytes - chunk_offset)
            target = self._chunks[chunk][chunk_offset : chunk_offset + count]
            target.copy_(source[done : done + count], non_blocking=True)
            done, position = done + count, position + count
        return position


def _devices(pieces: Sequence[Piece]) -> set[torch.device]:
    return {p.block.device for p in pieces if isinstance(p.block, Tensor) and p.block.is_cuda}


def _as_bytes(block: Tensor | Array) -> Tensor:
    if isinstance(block, Tensor):
        return block.detach().contiguous().reshape(-1).view(torch.uint8)
    flat = array_bytes(block)
    # because: torch warns of arrays it may not write to, although it is only asked to read
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())


@dataclass(frozen=True)
class SaveFacts:
    """The step, size and times of the last finished save, for the log."""

    step: int
    path: Path
    num_bytes: int
    write_s: float  # hashing and writing, in the background unless synchronous
    stall_s: float  # how long training was blocked, including the wait for an unfinished previous save

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / max(self.write_s, 1e-9)


class CheckpointWriter:
    """Writes step_XXXXXXXX folders into `folder`, one at a time. Rank 0 of `peers` owns the run's lock. The checkpoints
    of `keep_steps` are never removed.

    The writing thread communicates over `peers`, so nothing else may use their process group during a save.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int | Literal["all"],
        asynchronous: bool,
        keep_every_steps: int | None = None,
        keep_best: int = 0,
        keep_steps: Collection[int] = (),
        verify_after_save: bool = False,
        peers: Peers = SINGLE_PROCESS,
    ) -> None:
        self.folder, self.peers = folder, peers
        self.last: SaveFacts | None = None  # the newest save that was committed
        self.scores: Mapping[int, float] = {}  # by step; replaced, never changed, as a thread reads it
        self._keep_last, self._keep_every_steps, self._keep_best = keep_last, keep_every_steps, keep_best
        self._keep_steps = frozenset(keep_steps)
        self._verify, self._asynchronous = verify_after_save, asynchronous
        self._memory = HostMemory()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._waited_s = 0.0  # since the last copy was taken

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Allocate host memory for saves of these pieces in the background, so that the first save is not slower."""
        self._start_thread(partial(self._memory.reserve, pieces))

    def save(self, step: int, pieces: Sequence[Piece], state: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Wait for the previous save, copy the tensors, and start to write the checkpoint of `step`; do nothing if the
        last save was of this step. `state` is copied; `files` are extra files by name. Raise the error of the previous
        save if it failed.
        """
        self.wait()
        if self.last is not None and self.last.step == step:
            return
        began, self._waited_s = time.monotonic() - self._waited_s, 0.0
        frozen = json.loads(json.dumps(state, allow_nan=False))  # because: the run changes its state during the save
        job = partial(self._write, began, step, self._memory.capture(pieces), frozen, dict(files))
        if self._asynchronous:
            self._start_thread(job)
        else:
            job()

    def _start_thread(self, job: Callable[[], None]) -> None:
        self.wait()
        self._thread = threading.Thread(target=self._run_keeping_error, args=(job,), name="checkpoint-writer")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save that is being written, if any, is on disk; raise the error of a save that failed."""
        if self._thread is not None:
            began = time.monotonic()
            with current_phase.within("save"):
                self._thread.join()
            self._thread = None
            self._waited_s += time.monotonic() - began
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait()
        except Exception:
            if kind is None:  # because: the error that ended the run must not be hidden by that of its last save
                raise

    def _run_keeping_error(self, job: Callable[[], None]) -> None:
        """Call `job` in the writer's thread, and keep any exception that it raises for `wait` to raise."""
        try:
            job()
        except BaseException as error:  # because: whatever it is, it belongs to the training loop
            self._error = error

    def _write(
        self, began: float, step: int, data: RankData, state: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> None:
        start = time.monotonic()
        current_phase.saver.enter("save", step)
        path, num_bytes = save_checkpoint(self.folder, step, data, state, files, self.peers, verify=self._verify)
        end = time.monotonic()
        self.last = SaveFacts(step, path, num_bytes, end - start, (start if self._asynchronous else end) - began)
        if self.peers.rank == 0:
            prune_checkpoints(
                self.folder, self._keep_last, path, self._keep_every_steps,
                keep_best=self._keep_best, scores=self.scores, keep_steps=self._keep_steps,
            )  # fmt: skip
        current_phase.saver.enter("save", -1)
