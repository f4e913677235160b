"""The hub of the watchdog on rank 0, which receives heartbeats and decides, and its line protocol, used on all ranks.

Called by watchdog_companion_process.py; start_companion_and_raise_verdict.py uses the texts of verdicts. Messages
between a rank, its companion and the hub are one JSON object per line, over sockets that never block; a line that is
too long ends the connection. The hub accepts a peer's messages only after the run's token, and reads only numbers and
short texts from them, which it uses for nothing but verdicts.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from _thread import start_new_thread
from contextlib import suppress

from lmtrain.errors import PeerLostError
from lmtrain.observe.hang_watch.hang_verdict import (
    DONE,
    FAILED,
    FAILED_KIND,
    HANG_KIND,
    LOST,
    RUNNING,
    STOPPED,
    Limits,
    RankRow,
    Verdict,
    judge,
)
from lmtrain.runfolder import stop_json_writer
from lmtrain.runfolder.file_names import HANGS, PHASE_TIMES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_BYTES = 1 << 16  # longest line
_CULPRIT_AFTER_S = 1.0  # because: the news of a lost peer may come a moment after the error that the loss causes
_TOKEN_S = 10.0  # seconds for a new connection to send the token
_HEARTBEAT_S = 1.0  # seconds between two heartbeats of the hub
_MAX_TIME_S = 1e9  # a longer phase is damage: it would be waited for without end


# ---- connections -----------------------------------------------------------------------------------------------------


class LineConnection:
    """A connection that sends and receives JSON lines. `has_ended` is set once the peer is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.setblocking(False)
        self.has_ended, self.opened_at = False, time.monotonic()
        self.rank: int | None = None  # rank of the peer, once it has sent the run's token
        self._received, self._unsent = b"", b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def receive(self) -> list[dict[str, Any]]:
        """Return the JSON objects of all whole lines received so far, without waiting. Lines that are not JSON objects
        are skipped. Set `has_ended` if the peer has closed the connection or sent too long a line.
        """
        while not self.has_ended:
            try:
                data = self.connection.recv(MAX_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._received += data
            if not data or len(self._received) > 8 * MAX_BYTES:
                self.has_ended = True
        *lines, self._received = self._received.split(b"\n")
        if len(self._received) > MAX_BYTES:
            self.has_ended = True
        return [message for line in lines if isinstance(message := _parse_json(line), dict)]

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message, and send as much as possible without waiting. A peer that does not read is disconnected."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send as much of the queued messages as the socket accepts without waiting. Set `has_ended` if the peer is
        gone or does not read.
        """
        while self._unsent and not self.has_ended:
            try:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
            except BlockingIOError:
                break
            except OSError:
                self.has_ended = True
        if len(self._unsent) > 8 * MAX_BYTES:
            self.has_ended = True

    @property
    def is_idle(self) -> bool:
        """True if nothing is left to send, or the connection has ended."""
        return self.has_ended or not self._unsent

    def close(self) -> None:
        self.has_ended = True
        self.connection.close()


def _parse_json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


# ---- verdicts as text and in stop.json -------------------------------------------------------------------------------


def verdict_text(verdict: dict[str, Any]) -> str:
    """Return the error message for the user: which rank is to blame and why, the folder with the stacks of all
    processes if there is one, and that the same command continues the run. `verdict` is the dict in which the
    watchdog's server on rank 0 sends its decision.
    """
    folder = verdict.get("folder")
    look = f"The stacks of all processes are in {folder}; start" if folder else "Start"
    return f"{verdict['verdict']} {look} the same command again to go on."


def write_stop(folder: str, verdict: dict[str, Any]) -> None:
    """Write to stop.json in the run folder `folder` which rank ended the run and why, unless that file exists already.
    `verdict` is the dict in which the watchdog's server on rank 0 sends its decision. Errors of the disk are ignored.
    """
    rank, stacks = (verdict.get("ranks") or [0])[0], verdict.get("folder")
    where = {"rank": rank, "hang": stacks} if stacks else {"rank": rank, "lost": rank}
    with suppress(OSError):  # because: a failing disk must not keep the processes from being ended
        text, code = verdict_text(verdict), PeerLostError.exit_code
        stop_json_writer.write(folder, text, code, replace=False, fsync=False, **where)


# ---- the hub ---------------------------------------------------------------------------------------------------------


class Hub:
    """The watchdog's server on rank 0: a table of all ranks' states, the connections to companions, and the verdict."""

    def __init__(
        self, selector: selectors.BaseSelector, rank: int, token: str, folder: str, timeout_s: float, world_size: int,
        *, single_node: bool,
    ) -> None:  # fmt: skip
        """Open the hub's port. `selector` will call the hub for each new connection and each message; `folder` is the
        run folder. With `single_node` only this machine can connect.
        """
        self.selector, self.rank, self.token, self.folder, self.world_size = selector, rank, token, folder, world_size
        self.limits = Limits(timeout_s, _read_times(folder, world_size))
        self.rows: dict[int, RankRow] = {}
        self.message_times: dict[int, float] = {}
        self.peers: list[LineConnection] = []
        self.culprit_asked_at: float | None = None
        self.stop_request: dict[str, Any] | None = None  # the newest stop request that a rank received
        self.verdict: Verdict | None = None
        self.own_messages: list[dict[str, Any]] = []  # messages for this process's own rank
        self.saved_at = self.ticked_at = time.monotonic()
        self.heartbeat_at = 0.0
        family = socket.AF_INET if single_node or not socket.has_dualstack_ipv6() else socket.AF_INET6
        self.listener = socket.create_server(
            ("127.0.0.1" if single_node else "", 0), family=family, backlog=1024,
            dualstack_ipv6=family == socket.AF_INET6,
        )  # fmt: skip
        self.listener.setblocking(False)
        self.port: int = self.listener.getsockname()[1]
        selector.register(self.listener, selectors.EVENT_READ, self.accept_peer)

    def accept_peer(self) -> None:
        """Accept the connection of a rank's companion (its watchdog process). It is closed again unless its first
        message has the run's secret token.
        """
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        peer = LineConnection(connection)
        self.peers.append(peer)
        self.selector.register(connection, selectors.EVENT_READ, lambda: self.receive_from(peer))

    def receive_from(self, peer: LineConnection) -> None:
        """Handle the messages that a rank's companion (its watchdog process) has sent over the connection `peer`. If it
        has disconnected, record its rank as lost.
        """
        for message in peer.receive():
            if peer.rank is None:
                rank = message.get("rank")
                if message.get("token") != self.token or not isinstance(rank, int) or not 0 <= rank < self.world_size:
                    peer.has_ended = True
                    break
                peer.rank = rank
                if self.stop_request is not None:  # because: a rank may connect after the others have received it
                    peer.send(self.stop_request)
            self.handle_message(peer.rank, message)
        if peer.has_ended:
            self.drop_peer(peer)
            if peer.rank is not None:
                self.mark_lost(peer.rank, "is gone, and its companion too, as if its node had failed")

    def drop_peer(self, peer: LineConnection) -> None:
        """Close `peer`, the connection to a rank's companion (its watchdog process), and listen to it no longer. Do
        nothing if it was dropped before.
        """
        if peer in self.peers:
            self.peers.remove(peer)
            self.selector.unregister(peer.connection)
            peer.close()

    def handle_message(self, rank: int, message: dict[str, Any]) -> None:
        """Handle a message from the companion (the watchdog process) of rank `rank`: a heartbeat, a stop request, the
        end of the rank, or the question which rank is to blame for a failed collective.
        """
        self.message_times[rank] = time.monotonic()
        if isinstance(heartbeat := message.get("beat"), dict):
            try:
                self.rows[rank] = _parse_heartbeat(rank, heartbeat, self.rows.get(rank))
            except (LookupError, TypeError, ValueError, OverflowError):
                return
            self.limits.record_times(_parse_times(heartbeat.get("longest")))
            self.limits.record_step(self.rows[rank].step)
        row = self.rows.setdefault(rank, RankRow(rank))
        if isinstance(name := message.get("stop"), str):
            self.stop_request = {"stop": name[:100], "rank": rank}
            self.send_to_all(self.stop_request, except_rank=rank)
        if message.get("done") or message.get("left"):
            row.state = DONE
        if isinstance(error_text := message.get("failed"), str):
            code = message.get("code")
            row.state, row.reason, row.code = FAILED, error_text[:2000], code if isinstance(code, int) else 70
        if isinstance(exit_text := message.get("lost"), str):
            self.mark_lost(rank, exit_text[:200])
        if "asks" in message:
            row.asks_culprit = True
            self.culprit_asked_at = self.culprit_asked_at or time.monotonic()

    def mark_lost(self, rank: int, reason: str) -> None:
        """Record that rank `rank` was lost without a report of its end; `reason` is the text to show. Do nothing if its
        end, or its loss, is recorded already.
        """
        row = self.rows.setdefault(rank, RankRow(rank))
        if row.state in (RUNNING, STOPPED):
            row.state, row.reason = LOST, reason

    def send_to_all(self, message: dict[str, Any], except_rank: int = -1) -> None:
        """Send `message` to the companions (watchdog processes) of all ranks except `except_rank`. For this process's
        own rank, append it to `own_messages`.
        """
        for peer in self.peers:
            if peer.rank is not None and peer.rank != except_rank:
                peer.send(message)
        if except_rank != self.rank:
            self.own_messages.append(message)

    def tick(self) -> None:
        """Do the periodic work of the watchdog's server, twice a second: send heartbeats, update for how long each rank
        has been silent, decide whether ranks are to blame, and once a minute write the longest time of each phase to
        the run folder.
        """
        now = time.monotonic()
        elapsed_s, self.ticked_at = now - self.ticked_at, now
        if elapsed_s > 2.0:  # because: while this process was not scheduled, it could not receive heartbeats
            self.message_times = {rank: at + elapsed_s for rank, at in self.message_times.items()}
        is_due = now - self.heartbeat_at > _HEARTBEAT_S
        self.heartbeat_at = now if is_due else self.heartbeat_at
        for peer in list(self.peers):
            peer.flush()
            if is_due and peer.rank is not None and peer.is_idle:
                peer.send({"here": True})
            if peer.rank is None and now - peer.opened_at > _TOKEN_S:
                self.drop_peer(peer)
        for rank, row in self.rows.items():
            row.silent_s = now - self.message_times[rank] if row.state == RUNNING else 0.0
        if self.verdict is None:
            self.decide(now)
        if now - self.saved_at > 60:
            self.saved_at = now
            start_new_thread(self.save_times, ())  # because: a hanging disk must not block the hub

    def decide(self, now: float) -> None:
        """Decide whether ranks are to blame for a hang or a failure. If so, send this verdict to all ranks and write it
        to the run folder. `now` is the monotonic time in seconds.
        """
        culprit_asked = self.culprit_asked_at is not None and now - self.culprit_asked_at > _CULPRIT_AFTER_S
        verdict = judge(list(self.rows.values()), self.limits, culprit_asked)
        if verdict is None:
            if culprit_asked:
                self.culprit_asked_at = None
                self.send_to_all({"verdict": None})
            return
        self.verdict = verdict
        message: dict[str, Any] = {"verdict": verdict.text, "kind": verdict.kind, "ranks": verdict.ranks[:1000]}
        if verdict.kind == HANG_KIND:
            step = max(row.step for row in self.rows.values())
            place = f"step_{step}" if step >= 0 else verdict.rows[0].phase
            message["folder"] = os.path.join(self.folder, HANGS, f"{place}-{time.strftime('%Y%m%dT%H%M%S')}")
        if verdict.kind != FAILED_KIND and self.stop_request is None:
            write_stop(self.folder, message)  # because: the launcher reads it once all ranks have ended
        self.send_to_all(message)
        if verdict.kind == HANG_KIND:
            self.write_summary(verdict, message["folder"])

    def write_summary(self, verdict: Verdict, folder: str) -> None:
        """Write summary.txt to `folder`, next to the stacks: the verdict, what each rank was doing, and the time
        limits.
        """
        lines = [
            verdict.text, "", "What each process was doing when this was decided:", "",
            *(
                f"{row.who:24} {row.state:8} {row.still_s:8.1f} s in {row.place}; {row.count} collectives so far, "
                f"{row.cpu_s:.1f} s of CPU time, last heard {row.silent_s:.1f} s ago"
                for row in sorted(self.rows.values(), key=lambda row: row.rank)
            ),
            "", "Limits in force, in seconds (all other phases have parallel.timeout_s):", "",
            *(f"{key:48} {self.limits.limit_s(key):8.1f}" for key in sorted(self.limits.longest_s)), "",
        ]  # fmt: skip
        write_file(folder, "summary.txt", "\n".join(lines).encode())

    def save_times(self) -> None:
        """Write the longest time that each phase and collective has taken to the run folder. The next start of the run
        derives its time limits from them.
        """
        path = os.path.join(self.folder, PHASE_TIMES)
        # because: the run folder may not exist yet, or its disk be full; then the next start learns the times anew
        with suppress(OSError):
            with open(f"{path}.new", "w") as file:
                longest = self.limits.earlier_s | self.limits.longest_s
                times = {key: round(seconds, 3) for key, seconds in sorted(longest.items())}
                json.dump({"processes": self.world_size, "longest_s": times}, file, indent=1)
            os.replace(f"{path}.new", path)


def write_file(folder: str, name: str, data: bytes) -> None:
    """Write `data` to the file `name` in `folder`, and create the folder if needed. Errors are ignored, because the run
    is ending anyway.
    """
    with suppress(OSError):  # because: a failing disk must not keep the processes from being ended
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)


def _parse_heartbeat(rank: int, heartbeat: dict[str, Any], previous: RankRow | None) -> RankRow:
    misordered = heartbeat.get("odd")
    row = RankRow(
        rank, str(heartbeat["host"])[:100], str(heartbeat["phase"])[:20], int(heartbeat["step"]),
        int(heartbeat["microbatch"]), int(heartbeat["stage"]), str(heartbeat["what"])[:48], float(heartbeat["stood_s"]),
        STOPPED if heartbeat["state"] == STOPPED else RUNNING, int(heartbeat["count"]),
        (int(misordered[0]), str(misordered[1])[:48], str(misordered[2])[:48]) if misordered else None,
        cpu_s=float(heartbeat["cpu_s"]), order=_parse_order(heartbeat.get("way")),
    )  # fmt: skip
    if previous is not None:
        row.asks_culprit = previous.asks_culprit
        if previous.state not in (RUNNING, STOPPED):
            row.state, row.reason, row.code = previous.state, previous.reason, previous.code
    return row


def _parse_order(received: Any) -> tuple[int, int, dict[int, int]] | None:
    if not received:
        return None
    step, previous, entries = received
    return int(step), int(previous), {int(number): int(checksum) for number, checksum in entries[:64]}


def _parse_times(received: object) -> dict[str, float]:
    if not isinstance(received, dict):
        return {}
    times = list(received.items())[:64]
    numbers = {str(key)[:48]: value for key, value in times if isinstance(value, int | float)}
    return {key: float(value) for key, value in numbers.items() if 0 <= value < _MAX_TIME_S}


def _read_times(folder: str, world_size: int) -> dict[str, float]:
    try:
        with open(os.path.join(folder, PHASE_TIMES)) as file:
            saved = json.loads(file.read(1 << 16))
        return _parse_times(saved.get("longest_s")) if saved.get("processes") == world_size else {}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
