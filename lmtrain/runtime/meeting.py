"""Where the processes of a run first meet: a store that is found in time and known to be this run's by its token.

Called by process_group. The token is 128 random bits, from whoever started the processes or else from rank 0. It keeps
apart runs that meet at one address by mistake, and what others have written there from what these processes read. It
keeps out nobody who means harm: the store knows no passwords, and who reaches its port can read the token.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # because: public, but not in __all__

from lmtrain.errors import PeerLostError, UsageError
from lmtrain.runtime.ports import listen
from lmtrain.runtime.process import RUN_TOKEN, ProcessEnv, Rendezvous

_KEY = "run token"


def meet(process: ProcessEnv, timeout_s: float) -> Any:
    """The table in which the processes of this run, and no others, find each other's addresses."""
    at = Rendezvous.detect(process)
    try:
        # because: torch waits without end for a listener that takes the call and does not answer
        store = PrefixStore(at.name, _in_time(lambda: _store(process, at, timeout_s), timeout_s))
        token = _token(process, at, store)
    except (TimeoutError, dist.DistStoreError, dist.DistNetworkError) as error:
        raise PeerLostError(
            f"{process.who} found no store of its run at {at.where} within parallel.timeout_s={timeout_s:g}: rank 0 "
            "has not come, or another program listens there and does not answer. Look for what rank 0 has said, or "
            "set MASTER_PORT to a free port."
        ) from error
    own = PrefixStore(token, store)
    if own.add(f"rank {process.rank}", 1) > 1:
        raise UsageError(
            f"{process.who} met a second rank {process.rank} at {at.where}. Give each process of a run a RANK of its "
            "own, and each run a MASTER_PORT of its own."
        )
    return own


def _store(process: ProcessEnv, at: Rendezvous, timeout_s: float) -> TCPStore:
    """Rank 0 holds it, or its launcher."""
    first, listen_fd = process.rank == 0 and not at.held_by_launcher, at.listen_fd
    if first and listen_fd is None:
        # because: TCPStore itself listens on every interface, which a run within one node has no need of
        listen_fd = listen("127.0.0.1" if at.stays_on_node else "", at.port)
    return TCPStore(
        at.host, at.port, process.world_size, first, timedelta(seconds=timeout_s),
        wait_for_workers=False, master_listen_fd=listen_fd if first else None,
    )  # fmt: skip


def _token(process: ProcessEnv, at: Rendezvous, store: Any) -> str:
    """Rank 0 writes it, once; the others read it, and compare it with their own where they were started with one."""
    wanted = at.token or (secrets.token_hex(16) if process.rank == 0 else None)
    found = store.compare_set(_KEY, "", wanted) if process.rank == 0 else store.get(_KEY)
    token: str = found.decode(errors="replace")
    if not RUN_TOKEN.fullmatch(token) or (wanted or token) != token:
        raise UsageError(
            f"{process.who} found the token of another run at {at.where}, or something else in its place. Set "
            "MASTER_PORT to a port that no other run uses."
        )
    return token


def _in_time(make: Callable[[], TCPStore], timeout_s: float) -> TCPStore:
    answer: queue.SimpleQueue[TCPStore | BaseException] = queue.SimpleQueue()

    def work() -> None:
        try:
            answer.put(make())
        except BaseException as error:
            answer.put(error)

    threading.Thread(target=work, name="meeting", daemon=True).start()
    try:
        found = answer.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(found, BaseException):
        raise found
    return found
