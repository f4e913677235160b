"""A store that is silent, another run's, or written to by a stranger is told from the run's own, and in time."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lmtrain.errors import LmtrainError, MissingInputError, OutputError, PeerLostError, StoppedEarly, UsageError
from lmtrain.runtime.processes import rendezvous
from lmtrain.runtime.processes.process_environment import RUN_TOKEN, ProcessEnv
from lmtrain.runtime.processes.process_group import open_process_group
from lmtrain.runtime.processes.rendezvous import open_run_store, report_refusal, wait_for_all_ranks
from lmtrain.runtime.processes.stop_signals import Stopped
from tests.layouts.workers import Pool
from tests.marks import wide

TOKEN, OTHER = "0123456789abcdef" * 2, "f" * 32
NO_ADDRESS = b"\xff" * 64  # gloo reads a length from the front


def rank(number: int, size: int = 2) -> ProcessEnv:
    return ProcessEnv(number, size, number, "torchrun", "here")


def held_store() -> Any:
    """What torchrun's agent holds for its processes."""
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=180), wait_for_workers=False)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    held = held_store()
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    return PrefixStore("attempt 0", held)


def test_a_silent_listener_is_given_no_longer_than_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(silent.getsockname()[1]))
        began = time.monotonic()
        with pytest.raises(PeerLostError, match=r"rank 1 on here found no store of its run at 127\.0\.0\.1:\d+ within "
                                                r"parallel\.timeout_s=0\.2: .*MASTER_PORT"):  # fmt: skip
            open_run_store(rank(1), 0.2)
        assert time.monotonic() - began < 20


def test_a_rank_0_that_does_not_come(store: Any) -> None:
    with pytest.raises(PeerLostError, match="rank 0 has not opened it"):
        open_run_store(rank(1), 0.2)


def test_rank_0_that_is_stopped_as_it_meets_says_so_in_the_store_that_it_has_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened, stops = [], [None, "SIGTERM"]

    def opens(*given: Any, **named: Any) -> TCPStore:
        opened.append(TCPStore(*given, **named))
        return opened[-1]

    monkeypatch.setattr(rendezvous, "TCPStore", opens)
    # the stop comes once the store is open
    monkeypatch.setattr(rendezvous, "received_stop", lambda: stops[bool(opened)])
    listens = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(listens.getsockname()[1]))
    monkeypatch.setenv("LMTRAIN_STORE_FD", str(listens.detach()))  # as our launcher hands it on
    with pytest.raises(Stopped):
        open_run_store(rank(0, 1), 20.0)
    report_refusal(rank(0, 1), StoppedEarly("SIGTERM"))
    assert len(opened) == 1


def test_rank_0_makes_a_token_that_the_others_read(store: Any) -> None:
    found = []
    other = threading.Thread(target=lambda: found.append(open_run_store(rank(1), 20.0)))
    other.start()
    mine = open_run_store(rank(0), 20.0)
    other.join()
    assert RUN_TOKEN.fullmatch(store.get("run token").decode())
    mine.set("a", "b")
    assert found[0].get("a") == b"b"


