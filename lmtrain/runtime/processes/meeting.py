"""Where the processes of a run first meet: a store that is found in time and known to be this run's by its token.

Called by process_group, and by the command line for a process that is refused: all begin, or all hear of the one that
cannot. The token is 128 random bits, from whoever started the processes or else from rank 0. It keeps
apart runs that meet at one address by mistake, and what others have written there from what these processes read. It
keeps out nobody who means harm: the store knows no passwords, and who reaches its port can read the token.
"""

from __future__ import annotations

import queue
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # because: public, but not in __all__

from lmtrain.errors import LmtrainError, PeerLostError, StoppedEarly, UsageError, error_from_peer
from lmtrain.runtime.processes.process import RUN_TOKEN, ProcessEnv, Rendezvous, listen, ranks_text
from lmtrain.runtime.processes.signals import Stopped, asked_to_stop

T = TypeVar("T")
_KEY = "run token"
_VERDICT, _ALL_BEGIN = "verdict", "all begin"
_REFUSAL = re.compile(r"([1-9][0-9]{0,2}) (.+)", re.DOTALL)  # an exit code, and why
_NUM_CHARACTERS = 4000  # of a reason
_HEARD_BY_ALL = "heard by all"
_LOOK_S = 0.25  # at whether this process is asked to stop
_LAST_WORD_S = 0.5
_LONGER_S = 60.0  # because: a call into torch that gives up just as Python ends aborts the process
_LAST_S = 60.0  # because: who is refused has said so by now, and peers that are lost never come to hear it
_BRIEFLY_S = 5.0  # because: whoever was given the same command refuses it by itself
# because: where a stop cuts a meeting short, rank 0 says so in the store that it has opened; a second one at the same
# port would answer some of the peers, and all would wait for each other
_held: dict[tuple[str, int], TCPStore] = {}
_holding = threading.Lock()


def meet(process: ProcessEnv, timeout_s: float, *, heeds_stops: bool = True, begins: bool = True) -> Any:
    """Return the store in which the processes of this run, and no others, find each other's addresses.

    Raise Stopped if this process is asked to stop before a peer has seen it. With `begins=False` a process only reports
    why it does not begin and is not counted as a rank: it may be a launcher whose ranks have been here.
    """
    heed = _heed if heeds_stops else lambda: None
    at = Rendezvous.detect(process)
    try:
        # because: torch waits without end for a listener that takes the call and does not answer
        store = PrefixStore(at.name, _in_time(lambda: _store(process, at, timeout_s), timeout_s, heed))
        asked = _Asked(store, timeout_s, heed)
        if process.rank > 0:
            _wait(asked, _KEY, timeout_s)
        own = PrefixStore(_token(process, at, asked), store)
        is_second = begins and _Asked(own, timeout_s, heed).add(f"rank {process.rank}", 1) > 1
    except (TimeoutError, dist.DistStoreError, dist.DistNetworkError) as error:
        raise PeerLostError(
            f"{process.who} found no store of its run at {at.where} within parallel.timeout_s={timeout_s:g}: rank 0 "
            "has not come, or another program listens there and does not answer. Look for what rank 0 has said, or "
            "set MASTER_PORT to a free port."
        ) from error
    _held.pop((at.host, at.port), None)  # because: who has met holds the store by its table
    if is_second:
        raise UsageError(
            f"{process.who} met a second rank {process.rank} at {at.where}. Give each process of a run a RANK of its "
            "own, and each run a MASTER_PORT of its own."
        )
    return own


def call_roll(process: ProcessEnv, store: Any, timeout_s: float) -> None:
    """Wait until all processes are here; if one of them was refused, raise its error on all of them."""
    store = _Asked(store, timeout_s)
    try:
        if store.add("num here", 1) == process.world_size:
            store.compare_set(_VERDICT, "", _ALL_BEGIN)
        _wait(store, _VERDICT, timeout_s, lambda: _take_back(process, store))
        verdict = store.get(_VERDICT).decode(errors="replace")
    except (TimeoutError, dist.DistError) as error:
        raise PeerLostError(
            f"{process.who} waited for its peers: {_missing(process, store)} within "
            f"parallel.timeout_s={timeout_s:g}. Look for what is said on the nodes on which they were started."
        ) from error
    if verdict == _ALL_BEGIN:
        return
    _hear(process, store, _LAST_S if process.rank == 0 else 0.0)
    if (refusal := _REFUSAL.fullmatch(verdict)) is None:
        raise UsageError(
            f"{process.who} read a verdict that no process of this run has written. Keep other programs away from the "
            "port at which the processes meet, or set MASTER_PORT to another one."
        )
    raise error_from_peer(int(refusal[1]), f"No process begins, because {refusal[2]}")


