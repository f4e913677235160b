"""Open torch's default process group for a run, and turn the loss of a peer into an error that names the place.

Called by the command line around a run, and by parallel/mesh for groups within it. Knows neither layouts nor models.
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
from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.runtime.processes.process_environment import ProcessEnv, end_now, set_env_default
from lmtrain.runtime.processes.rendezvous import open_run_store, report_refusal, wait_for_all_ranks
from lmtrain.runtime.processes.stop_signals import Stopped, ignore_stops

PACKAGE = Path(__file__).resolve().parents[2]
# because: gloo and the store raise plain RuntimeErrors, which these words in the text distinguish from other ones
_PEER_ERROR_WORDS = (
    "gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "Timed out waiting", "Application timeout",
)  # fmt: skip
# because: the watch, whose limit ends first, names the late rank; a collective only reports that it timed out
EXTRA_TIMEOUT_S = 5.0
_MAX_CALLS = 6  # how many of our functions a message names
_HOST_NAME_BYTES = 64  # because: a host name has at most 63


@dataclass(frozen=True)
class RunGroup:
    """The opened process group of a run."""

    hosts: tuple[str, ...]  # host names by rank, on rank 0; empty on other ranks
    store: Any = None  # this run's own store, for messages outside of collectives; None for a single process


@contextmanager
def open_process_group(process: ProcessEnv, device: torch.device, timeout_s: float) -> Iterator[RunGroup]:
    """Join the run's other ranks, hold torch's default process group during the `with` block, and yield the hosts and
    the store of the run; a single process opens no group. Collective. Raise PeerLostError if a rank does not join
    within `timeout_s` or is lost.
    """
    fault_point("start.rendezvous")
    if process.world_size == 1:
        yield RunGroup((process.host,))
        fault_point("shutdown")
        return
    with peer_errors(process, timeout_s):
        store = _join(process, "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout_s)
        names = gather_to_rank0(process.host.encode()[:_HOST_NAME_BYTES], _HOST_NAME_BYTES)
        yield RunGroup(tuple(name.decode(errors="replace") for name in names), store)
        fault_point("shutdown")
        # because: a rank that leaves early looks lost to its launcher, which then ends those that are still finishing
        dist.all_reduce(torch.zeros(1))  # collective: a barrier of the world, nothing is summed
    # because: after an error peers must notice at once by a closed socket, and a shutdown may not close it
    dist.destroy_process_group()


def skip_group_teardown(code: int) -> None:
    """Make this process exit with `code` without tearing down its process group, if an error has left one open.

    because: when Python tears down such a group, threads of gloo sometimes abort the process, and NCCL may wait for a
    peer that is gone.
    """
    if dist.is_initialized():
        atexit.register(end_now, code)


def new_group(ranks: Sequence[int], timeout_s: float, max_ctas: int | None = None) -> dist.ProcessGroup:
    """Create a process group of `ranks`. Collective over these ranks, which must create all their groups in the same
    order. A collective of the group fails some seconds after it has waited `timeout_s`. `max_ctas` limits how many
    thread blocks of the GPU an NCCL kernel occupies (None: torch's default).
    """
    options: Any = None
    if max_ctas is not None and "nccl" in dist.get_backend_config():
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = max_ctas
        options._timeout = collective_timeout(timeout_s)  # because: torch warns if it differs from the group's
    group = dist.new_group(
        list(ranks), timeout=collective_timeout(timeout_s), pg_options=options, use_local_synchronization=True
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def collective_timeout(timeout_s: float) -> timedelta:
    """Return after how long a collective fails by itself: a few seconds after the watch has named the late rank."""
    return timedelta(seconds=timeout_s + EXTRA_TIMEOUT_S)


def _join(process: ProcessEnv, backend: str, timeout_s: float) -> Any:
    """Wait for all ranks of the run and initialize torch's default process group with the torch.distributed backend
    `backend`; return the run's store. Collective.
    """
    try:
        store = open_run_store(process, timeout_s)
    except Stopped as stopped:
        report_refusal(process, StoppedEarly(str(stopped)))
        raise
    try:
        wait_for_all_ranks(process, store, timeout_s)
    except LmtrainError:
        ignore_stops()  # because: a launcher stops the other ranks once one has ended, and they still have to report
        raise
    store.set_timeout(timedelta(seconds=timeout_s))
    # because: by default NCCL's watchdog aborts a process whose peer is gone, with SIGABRT and without naming the peer;
    # this run's watch ends it with exit code 76 and the name. NCCL reads the variable when a group is created
    set_env_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    try:
        dist.init_process_group(
            backend, store=store, rank=process.rank, world_size=process.world_size,
            timeout=collective_timeout(timeout_s),
        )  # fmt: skip
    except (MemoryError, ValueError) as error:  # because: gloo raises these if an entry in the store is no address
        raise UsageError(
            f"{process.label} read an address of a peer that no process of this run has written. Keep other programs "
            "away from the port of MASTER_PORT, or set MASTER_PORT to another port."
        ) from error
    return store


def gather_to_rank0(own_bytes: bytes, num_bytes: int) -> list[bytes]:
    """Return on rank 0 the `own_bytes` of all ranks, in order of rank, and on other ranks an empty list. Collective
    over the world. `own_bytes` has at most `num_bytes` bytes, a limit that must be equal on all ranks; zero bytes at
    the end are lost.

    because: gloo's all-reduce and all-gather send a number of messages that grows as n^2, this function as n.
    """
    row = torch.frombuffer(bytearray(own_bytes.ljust(num_bytes, b"\0")), dtype=torch.uint8)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(row, rows)  # collective: one row from each of the world, on the host
    return [gathered.numpy().tobytes().rstrip(b"\0") for gathered in rows or ()]


def broadcast_from_rank0(data: bytes) -> bytes:
    """Return the `data` of rank 0 on every rank. Collective over the world; a single process returns its own `data`."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return data
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0)  # collective: one number to the world, on the host
    row = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0 and data:
        row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(row, 0)  # collective: one row to the world, on the host
    return row.numpy().tobytes()


