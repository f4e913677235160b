"""Brings the processes of a run together and turns the loss of one into an error that says who waited for what.

Called by the command line around a run, and by parallel/mesh for groups within it. It knows neither layouts nor
models.
"""

from __future__ import annotations

import atexit
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lmtrain.errors import LmtrainError, PeerLostError, StoppedEarly, UsageError
from lmtrain.runtime.processes.faults import fault_point
from lmtrain.runtime.processes.meeting import call_roll, meet, tell_refusal
from lmtrain.runtime.processes.process import ProcessEnv, end_now, set_env_default
from lmtrain.runtime.processes.signals import Stopped, ignore_stops

PACKAGE = Path(__file__).resolve().parents[2]
# because: gloo and the store raise plain RuntimeErrors; these words tell theirs from others'
_WORDS = (
    "gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "Timed out waiting", "Application timeout",
)  # fmt: skip
BACKSTOP_S = 5.0  # because: the watch says who is late, a collective of its own accord only that it has waited
_NUM_CALLS = 6  # of ours, that a message names
_NAME_BYTES = 64  # because: a host name has at most 63


@dataclass(frozen=True)
class Met:
    """The processes of a run, once they are together."""

    hosts: tuple[str, ...]  # by rank; on rank 0 alone
    store: Any = None  # the table of this run alone, for what goes round beside collectives


@contextmanager
def start(process: ProcessEnv, device: torch.device, timeout_s: float) -> Iterator[Met]:
    """Hold the default process group for as long as the block lasts; a single process has none."""
    fault_point("start.rendezvous")
    if process.world_size == 1:
        yield Met((process.host,))
        fault_point("shutdown")
        return
    with peer_errors(process, timeout_s):
        store = _meet(process, "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout_s)
        names = gather_to_first(process.host.encode()[:_NAME_BYTES], _NAME_BYTES)
        yield Met(tuple(name.decode(errors="replace") for name in names), store)
        fault_point("shutdown")
        # because: who leaves early looks lost to launchers, which then end those that are still finishing
        dist.all_reduce(torch.zeros(1))  # collective: a meeting of the world, nothing is summed
    # because: after an error the peers must notice at once, which a closed socket tells them and a shutdown may not
    dist.destroy_process_group()


def end_at_once(code: int) -> None:
    """Let this process end with `code` where an error has left its group alive: as the last that it says, untidied.

    because: when Python takes down such a group, threads of gloo now and then abort the process, and NCCL may wait for
    a peer that is gone.
    """
    if dist.is_initialized():
        atexit.register(end_now, code)


def new_group(ranks: Sequence[int], timeout_s: float, max_ctas: int | None = None) -> dist.ProcessGroup:
    """Create a group; only its members call this, and all processes create their groups in the same order.

    `max_ctas`: how many blocks of a GPU each of its kernels may hold while it waits for a peer.
    """
    options: Any = None
    if max_ctas is not None and "nccl" in dist.get_backend_config():
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = max_ctas
        options._timeout = backstop(timeout_s)  # because: torch warns where it is another than the group's
    group = dist.new_group(
        list(ranks), timeout=backstop(timeout_s), pg_options=options, use_local_synchronization=True
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def backstop(timeout_s: float) -> timedelta:
    """Return how long a collective waits before it fails by itself."""
    return timedelta(seconds=timeout_s + BACKSTOP_S)


def _meet(process: ProcessEnv, backend: str, timeout_s: float) -> Any:
    try:
        store = meet(process, timeout_s)
    except Stopped as stopped:
        tell_refusal(process, StoppedEarly(str(stopped)))
        raise
    try:
        call_roll(process, store, timeout_s)
    except LmtrainError:
        ignore_stops()  # because: a launcher ends those that are left once the first has ended, and these have to speak
        raise
    store.set_timeout(timedelta(seconds=timeout_s))
    # because: by default NCCL's own watch aborts a process whose peer is gone, with SIGABRT and not a word of who that
    # was; this run's watch ends it with 76 and the name. Read when a group of NCCL is made
    set_env_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    try:
        dist.init_process_group(
            backend, store=store, rank=process.rank, world_size=process.world_size, timeout=backstop(timeout_s)
        )
    except (MemoryError, ValueError) as error:  # because: so gloo ends where what it finds in the store is no address
        raise UsageError(
            f"{process.who} read an address of a peer that no process of this run has written. Keep other programs "
            "away from the port at which the processes meet, or set MASTER_PORT to another one."
        ) from error
    return store


def gather_to_first(mine: bytes, num_bytes: int) -> list[bytes]:
    """Everybody's bytes by rank, without zeros at their end, on rank 0 alone.

    because: gloo's sums and gathers for all send a number of messages that grows as n^2, this as n.
    """
    row = torch.frombuffer(bytearray(mine.ljust(num_bytes, b"\0")), dtype=torch.uint8)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(row, rows)  # collective: one row from each of the world, on the host
    return [one.numpy().tobytes().rstrip(b"\0") for one in rows or ()]


def from_first(data: bytes) -> bytes:
    """Rank 0's bytes, on all; a process that is alone keeps its own."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return data
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0)  # collective: one number to the world, on the host
    row = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0 and data:
        row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(row, 0)  # collective: one row to the world, on the host
    return row.numpy().tobytes()


def wait_for_first() -> None:
    """Wait until rank 0 has left the group and closed its connections: it has then received all that was sent to it."""
    with suppress(RuntimeError):
        dist.recv(torch.empty(1), 0)


@contextmanager
def peer_errors(process: ProcessEnv, timeout_s: float) -> Iterator[None]:
    """Turn what a collective raises for a lost or silent peer into an error that names this rank and its place."""
    try:
        yield
    except LmtrainError:
        raise
    except RuntimeError as error:
        if not is_peer_error(error):
            raise
        raise PeerLostError(
            f"{process.who} waited for its peers in {waiting_in(error)} and got: {_short(str(error))} A process that "
            f"ended has said why above or in its own log; one that hangs is given parallel.timeout_s={timeout_s:g}. "
            "Start the same command again to go on."
        ) from error


def is_peer_error(error: BaseException) -> bool:
    """Return whether a collective raises such an error if a peer is lost, silent or in another collective."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or any(word in str(error) for word in _WORDS)
    )


def waiting_in(error: BaseException) -> str:
    """Return where a rank waited: "all_reduce of train_step > forward_backward > gradient_norm (grads.py:31)"."""
    frames = traceback.extract_tb(error.__traceback__)
    torchs = [f.name for f in frames if f.filename.endswith("distributed_c10d.py") and not f.name.startswith("_")]
    what = torchs[0] if torchs else "a collective"
    ours = [f for f in frames if PACKAGE in Path(f.filename).parents and f.name not in ("peer_errors", "start")]
    if not ours:
        return what
    calls = " > ".join([name for name, _ in groupby(f.name for f in ours)][-_NUM_CALLS:])
    return f"{what} of {calls} ({Path(ours[-1].filename).relative_to(PACKAGE)}:{ours[-1].lineno})"


def _short(text: str) -> str:
    """Return the first sentence of an error, without the source file that gloo puts before it."""
    first = re.sub(r"^\[[^\]]*\]\s*", "", text.partition("\n")[0]).partition(". ")[0]
    return f"{first[:200].rstrip('.')}."
