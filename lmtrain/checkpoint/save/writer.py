"""Saves a run's tensors and state while it goes on. Called by the training loop; making bytes durable is commit's part.

`save` waits for the save before it, copies the tensors to host memory, and leaves hashing and writing to a thread.
What goes wrong in the thread is raised by the next `save` or `wait`, once. In a run of several processes each has a
writer, all save the same steps, and a failure of one is raised by all.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.disk.tensor_file import RankData
from lmtrain.checkpoint.save.agreement import ALONE, Peers
from lmtrain.checkpoint.save.commit import save_checkpoint
from lmtrain.checkpoint.save.snapshot import HostMemory
from lmtrain.checkpoint.store import prune
from lmtrain.observe.measure import phases
from lmtrain.piece import Piece


@dataclass(frozen=True)
class SaveFacts:
    """For the log: what the last finished save was and what it cost."""

    step: int
    path: Path
    num_bytes: int
    write_s: float  # hashing and writing, in the background unless synchronous
    stall_s: float  # how long training stood still: for the save before this one too, where that was not done

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / max(self.write_s, 1e-9)


class CheckpointWriter:
    """Writes step_XXXXXXXX folders into `folder`, one at a time. Rank 0 of `peers` owns the run's lock.

    The peers talk from the writing thread, so nothing else may use what they talk over while a save is in flight.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int,
        asynchronous: bool,
        keep_every_steps: int | None = None,
        keep_best: int = 0,
        verify_after_save: bool = False,
        peers: Peers = ALONE,
    ) -> None:
        self.folder, self.peers = folder, peers
        self.last: SaveFacts | None = None  # the newest save that was committed
        self.worth: Mapping[int, float] = {}  # of steps that were measured; replaced whole, as another thread reads it
        self._keep_last, self._keep_every_steps, self._keep_best = keep_last, keep_every_steps, keep_best
        self._verify = verify_after_save
        self._asynchronous = asynchronous
        self._memory = HostMemory()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._waited_s = 0.0  # since the last copy was taken

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Make the memory for saves of these pieces now, in the background, so that the first waits no longer."""
        self._begin(partial(self._memory.reserve, pieces))

    def save(self, step: int, pieces: Sequence[Piece], state: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Save this step; a step that this writer has just saved is not saved again."""
        self.wait()
        if self.last is not None and self.last.step == step:
            return
        began = time.monotonic() - self._waited_s
        self._waited_s = 0.0
        frozen = json.loads(json.dumps(state, allow_nan=False))  # because: the run changes its state while we write
        job = partial(self._write, began, step, self._memory.capture(pieces), frozen, dict(files))
        if self._asynchronous:
            self._begin(job)
        else:
            job()

    def _begin(self, job: Callable[[], None]) -> None:
        self.wait()
        self._thread = threading.Thread(target=self._keep_error, args=(job,), name="checkpoint-writer")
        self._thread.start()

    def wait(self) -> None:
        """Until the save in flight is on disk; raises what went wrong with it."""
        if self._thread is not None:
            began = time.monotonic()
            with phases.within("save"):
                self._thread.join()
            self._thread = None
            self._waited_s += time.monotonic() - began
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        self.wait()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Exception:
            if kind is None:  # because: what ended the run is the news, not that its last save went with it
                raise

    def _keep_error(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # because: whatever it is, it belongs to the training loop
            self._error = error

    def _write(
        self, began: float, step: int, data: RankData, state: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> None:
        start = time.monotonic()
        phases.saver.enter("save", step)
        path, num_bytes = save_checkpoint(self.folder, step, data, state, files, self.peers, verify=self._verify)
        end = time.monotonic()
        self.last = SaveFacts(step, path, num_bytes, end - start, (start if self._asynchronous else end) - began)
        if self.peers.rank == 0:
            prune(
                self.folder, self._keep_last, path, self._keep_every_steps, keep_best=self._keep_best, worth=self.worth
            )  # fmt: skip
        phases.saver.enter("save", -1)
