"""The hub hears beats and decides; strangers without the run's secret are not heard."""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.hang_watch.hang_verdict import FAILED_KIND, HANG_KIND, LOST_KIND
from lmtrain.observe.hang_watch.heartbeat_server import Hub, LineConnection
from lmtrain.runfolder.file_names import PHASE_TIMES


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(selectors.DefaultSelector(), 0, "secret", str(tmp_path), 20.0, 2, single_node=True)
    yield hub
    for peer in list(hub.peers):
        hub.drop_peer(peer)
    hub.listener.close()
    hub.selector.close()


def met(hub: Hub) -> LineConnection:
    """Who has just connected, with what it has sent."""
    hub.listener.setblocking(True)
    hub.accept_peer()
    (peer,) = hub.peers
    peer.connection.setblocking(True)
    peer.connection.recv(1, socket.MSG_PEEK)
    peer.connection.setblocking(False)
    hub.receive_from(peer)
    return peer


def beat(phase: str = "backward", stood_s: float = 0.0, **more: Any) -> dict[str, Any]:
    facts = {"host": "n1", "phase": phase, "step": 7, "microbatch": -1, "stage": -1, "what": "", "count": 3}
    return {"beat": facts | {"cpu_s": 1.0, "stood_s": stood_s, "state": "running", "odd": None, "longest": {}} | more}


@pytest.mark.parametrize("end", [{"failed": "out of memory", "code": 74}, {"lost": "killed"}, {"left": True}])
def test_a_late_heartbeat_brings_no_rank_back(hub: Hub, end: dict[str, Any]) -> None:
    hub.handle_message(1, end)
    row = hub.rows[1]
    ended = (row.state, row.reason, row.code)
    assert row.state not in ("running", "stopped")
    hub.handle_message(1, beat("forward", step=8))
    row = hub.rows[1]
    assert (row.state, row.reason, row.code, row.step) == (*ended, 8)
    hub.handle_message(0, beat(state="stopped"))
    hub.handle_message(0, beat())
    assert hub.rows[0].state == "running"


def test_a_hang_is_told_to_all_and_written_down(hub: Hub, tmp_path: Path) -> None:
    hub.handle_message(0, beat("collective", 21.0, what="losses"))
    hub.handle_message(1, beat("backward", 19.0))
    hub.tick()
    assert hub.own_messages == []
    hub.handle_message(1, beat("backward", 21.0))
    hub.tick()
    hub.tick()
    (told,) = hub.own_messages
    assert (told["kind"], told["ranks"]) == (HANG_KIND, [1])
    assert Path(told["folder"]).parent == tmp_path / "hangs"
    summary = (Path(told["folder"]) / "summary.txt").read_text()
    assert "rank 1 on n1 has been in backward of step 7, for 21 s" in summary
    assert "rank 0 on n1" in summary


def test_one_that_is_gone_and_one_that_failed(hub: Hub) -> None:
    hub.handle_message(1, beat())
    hub.handle_message(1, {"failed": "no room", "code": 74})
    hub.handle_message(1, {"lost": "ended with exit code 74"})
    hub.tick()
    (told,) = hub.own_messages
    assert (told["kind"], told["verdict"]) == (FAILED_KIND, "rank 1 on n1 ended in backward of step 7: no room.")


def test_one_that_is_done_may_leave(hub: Hub) -> None:
    hub.handle_message(0, beat())
    hub.handle_message(1, {"done": True})
    hub.mark_lost(1, "is gone")
    hub.tick()
    assert hub.own_messages == []


def test_a_stop_is_told_to_all_others(hub: Hub) -> None:
    hub.handle_message(0, {"stop": "SIGTERM"})
    assert hub.own_messages == []
    hub.handle_message(1, {"stop": "SIGTERM"})
    assert hub.own_messages == [{"stop": "SIGTERM", "rank": 1}]


def test_only_who_knows_the_secret_is_heard(hub: Hub) -> None:
    for secret, heard in (("wrong", False), ("secret", True)):
        with socket.create_connection(("127.0.0.1", hub.port)) as connection:
            connection.sendall(json.dumps({"token": secret, "rank": 1} | beat()).encode() + b"\n")
            peer = met(hub)
            assert (1 in hub.rows) is heard
            assert bool(hub.peers) is heard
    hub.listener.setblocking(False)
    hub.tick()
    assert hub.verdict is None
    peer.connection.setblocking(True)
    peer.connection.recv(1, socket.MSG_PEEK)  # its end
    hub.receive_from(peer)
    hub.tick()
    (told,) = hub.own_messages
    assert (told["kind"], told["ranks"]) == (LOST_KIND, [1])


def test_times_are_for_the_next_start_with_as_many(hub: Hub, tmp_path: Path) -> None:
    longest = {"save": 41.0, "nonsense": "x", "forward": -1, "load": float("inf"), "data": 10**999}
    hub.handle_message(1, beat(longest=longest))
    hub.save_times()
    assert json.loads((tmp_path / PHASE_TIMES).read_text()) == {"processes": 2, "longest_s": {"save": 41.0}}
    for world_size, known in ((2, {"save": 41.0}), (3, {})):
        other = Hub(selectors.DefaultSelector(), 0, "secret", str(tmp_path), 20.0, world_size, single_node=True)
        other.listener.close()
        assert (other.limits.earlier_s, other.limits.longest_s) == (known, {})
        other.save_times()
        assert json.loads((tmp_path / PHASE_TIMES).read_text())["longest_s"] == known


def test_limits_are_in_force_once_a_step_is_done(hub: Hub) -> None:
    for rank, phase, step in ((0, "collective", -1), (1, "load", -1), (0, "collective", 7), (1, "forward", 7)):
        hub.handle_message(rank, beat(phase, step=step, longest={"load": 0.2}))
        assert not hub.limits.in_force
    hub.handle_message(0, beat("data", step=8))
    assert hub.limits.in_force


@pytest.mark.parametrize("text", ["", "[]", "{", '{"processes": 2, "longest_s": 7}', "[" * 30_000])
def test_times_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / PHASE_TIMES).write_text(text)
    hub = Hub(selectors.DefaultSelector(), 0, "secret", str(tmp_path), 20.0, 2, single_node=True)
    hub.listener.close()
    assert hub.limits.earlier_s == {}


@pytest.mark.parametrize("value", [None, "x", [1], {"a": 1}, float("inf"), float("nan"), 1 << 2000], ids=type)
def test_a_beat_that_is_none_changes_nothing(hub: Hub, value: object) -> None:
    """Damage one field of a heartbeat after the other; what can be read all the same is of its type."""
    hub.handle_message(1, beat())
    types = {key: type(each) for key, each in vars(hub.rows[1]).items()}
    for key in (*beat()["beat"], "way"):
        hub.handle_message(1, {"beat": beat()["beat"] | {key: value}})
        hub.handle_message(1, {"beat": {name: each for name, each in beat()["beat"].items() if name != key}})
    assert {key: type(each) for key, each in vars(hub.rows[1]).items()} == types
    hub.tick()
    assert hub.verdict is None