def wait_for_rank0_exit() -> None:
    """Wait until rank 0 has closed its connections: it has then received all that this rank sent to it."""
    with suppress(RuntimeError):
        dist.recv(torch.empty(1), 0)


@contextmanager
def peer_errors(process: ProcessEnv, timeout_s: float) -> Iterator[None]:
    """Raise PeerLostError if a collective in the `with` block fails because a peer is lost or hangs; it names this rank
    and the collective. Other errors pass unchanged. `timeout_s` is the run's timeout, for the message.
    """
    try:
        yield
    except LmtrainError:
        raise
    except RuntimeError as error:
        if not is_peer_error(error):
            raise
        raise PeerLostError(
            f"{process.label} waited for its peers in {wait_place(error)}, which failed: "
            f"{_first_sentence(str(error))} A process that ended has printed why above or in its own log; a process "
            f"that hangs is ended after parallel.timeout_s={timeout_s:g}. Start the same command again to go on."
        ) from error


def is_peer_error(error: BaseException) -> bool:
    """Return whether an error is that of a collective or a store whose peer is lost, hangs or is in another collective.
    """
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or any(word in str(error) for word in _PEER_ERROR_WORDS)
    )


def wait_place(error: BaseException) -> str:
    """Return which collective raised `error` and where lmtrain called it, as text for a message, such as "all_reduce of
    train_step > gradient_norm (optim/grads.py:31)"; "a collective" if the traceback does not tell.
    """
    frames = traceback.extract_tb(error.__traceback__)
    torch_calls = [f.name for f in frames if f.filename.endswith("distributed_c10d.py") and not f.name.startswith("_")]
    collective = torch_calls[0] if torch_calls else "a collective"
    own_frames = [
        f for f in frames
        if PACKAGE in Path(f.filename).parents and f.name not in ("peer_errors", "open_process_group")
    ]  # fmt: skip
    if not own_frames:
        return collective
    calls = " > ".join([name for name, _ in groupby(f.name for f in own_frames)][-_MAX_CALLS:])
    return f"{collective} of {calls} ({Path(own_frames[-1].filename).relative_to(PACKAGE)}:{own_frames[-1].lineno})"


def _first_sentence(text: str) -> str:
    """Return the first sentence of an error's text, without the source file that gloo puts before it."""
    first = re.sub(r"^\[[^\]]*\]\s*", "", text.partition("\n")[0]).partition(". ")[0]
    return f"{first[:200].rstrip('.')}."