def test_a_run_started_with_a_token_takes_no_other(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMTRAIN_RUN_TOKEN", TOKEN)
    open_run_store(rank(0), 20.0)
    assert store.get("run token").decode() == TOKEN
    open_run_store(rank(1), 20.0)
    monkeypatch.setenv("LMTRAIN_RUN_TOKEN", OTHER)
    with pytest.raises(UsageError, match=r"rank 1 on here found the token of another run at .*Set MASTER_PORT"):
        open_run_store(rank(1), 20.0)
    with pytest.raises(UsageError, match="rank 0 on here found the token of another run"):
        open_run_store(rank(0), 20.0)


@pytest.mark.parametrize("written", ["x", "", "F" * 32, OTHER + "0", b"\xff" * 64])
def test_what_a_stranger_wrote_is_no_token(store: Any, written: str | bytes) -> None:
    store.set("run token", written)
    with pytest.raises(UsageError, match="or something else in its place"):
        open_run_store(rank(1), 20.0)
    if written:
        with pytest.raises(UsageError, match="rank 0 on here found the token of another run"):
            open_run_store(rank(0), 20.0)


def test_a_rank_that_comes_twice_is_refused(store: Any) -> None:
    open_run_store(rank(0), 20.0)
    open_run_store(rank(1, 3), 20.0)
    with pytest.raises(UsageError, match=r"rank 1 on here found a second rank 1 at .*MASTER_PORT of its own"):
        open_run_store(rank(1, 3), 20.0)


@pytest.mark.parametrize("sizes", [pytest.param((2, 3), marks=pytest.mark.wide), (3, 2), (3, 2, 3)])
def test_ranks_that_were_started_as_other_numbers_are_all_told_so(store: Any, sizes: tuple[int, ...]) -> None:
    for error in together(*[None] * len(sizes), sizes=sizes).values():
        assert isinstance(error, LmtrainError)
        assert error.exit_code == 2
        assert re.search(r"rank \d on here was started as one of \d ranks, and another rank as one of \d\.", str(error))


def begin_as(process: ProcessEnv, refused: LmtrainError | None, said: dict[int, object]) -> None:
    """One of the ranks of the tests below; what it ends with, or None where it may begin."""
    said[process.rank] = refused
    if refused is not None:
        report_refusal(process, refused)
        return
    try:
        wait_for_all_ranks(process, open_run_store(process, 20.0), 20.0)
    except LmtrainError as error:
        said[process.rank] = error


def together(*refused: LmtrainError | None, sizes: Sequence[int] = ()) -> dict[int, object]:
    said: dict[int, object] = {}
    ranks = [rank(number, sizes[number] if sizes else len(refused)) for number in range(len(refused))]
    threads = [threading.Thread(target=begin_as, args=(*one, said)) for one in zip(ranks, refused, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    return said


def test_all_begin_once_the_last_is_here(store: Any) -> None:
    assert together(None, None, None) == {0: None, 1: None, 2: None}


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("held_by", ["launcher", "rank 0"])
def test_where_one_is_refused_all_hear_why(store: Any, monkeypatch: pytest.MonkeyPatch, held_by: str, who: int) -> None:
    if held_by == "rank 0":
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
        with socket.create_server(("127.0.0.1", 0)) as free:
            monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    began = time.monotonic()
    refused: list[LmtrainError | None] = [None, None, None]
    refused[who] = MissingInputError("data.bin does not exist. Copy it.")
    said = together(*refused)
    for other in {0, 1, 2} - {who}:
        error = said[other]
        assert isinstance(error, LmtrainError)
        assert error.exit_code == 66
        assert str(error).startswith(f"No process starts, because rank {who} on here cannot start: data.bin does not")
    assert time.monotonic() - began < 15  # seconds before anything would have timed out


def test_the_first_of_several_that_are_refused_is_named(store: Any) -> None:
    error = together(None, OutputError("full"), OutputError("full"))[0]
    assert isinstance(error, OutputError)
    assert str(error).endswith(("rank 1 on here cannot start: full", "rank 2 on here cannot start: full"))


@pytest.mark.parametrize("who", [2, *wide(0)])  # rank 0 stays until the others have heard, or for seconds
def test_a_launcher_that_is_refused_speaks_for_its_ranks(store: Any, who: int) -> None:
    """Two of four ranks, one of which may have come before its launcher ended it; the others wait for none of them."""
    node = ProcessEnv(who, 4, 0, "torchrun", "n2", num_ranks=2)
    others = [ProcessEnv(number, 4, number, "torchrun", "here") for number in {0, 1, 2, 3} - {who, who + 1}]
    said: dict[int, object] = {}
    threads = [threading.Thread(target=begin_as, args=(one, None, said)) for one in others]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    if who > 0:
        open_run_store(replace(node, num_ranks=1), 20.0)
    report_refusal(node, MissingInputError("data.bin does not exist. Copy it."))
    for thread in threads:
        thread.join(timeout=60)
    for one in others:
        assert str(said[one.rank]).startswith("No process starts, because node n2 cannot start: data.bin does not")
    assert time.monotonic() - began < 15  # seconds before anything would have timed out


def test_a_refusal_that_nobody_can_hear_is_none_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        report_refusal(rank(0), MissingInputError("gone"))


def test_ranks_that_do_not_come_are_waited_for_in_time(store: Any) -> None:
    with pytest.raises(PeerLostError, match=r"waited for its peers, but rank 1 of 2 has not joined within .*_s=0\.2\."):
        wait_for_all_ranks(rank(0), open_run_store(rank(0), 20.0), 0.2)


@contextmanager
def passes_on(port: int, stands_still: threading.Event) -> Iterator[int]:
    """A port at which that other one is reached, until it no longer answers."""

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while (data := source.recv(1 << 16)) and not stands_still.is_set():
                target.sendall(data)

    def answer() -> None:
        ends = [ended.enter_context(one) for one in (front.accept()[0], socket.create_connection(("127.0.0.1", port)))]
        for one, other in (ends, ends[::-1]):
            threading.Thread(target=pump, args=(one, other), daemon=True).start()

    with ExitStack() as ended:
        front = ended.enter_context(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=answer, daemon=True).start()
        yield int(front.getsockname()[1])


def test_a_store_that_stops_answering_is_not_waited_for_without_end(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stands_still = threading.Event()
    with passes_on(store.underlying_store.port, stands_still) as port:
        monkeypatch.setenv("MASTER_PORT", str(port))
        found = open_run_store(rank(0), 20.0)
        stands_still.set()
        with pytest.raises(PeerLostError, match=r"not all 2 processes have joined the run, or the process with their"):
            wait_for_all_ranks(rank(0), found, 0.2)


@pytest.mark.parametrize("written", ["", "0 no code", "go", b"\xff" * 64])
def test_what_a_stranger_wrote_is_no_verdict(store: Any, written: str | bytes) -> None:
    mine = open_run_store(rank(0), 20.0)
    mine.set("verdict", written)
    mine.add("num heard", 1)  # because: rank 1 is not here to hear it
    with pytest.raises(UsageError, match="rank 0 on here read an entry in the run's store that no process of this"):
        wait_for_all_ranks(rank(0), mine, 20.0)


def begin(port: int) -> str:
    """Rank 0 of two, in a process of its own."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    old = dict(os.environ)
    os.environ.update(told)
    try:
        with open_process_group(rank(0), torch.device("cpu"), 20.0):
            return "met"
    except LmtrainError as error:
        return f"{error.exit_code} {error}"
    finally:
        os.environ.clear()
        os.environ.update(old)


@pytest.mark.wide
def test_a_stranger_who_has_read_the_token_ends_the_run_with_a_message(pool: Pool) -> None:
    held = held_store()
    store = PrefixStore("attempt 0", held)

    def write() -> None:
        token = store.get("run token").decode()
        theirs: Any = PrefixStore(token, store)
        if theirs.add("num here", 1) == 2:
            theirs.set("verdict", "all begin")
        theirs.set("0//cpu//0/1", NO_ADDRESS)  # where this torch looks for rank 1

    stranger = threading.Thread(target=write)
    stranger.start()
    said = pool.run(f"{__name__}:begin", 1, {"port": held.port})[0]
    stranger.join()
    assert said.startswith("2 rank 0 on here read an address of a peer that no process of this run has written.")
