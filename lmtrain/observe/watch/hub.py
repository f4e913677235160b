"""The hub of the watchdog on rank 0, which receives heartbeats and decides, and its line protocol, used on all ranks.

Called by companion; guard uses the texts of verdicts. Messages between a rank, its companion and the hub are one JSON
object per line, over sockets that never block; a line that is too long ends the connection. The hub accepts a peer's
messages only after the run's token, and reads only numbers and short texts from them, which it uses for nothing but
verdicts.
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
from lmtrain.observe.watch.judge import (
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
from lmtrain.runfolder import stop
from lmtrain.runfolder.names import HANGS, PHASE_TIMES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_BYTES = 1 << 16  # longest line
_ASKED_S = 1.0  # because: the news of a lost peer may come a moment after the error that the loss causes
_UNKNOWN_S = 10.0  # seconds for a new connection to send the token
_HERE_S = 1.0  # seconds between two heartbeats of the hub


# ---- connections -----------------------------------------------------------------------------------------------------


class Lines:
    """A connection that sends and receives JSON lines. `ended` is set once the peer is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.setblocking(False)
        self.ended = False
        self.rank: int | None = None  # rank of the peer, once it has sent the run's token
        self._in, self._out = b"", b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def read(self) -> list[dict[str, Any]]:
        """Return the objects received so far, without waiting. Lines that are not JSON objects are skipped."""
        while not self.ended:
            try:
                data = self.connection.recv(MAX_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._in += data
            if not data or len(self._in) > 8 * MAX_BYTES:
                self.ended = True
        *whole, self._in = self._in.split(b"\n")
        if len(self._in) > MAX_BYTES:
            self.ended = True
        return [found for line in whole if isinstance(found := _parsed(line), dict)]

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message, and send as much as possible without waiting. A peer that does not read is disconnected."""
        self._out += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        while self._out and not self.ended:
            try:
                self._out = self._out[self.connection.send(self._out) :]
            except BlockingIOError:
                break
            except OSError:
                self.ended = True
        if len(self._out) > 8 * MAX_BYTES:
            self.ended = True

    @property
    def idle(self) -> bool:
        """True if nothing is left to send, or the connection has ended."""
        return self.ended or not self._out

    def close(self) -> None:
        self.ended = True
        self.connection.close()


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


# ---- verdicts as text and in stop.json -------------------------------------------------------------------------------


def explained(verdict: dict[str, Any]) -> str:
    """Return the verdict's text with the place of the stacks and the way to continue."""
    folder = verdict.get("folder")
    look = f"The stacks of all processes are in {folder}; start" if folder else "Start"
    return f"{verdict['verdict']} {look} the same command again to go on."


def write_stop(folder: str, verdict: dict[str, Any]) -> None:
    """Write the verdict to stop.json unless the file exists already."""
    rank, stacks = (verdict.get("ranks") or [0])[0], verdict.get("folder")
    where = {"rank": rank, "hang": stacks} if stacks else {"rank": rank, "lost": rank}
    with suppress(OSError):  # because: a failing disk must not keep the processes from being ended
        stop.write(folder, explained(verdict), PeerLostError.exit_code, replace=False, fsync=False, **where)


# ---- the hub ---------------------------------------------------------------------------------------------------------


class Hub:
    def __init__(self, rank: int, token: str, folder: str, timeout_s: float, world_size: int, *, on_node: bool) -> None:
        self.rank, self.token, self.folder, self.world_size = rank, token, folder, world_size
        self.limits = Limits(timeout_s, _read_times(folder, world_size))
        self.rows: dict[int, RankRow] = {}
        self.heard: dict[int, float] = {}
        self.peers: list[Lines] = []
        self.since: dict[int, float] = {}
        self.asked_at: float | None = None
        self.stop: dict[str, Any] | None = None  # the newest stop request that a rank received
        self.verdict: Verdict | None = None
        self.told: list[dict[str, Any]] = []  # messages for this process's own rank
        self.saved_at = self.ticked_at = time.monotonic()
        self.here_at = 0.0
        family = socket.AF_INET if on_node or not socket.has_dualstack_ipv6() else socket.AF_INET6
        self.listener = socket.create_server(
            ("127.0.0.1" if on_node else "", 0), family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6
        )
        self.listener.setblocking(False)
        self.port: int = self.listener.getsockname()[1]

    def register(self, selector: selectors.BaseSelector) -> None:
        self.selector = selector
        selector.register(self.listener, selectors.EVENT_READ, self.accept)

    def accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        peer = Lines(connection)
        self.peers.append(peer)
        self.since[peer.fileno()] = time.monotonic()
        self.selector.register(connection, selectors.EVENT_READ, lambda: self.hear_from(peer))

    def hear_from(self, peer: Lines) -> None:
        for message in peer.read():
            if peer.rank is None:
                rank = message.get("rank")
                if message.get("token") != self.token or not isinstance(rank, int) or not 0 <= rank < self.world_size:
                    peer.ended = True
                    break
                peer.rank = rank
                if self.stop is not None:  # because: a rank may connect after the stop request was sent to the others
                    peer.send(self.stop)
            self.hear(peer.rank, message)
        if peer.ended:
            self.forget(peer)
            if peer.rank is not None:
                self.lose(peer.rank, "is gone, and what watched it too, as when its node fails")

    def forget(self, peer: Lines) -> None:
        if peer in self.peers:
            self.peers.remove(peer)
            self.selector.unregister(peer.connection)
            peer.close()

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        """Handle a message from a rank's companion, this one's included: heartbeat, stop request, end or question."""
        self.heard[rank] = time.monotonic()
        if isinstance(beat := message.get("beat"), dict):
            try:
                self.rows[rank] = _row(rank, beat, self.rows.get(rank))
            except (LookupError, TypeError, ValueError):
                return
            self.limits.learn(_times(beat.get("longest")))
            self.limits.reach(self.rows[rank].step)
        row = self.rows.setdefault(rank, RankRow(rank))
        if isinstance(name := message.get("stop"), str):
            self.stop = {"stop": name[:100], "rank": rank}
            self.tell_all(self.stop, but=rank)
        if message.get("done") or message.get("left"):
            row.state = DONE
        if isinstance(said := message.get("failed"), str):
            code = message.get("code")
            row.state, row.said, row.code = FAILED, said[:2000], code if isinstance(code, int) else 70
        if isinstance(how := message.get("lost"), str):
            self.lose(rank, how[:200])
        if "asks" in message:
            row.asks = True
            self.asked_at = self.asked_at or time.monotonic()

    def lose(self, rank: int, how: str) -> None:
        row = self.rows.setdefault(rank, RankRow(rank))
        if row.state in (RUNNING, STOPPED):
            row.state, row.said = LOST, how

    def tell_all(self, message: dict[str, Any], but: int = -1) -> None:
        for peer in self.peers:
            if peer.rank is not None and peer.rank != but:
                peer.send(message)
        if but != self.rank:
            self.told.append(message)

    def tick(self) -> None:
        now = time.monotonic()
        slept, self.ticked_at = now - self.ticked_at, now
        if slept > 2.0:  # because: a process that was not scheduled itself cannot tell that others were silent
            self.heard = {rank: at + slept for rank, at in self.heard.items()}
        is_due = now - self.here_at > _HERE_S
        self.here_at = now if is_due else self.here_at
        for peer in list(self.peers):
            peer.flush()
            if is_due and peer.rank is not None and peer.idle:
                peer.send({"here": True})
            if peer.rank is None and now - self.since.get(peer.fileno(), now) > _UNKNOWN_S:
                self.forget(peer)
        for rank, row in self.rows.items():
            row.silent_s = now - self.heard[rank] if row.state == RUNNING else 0.0
        if self.verdict is None:
            self.decide(now)
        if now - self.saved_at > 60:
            self.saved_at = now
            start_new_thread(self.save_times, ())  # because: a hanging disk must not block the hub

    def decide(self, now: float) -> None:
        asked = self.asked_at is not None and now - self.asked_at > _ASKED_S
        verdict = judge(list(self.rows.values()), self.limits, asked)
        if verdict is None:
            if asked:
                self.asked_at = None
                self.tell_all({"verdict": None})
            return
        self.verdict = verdict
        message: dict[str, Any] = {"verdict": verdict.what, "kind": verdict.kind, "ranks": verdict.ranks[:1000]}
        if verdict.kind == HANG_KIND:
            step = max(row.step for row in self.rows.values())
            place = f"step_{step}" if step >= 0 else verdict.rows[0].phase
            message["folder"] = os.path.join(self.folder, HANGS, f"{place}-{time.strftime('%Y%m%dT%H%M%S')}")
        if verdict.kind != FAILED_KIND and self.stop is None:
            write_stop(self.folder, message)  # because: the launcher reads it once all ranks have ended
        self.tell_all(message)
        if verdict.kind == HANG_KIND:
            self.write_summary(verdict, message["folder"])

    def write_summary(self, verdict: Verdict, folder: str) -> None:
        """Write a table of all ranks' states for people, next to the stacks."""
        lines = [
            verdict.what, "", "What each process was doing when this was decided:", "",
            *(
                f"{row.who:24} {row.state:8} {row.stood_s:8.1f} s in {row.where}; {row.count} collectives so far, "
                f"{row.cpu_s:.1f} s of CPU time, last heard {row.silent_s:.1f} s ago"
                for row in sorted(self.rows.values(), key=lambda row: row.rank)
            ),
            "", "Limits in force, in seconds (what is not here has parallel.timeout_s):", "",
            *(f"{key:48} {self.limits.of(key):8.1f}" for key in sorted(self.limits.longest)), "",
        ]  # fmt: skip
        write_file(folder, "summary.txt", "\n".join(lines).encode())

    def save_times(self) -> None:
        path = os.path.join(self.folder, PHASE_TIMES)
        # because: the run folder may not exist yet, or its disk be full; then the next start learns the times anew
        with suppress(OSError):
            with open(f"{path}.new", "w") as file:
                longest = self.limits.before | self.limits.longest
                times = {key: round(seconds, 3) for key, seconds in sorted(longest.items())}
                json.dump({"processes": self.world_size, "longest_s": times}, file, indent=1)
            os.replace(f"{path}.new", path)


def write_file(folder: str, name: str, data: bytes) -> None:
    """Write a diagnostic file as the run ends; errors are ignored."""
    with suppress(OSError):  # because: a failing disk must not keep the processes from being ended
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)


