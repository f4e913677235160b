"""The rendezvous of a run's ranks in a TCPStore: with a deadline, and with a token that identifies the run.

Called by process_group, and by the command line for a process that cannot start: either all ranks start, or all raise
the error of the one that cannot. The token is 128 random bits, from whoever started the processes or else from rank 0.
It separates runs that use the same address by mistake, and their entries in the store. It is no protection against an
attacker: the store has no passwords, and whoever reaches its port can read the token.
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
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # because: public, but not in __all__

from lmtrain.errors import LmtrainError, PeerLostError, StoppedEarly, UsageError, error_from_peer
from lmtrain.runtime.processes.process_environment import RUN_TOKEN, ProcessEnv, Rendezvous, listen, ranks_text
from lmtrain.runtime.processes.stop_signals import Stopped, received_stop

T = TypeVar("T")
_RUN_ID_KEY = "run token"
_VERDICT, _ALL_BEGIN = "verdict", "all begin"
_WORLD_SIZE, _FEWEST_RANKS, _MAX_SIZE_CHARS = "num ranks", "fewest ranks", 9
_REFUSAL = re.compile(r"(?P<exit_code>[1-9][0-9]{0,2}) (?P<reason>.+)", re.DOTALL)
_MAX_REASON_CHARS = 4000
_READ_BY_ALL = "heard by all"
_POLL_S = 0.25  # how often a waiting process checks for a stop signal
_MISSING_CHECK_S = 0.5
_EXTRA_TORCH_S = 60.0  # because: a call into torch that gives up just as Python ends aborts the process
_REFUSAL_WAIT_S = 60.0  # because: after a minute the refusal is in the store, and lost peers would never read it
_SHORT_REFUSAL_WAIT_S = 5.0  # because: peers that were given the same command refuse it by themselves
# because: if a stop interrupts the rendezvous, rank 0 reports it in the store that it has opened; a second store at the
# same port would serve some of the peers, and all would wait for each other
_open_stores: dict[tuple[str, int], TCPStore] = {}
_open_stores_lock = threading.Lock()


def open_run_store(process: ProcessEnv, timeout_s: float, *, raises_on_stop: bool = True, as_rank: bool = True) -> Any:
    """Return the torch store of this run, which rank 0 hosts and the other ranks connect to; in it they exchange their
    addresses. Raise PeerLostError if there is none within `timeout_s`, and UsageError for another run's store or a
    second process of the same rank. `raises_on_stop`: raise Stopped on a stop signal. `as_rank=False`: do not count
    this process as a rank.

    A process that is not counted only reports why it does not start; it may be a launcher whose ranks have been here.
    """
    check_stop = _raise_if_stopped if raises_on_stop else lambda: None
    rendezvous = Rendezvous.detect(process)
    try:
        # because: torch waits forever for a listener that accepts the connection and does not answer
        tcp_store = _call_with_timeout(lambda: _connect(process, rendezvous, timeout_s), timeout_s, check_stop)
        store = PrefixStore(rendezvous.name, tcp_store)
        timed_store = _TimedStore(store, timeout_s, check_stop)
        if process.rank > 0:
            _wait_for_key(timed_store, _RUN_ID_KEY, timeout_s)
        run_store = PrefixStore(_agree_on_token(process, rendezvous, timed_store), store)
        is_second = as_rank and _TimedStore(run_store, timeout_s, check_stop).add(f"rank {process.rank}", 1) > 1
    except (TimeoutError, dist.DistStoreError, dist.DistNetworkError) as error:
        raise PeerLostError(
            f"{process.label} found no store of its run at {rendezvous.address} within "
            f"parallel.timeout_s={timeout_s:g}: rank 0 has not opened it, or another program listens there and does "
            "not answer. Look at the output of rank 0, or set MASTER_PORT to a free port."
        ) from error
    _open_stores.pop((rendezvous.host, rendezvous.port), None)  # because: from now on the prefix store holds it
    if is_second:
        raise UsageError(
            f"{process.label} found a second rank {process.rank} at {rendezvous.address}. Give each process of a run a "
            "RANK of its own, and each run a MASTER_PORT of its own."
        )
    return run_store


def wait_for_all_ranks(process: ProcessEnv, store: Any, timeout_s: float) -> None:
    """Wait until every rank of the run has called this function. If a process writes to `store` why it does not start,
    raise that error on every rank instead, and likewise if ranks were started with different numbers of ranks. Raise
    PeerLostError if ranks are missing after `timeout_s`.
    """
    store = _TimedStore(store, timeout_s)
    try:
        _check_world_size(process, store)
        if store.add("num here", 1) == process.world_size:
            store.compare_set(_VERDICT, "", _ALL_BEGIN)
        _wait_for_key(store, _VERDICT, timeout_s, lambda: _refuse_if_stopped(process, store))
        verdict = store.get(_VERDICT).decode(errors="replace")
    except (TimeoutError, dist.DistError) as error:
        raise PeerLostError(
            f"{process.label} waited for its peers, but {_missing_ranks_text(process, store)} within "
            f"parallel.timeout_s={timeout_s:g}. Look at the output of the nodes on which they were started."
        ) from error
    if verdict != _ALL_BEGIN:
        _raise_refusal(process, store, verdict)


def _check_world_size(process: ProcessEnv, store: _TimedStore) -> None:
    """Raise UsageError, and write it to the store for the other ranks, if this process was started as one of another
    number of ranks than the first that came.
    """
    own_size = str(process.world_size)
    size: str = store.compare_set(_WORLD_SIZE, "", own_size).decode(errors="replace")[:_MAX_SIZE_CHARS]
    if size == own_size:
        return
    error = UsageError(
        f"{process.label} was started as one of {own_size} ranks, and another rank as one of {size}. Start all ranks "
        "with the same WORLD_SIZE."
    )
    store.set(_FEWEST_RANKS, min(own_size, size, key=lambda text: int(text) if text.isdecimal() else 0))
    store.compare_set(_VERDICT, "", f"{error.exit_code} {error}")
    _confirm_verdict(process, store, _SHORT_REFUSAL_WAIT_S if process.rank == 0 else 0.0)
    raise error


def raise_refusal(process: ProcessEnv, timeout_s: float, is_settled: Callable[[], bool]) -> None:
    """Wait until `is_settled()` returns True. If meanwhile another process writes to the run's store why it does not
    start, raise that error; raise PeerLostError after `timeout_s`. This process connects to the store without counting
    as a rank.
    """
    store = _TimedStore(open_run_store(process, timeout_s, as_rank=False), timeout_s)
    ends_s = time.monotonic() + timeout_s
    while not is_settled():
        try:
            if store.check([_VERDICT]):
                _raise_refusal(process, store, store.get(_VERDICT).decode(errors="replace"))
        except (TimeoutError, dist.DistError) as error:
            raise PeerLostError(f"{process.label} lost the store of its run. Look at the output of rank 0.") from error
        if time.monotonic() >= ends_s:
            raise PeerLostError(
                f"{process.label} waited for rank 0, which neither went on nor reported an error within "
                f"parallel.timeout_s={timeout_s:g}. Look at the output of rank 0."
            )
        time.sleep(_POLL_S)


def _raise_refusal(process: ProcessEnv, store: _TimedStore, verdict: str) -> NoReturn:
    """Raise the error of another process that does not start: `verdict` is the text that it has written to `store`,
    with its reason and exit code. Raise UsageError if the text is not of that form.
    """
    _confirm_verdict(process, store, _REFUSAL_WAIT_S if process.rank == 0 else 0.0)
    if (refusal := _REFUSAL.fullmatch(verdict)) is None:
        raise UsageError(
            f"{process.label} read an entry in the run's store that no process of this run has written. Keep other "
            "programs away from the port of MASTER_PORT, or set MASTER_PORT to another port."
        )
    exit_code, reason = int(refusal["exit_code"]), refusal["reason"]
    raise error_from_peer(exit_code, f"No process starts, because {reason}")


def _missing_ranks_text(process: ProcessEnv, store: _TimedStore) -> str:
    """Return the middle of a message about a failed start: which ranks have not joined the store, that all have but no
    decision was made, or that the store does not answer.
    """
    try:
        store.timeout_s = _MISSING_CHECK_S
        missing = [rank for rank in range(process.world_size) if not store.check([f"rank {rank}"])]
    except (TimeoutError, RuntimeError):
        return f"not all {process.world_size} processes have joined the run, or the process with their store has ended,"
    have = "has" if len(missing) == 1 else "have"
    return f"{ranks_text(missing)} of {process.world_size} {have} not joined" if missing else "no decision was made"


def report_refusal(process: ProcessEnv, error: LmtrainError, *, peers_fail_too: bool = False) -> None:
    """Write `error`, which keeps this process from starting, to the run's store, so that the other ranks raise it
    instead of waiting. Wait until they have read it: up to a minute, or with `peers_fail_too` (they find the same error
    by themselves) a few seconds.

    Nothing is raised if the store cannot be reached.
    """
    with suppress(LmtrainError, TimeoutError, dist.DistError):
        limit_s = _SHORT_REFUSAL_WAIT_S if peers_fail_too else _REFUSAL_WAIT_S
        store = _TimedStore(open_run_store(process, limit_s, raises_on_stop=False, as_rank=False), limit_s)
        reason = "was asked to stop" if isinstance(error, StoppedEarly) else "cannot start"
        store.compare_set(_VERDICT, "", f"{error.exit_code} {process.label} {reason}: {error}"[:_MAX_REASON_CHARS])
        _confirm_verdict(process, store, limit_s)


def _confirm_verdict(process: ProcessEnv, store: _TimedStore, wait_s: float) -> None:
    """Record in the store that this process has read the decision there: that all ranks start, or why a process does
    not. Wait up to `wait_s` until all processes have read it, and raise nothing if they have not.

    because: the store ends with rank 0, and a launcher ends its other ranks once one has ended
    """
    with suppress(TimeoutError, dist.DistError, ValueError):
        # because: if ranks were started with different numbers of ranks, the larger number may not be there
        num_ranks = int(store.get(_FEWEST_RANKS)) if store.check([_FEWEST_RANKS]) else process.world_size
        # because: a launcher counts for all its ranks, some of which may have counted themselves before it ended them
        if store.add("num heard", process.num_ranks) >= num_ranks:
            store.set(_READ_BY_ALL, "")
        if wait_s:
            _wait_for_key(store, _READ_BY_ALL, wait_s)


def _connect(process: ProcessEnv, rendezvous: Rendezvous, timeout_s: float) -> TCPStore:
    """Return the TCPStore at the rendezvous address. Rank 0 hosts it, unless torchrun's agent does; others connect to
    it.

    A second call on the host returns the store that it has opened.
    """
    is_host, listen_fd = process.rank == 0 and not rendezvous.held_by_launcher, rendezvous.listen_fd

    def new_client() -> TCPStore:
        return TCPStore(
            rendezvous.host, rendezvous.port, process.world_size, is_host,
            timedelta(seconds=timeout_s + _EXTRA_TORCH_S), wait_for_workers=False,
            master_listen_fd=listen_fd if is_host else None,
        )  # fmt: skip

    if not is_host:
        return new_client()
    with _open_stores_lock:
        if (rendezvous.host, rendezvous.port) not in _open_stores:
            if listen_fd is None:
                # because: TCPStore itself listens on every interface, which a run on one node does not need
                listen_fd = listen("127.0.0.1" if rendezvous.stays_on_node else "", rendezvous.port)
            _open_stores[rendezvous.host, rendezvous.port] = new_client()
        return _open_stores[rendezvous.host, rendezvous.port]


def _agree_on_token(process: ProcessEnv, rendezvous: Rendezvous, store: _TimedStore) -> str:
    """Return the run's token: rank 0 writes it to the store, the others read it. Raise UsageError if the store holds
    something else, or another token than this process was started with.
    """
    own_token = rendezvous.token or (secrets.token_hex(16) if process.rank == 0 else None)
    stored = store.compare_set(_RUN_ID_KEY, "", own_token) if process.rank == 0 else store.get(_RUN_ID_KEY)
    token: str = stored.decode(errors="replace")
    if not RUN_TOKEN.fullmatch(token) or (own_token or token) != token:
        raise UsageError(
            f"{process.label} found the token of another run at {rendezvous.address}, or something else in its place. "
            "Set MASTER_PORT to a port that no other run uses."
        )
    return token


def _raise_if_stopped() -> None:
    if name := received_stop():
        raise Stopped(name)


def _refuse_if_stopped(process: ProcessEnv, store: _TimedStore) -> None:
    """Write a refusal to the store if this process received a stop signal; without effect once all have started."""
    if name := received_stop():
        store.compare_set(_VERDICT, "", f"{StoppedEarly.exit_code} {process.label} was asked to stop: {name}")


class _TimedStore:
    """A store whose calls run in a thread with a timeout: torch itself would wait forever for a server that hangs.

    `poll` is called while a call is awaited, and may raise.
    """

    def __init__(self, store: Any, timeout_s: float, poll: Callable[[], None] = lambda: None) -> None:
        self._store, self.timeout_s, self._poll = store, timeout_s, poll

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)
        return lambda *args: _call_with_timeout(lambda: method(*args), self.timeout_s, self._poll)


def _wait_for_key(store: _TimedStore, key: str, timeout_s: float, poll: Callable[[], None] = lambda: None) -> None:
    """Wait until `key` is written to the store. `poll` is called again and again meanwhile, and may raise. Raise
    DistStoreError after `timeout_s`.

    because: a process that waits inside torch's own wait() handles no signals
    """
    ends_s, pause_s = time.monotonic() + timeout_s, 0.01
    while not store.check([key]):
        poll()
        if time.monotonic() >= ends_s:
            raise dist.DistStoreError(f"the key {key!r} of the store was not written within {timeout_s:g} seconds")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S)  # because: thousands of ranks may poll one store


def _call_with_timeout(call: Callable[[], T], timeout_s: float, poll: Callable[[], None]) -> T:
    """Run `call` in a thread and return its result or raise its error. `poll` is called again and again meanwhile, and
    may raise. Raise TimeoutError after `timeout_s`.
    """
    results: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put(call())
        except BaseException as error:
            results.put(error)

    threading.Thread(target=work, name="rendezvous", daemon=True).start()
    ends_s = time.monotonic() + timeout_s
    while True:
        poll()
        left_s = ends_s - time.monotonic()
        try:
            result = results.get(timeout=max(min(left_s, _POLL_S), 0.001))
        except queue.Empty:
            if left_s <= _POLL_S:
                raise TimeoutError from None
            continue
        if isinstance(result, BaseException):
            raise result
        return result