def _missing(process: ProcessEnv, store: _Asked) -> str:
    """Return which ranks have not come, as far as the store still answers."""
    try:
        store.timeout_s = _LAST_WORD_S
        missing = [rank for rank in range(process.world_size) if not store.check([f"rank {rank}"])]
    except (TimeoutError, RuntimeError):
        return f"not all {process.world_size} processes of the run came, or who holds their store is gone again,"
    have = "has" if len(missing) == 1 else "have"
    return f"{ranks_text(missing)} of {process.world_size} {have} not come" if missing else "no verdict came"


def tell_refusal(process: ProcessEnv, error: LmtrainError, *, found_by_all: bool = False) -> None:
    """Let the others know why this process does not begin, where they can be met; otherwise they would wait for it.

    Wait for them a minute, or a few seconds for an error that is `found_by_all` in the same command.
    """
    with suppress(LmtrainError, TimeoutError, dist.DistError):
        limit_s = _BRIEFLY_S if found_by_all else _LAST_S
        store = _Asked(meet(process, limit_s, heeds_stops=False, begins=False), limit_s)
        why = "was asked to stop" if isinstance(error, StoppedEarly) else "is refused"
        store.compare_set(_VERDICT, "", f"{error.exit_code} {process.who} {why}: {error}"[:_NUM_CHARACTERS])
        _hear(process, store, limit_s)


def _hear(process: ProcessEnv, store: _Asked, wait_s: float) -> None:
    """Note that this process knows, and wait until all do: rank 0 may hold the store, and an end brings on others."""
    with suppress(TimeoutError, dist.DistError):
        # because: a launcher speaks for all its ranks, some of which may have been told before it ended them
        if store.add("num heard", process.num_ranks) >= process.world_size:
            store.set(_HEARD_BY_ALL, "")
        if wait_s:
            _wait(store, _HEARD_BY_ALL, wait_s)


def _store(process: ProcessEnv, at: Rendezvous, timeout_s: float) -> TCPStore:
    """Rank 0 holds it, or its launcher."""
    first, listen_fd = process.rank == 0 and not at.held_by_launcher, at.listen_fd

    def made() -> TCPStore:
        return TCPStore(
            at.host, at.port, process.world_size, first, timedelta(seconds=timeout_s + _LONGER_S),
            wait_for_workers=False, master_listen_fd=listen_fd if first else None,
        )  # fmt: skip

    if not first:
        return made()
    with _holding:
        if (at.host, at.port) not in _held:
            if listen_fd is None:
                # because: TCPStore itself listens on every interface, which a run within one node has no need of
                listen_fd = listen("127.0.0.1" if at.stays_on_node else "", at.port)
            _held[at.host, at.port] = made()
        return _held[at.host, at.port]


def _token(process: ProcessEnv, at: Rendezvous, store: _Asked) -> str:
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


def _heed() -> None:
    if name := asked_to_stop():
        raise Stopped(name)


def _take_back(process: ProcessEnv, store: _Asked) -> None:
    """Keep all processes from beginning if this one was asked to stop; do nothing if all have begun."""
    if name := asked_to_stop():
        store.compare_set(_VERDICT, "", f"{StoppedEarly.exit_code} {process.who} was asked to stop: {name}")


class _Asked:
    """A store that is asked from another thread: for one that stands still torch itself would wait without end."""

    def __init__(self, store: Any, timeout_s: float, look: Callable[[], None] = lambda: None) -> None:
        self._store, self.timeout_s, self._look = store, timeout_s, look

    def __getattr__(self, name: str) -> Callable[..., Any]:
        ask = getattr(self._store, name)
        return lambda *given: _in_time(lambda: ask(*given), self.timeout_s, self._look)


def _wait(store: _Asked, key: str, timeout_s: float, look: Callable[[], None] = lambda: None) -> None:
    """Poll the store until a key is written; a process that waits in C would handle no signal."""
    ends_s, pause_s = time.monotonic() + timeout_s, 0.01
    while not store.check([key]):
        look()
        if time.monotonic() >= ends_s:
            raise dist.DistStoreError(f"nothing was written to {key!r} in {timeout_s:g} seconds")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_S)  # because: thousands may ask one store


def _in_time(ask: Callable[[], T], timeout_s: float, look: Callable[[], None]) -> T:
    answer: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()

    def work() -> None:
        try:
            answer.put(ask())
        except BaseException as error:
            answer.put(error)

    threading.Thread(target=work, name="meeting", daemon=True).start()
    ends_s = time.monotonic() + timeout_s
    while True:
        look()
        left = ends_s - time.monotonic()
        try:
            found = answer.get(timeout=max(min(left, _LOOK_S), 0.001))
        except queue.Empty:
            if left <= _LOOK_S:
                raise TimeoutError from None
            continue
        if isinstance(found, BaseException):
            raise found
        return found
