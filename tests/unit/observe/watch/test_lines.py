"""Messages a line each, however they are cut on their way; what is no message ends the connection or is nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from lmtrain.observe.hang_watch.heartbeat_server import MAX_BYTES, LineConnection


@pytest.fixture
def pair() -> Iterator[tuple[LineConnection, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield LineConnection(ours), theirs


def test_what_comes_in_parts_and_what_comes_at_once(pair: tuple[LineConnection, socket.socket]) -> None:
    lines, theirs = pair
    theirs.sendall(b'{"a": 1}\n{"b"')
    assert lines.receive() == [{"a": 1}]
    theirs.sendall(b": 2}\n")
    assert lines.receive() == [{"b": 2}]
    assert not lines.has_ended
    theirs.close()
    assert lines.receive() == []
    assert lines.has_ended


def test_strangers_are_not_understood(pair: tuple[LineConnection, socket.socket]) -> None:
    lines, theirs = pair
    theirs.sendall(b"GET / HTTP/1.1\n\xff\xfe\n[1]\n7\n" + b"[" * 20_000 + b"\n")
    assert lines.receive() == []
    assert not lines.has_ended
    theirs.sendall(b"x" * (MAX_BYTES + 1))
    lines.receive()
    assert lines.has_ended


def test_who_does_not_read_is_given_up(pair: tuple[LineConnection, socket.socket]) -> None:
    lines, _ = pair
    for _ in range(200):
        lines.send({"text": "x" * 10_000})
    assert lines.has_ended