def _row(rank: int, beat: dict[str, Any], before: RankRow | None) -> RankRow:
    odd = beat.get("odd")
    row = RankRow(
        rank, str(beat["host"])[:100], str(beat["phase"])[:20], int(beat["step"]), int(beat["microbatch"]),
        int(beat["stage"]), str(beat["what"])[:48], float(beat["stood_s"]),
        STOPPED if beat["state"] == STOPPED else RUNNING, int(beat["count"]),
        (int(odd[0]), str(odd[1])[:48], str(odd[2])[:48]) if odd else None, cpu_s=float(beat["cpu_s"]),
        way=_way(beat.get("way")),
    )  # fmt: skip
    if before is not None:
        row.asks = before.asks
        if before.state not in (RUNNING, STOPPED):
            row.state, row.said, row.code = before.state, before.said, before.code
    return row


def _way(found: Any) -> tuple[int, int, dict[int, int]] | None:
    if not found:
        return None
    step, before, stops = found
    return int(step), int(before), {int(number): int(total) for number, total in stops[:64]}


def _times(found: object) -> dict[str, float]:
    if not isinstance(found, dict):
        return {}
    numbers = {str(key)[:48]: value for key, value in list(found.items())[:64]}
    return {key: float(value) for key, value in numbers.items() if isinstance(value, int | float) and value >= 0}


def _read_times(folder: str, world_size: int) -> dict[str, float]:
    try:
        with open(os.path.join(folder, PHASE_TIMES)) as file:
            found = json.loads(file.read(1 << 16))
        return _times(found.get("longest_s")) if found.get("processes") == world_size else {}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
