"""Brings the processes of a run together and turns the loss of one into an error that says who waited for what.

Called by the command line around a run, and by parallel/mesh for groups within it. It knows neither layouts nor
models.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # because: public, but not in __all__

from lmtrain.errors import LmtrainError, PeerLostError
from lmtrain.runtime.ports import listen
from lmtrain.runtime.process import ProcessEnv, Rendezvous

PACKAGE = Path(__file__).resolve().parents[1]
# because: gloo and the store raise plain RuntimeErrors; these words tell theirs from others'
_WORDS = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "Timed out waiting")
_NUM_CALLS = 6  # of ours, that a message names
_NAME_BYTES = 64  # because: a host name has at most 63


@dataclass(frozen=True)
class Peers:
    hosts: tuple[str, ...]  # by rank


@contextmanager
def start(process: ProcessEnv, device: torch.device, timeout_s: float) -> Iterator[Peers]:
    """The default group for as long as the block lasts. One process needs none and gets none."""
    if process.world_size == 1:
        yield Peers((process.host,))
        return
    with peer_errors(process, timeout_s):
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        _meet(process, backend, timedelta(seconds=timeout_s))
        yield Peers(tuple(_gather_names(process.host)))
        # because: who leaves early looks lost to launchers, which then end those that are still finishing
        dist.all_reduce(torch.zeros(1))  # collective: a meeting of the world, nothing is summed
    # because: after an error the peers must notice at once, which a closed socket tells them and a shutdown may not
    dist.destroy_process_group()


def new_group(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """A group that only its members make; all of them must make their groups in one order."""
    group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _meet(process: ProcessEnv, backend: str, timeout: timedelta) -> None:
    at = Rendezvous.detect(process)
    store = PrefixStore(at.name, _store(process, at, timeout))
    dist.init_process_group(backend, store=store, rank=process.rank, world_size=process.world_size, timeout=timeout)


def _store(process: ProcessEnv, at: Rendezvous, timeout: timedelta) -> Any:
    """The table in which the processes find each other's addresses; rank 0 holds it, or its launcher."""
    first, listen_fd = process.rank == 0 and not at.held_by_launcher, at.listen_fd
    if first and listen_fd is None:
        # because: TCPStore itself listens on every interface, which a run within one node has no need of
        listen_fd = listen("127.0.0.1" if at.stays_on_node else "", at.port)
    return TCPStore(
        at.host, at.port, process.world_size, first, timeout,
        wait_for_workers=False, master_listen_fd=listen_fd if first else None,
    )  # fmt: skip


def _gather_names(name: str) -> list[str]:
    """Every rank's name, by rank."""
    mine = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
    text = name.encode()[:_NAME_BYTES]
    mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)  # collective: one name from each of the world
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in every]


@contextmanager
def peer_errors(process: ProcessEnv, timeout_s: float) -> Iterator[None]:
    """What a collective raises when a peer is gone or silent becomes an error with this rank and its place in code."""
    try:
        yield
    except LmtrainError:
        raise
    except RuntimeError as error:
        text = str(error)
        if not (isinstance(error, dist.DistError) or any(word in text for word in _WORDS)):
            raise
        raise PeerLostError(
            f"{process.who} waited for its peers in {waiting_in(error)} and got: {_short(text)} A process that ended "
            f"has said why above or in its own log; one that hangs is given parallel.timeout_s={timeout_s:g}. "
            "Start the same command again to go on from the last checkpoint."
        ) from error


def waiting_in(error: BaseException) -> str:
    """Where it stood still: "all_reduce of train_step > forward_backward > gradient_norm (parallel/grads.py:31)"."""
    frames = traceback.extract_tb(error.__traceback__)
    torchs = [f.name for f in frames if f.filename.endswith("distributed_c10d.py") and not f.name.startswith("_")]
    ours = [f for f in frames if PACKAGE in Path(f.filename).parents and f.name not in ("peer_errors", "start")]
    if not ours:
        return torchs[0] if torchs else "a collective"
    place = f"{Path(ours[-1].filename).relative_to(PACKAGE)}:{ours[-1].lineno}"
    calls = " > ".join([name for name, _ in groupby(f.name for f in ours)][-_NUM_CALLS:])
    return f"{torchs[0] if torchs else 'a collective'} of {calls} ({place})"


def _short(text: str) -> str:
    """The first sentence, without the source file that gloo puts before it."""
    first = re.sub(r"^\[[^\]]*\]\s*", "", text.partition("\n")[0]).partition(". ")[0]
    return f"{first[:200].rstrip('.')}."
