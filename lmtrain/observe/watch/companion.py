"""The companion process of each rank: reads the rank's marks and state, sends heartbeats to the hub, kills a hung rank.

Started by guard without torch and without site packages; it ends with its rank, however the rank ends, because the
socket between them closes. Rank 0's companion is also the hub. A companion works where the rank cannot: while the rank
is stopped, or its interpreter's lock is held.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress

from lmtrain.observe.measure.phases import NUM_BYTES, Mark, read_mark, read_misordered, read_order, read_seen_names
from lmtrain.observe.watch.hub import Hub, Lines, explained, write_file, write_stop
from lmtrain.observe.watch.judge import FAILED_KIND, HANG_KIND, LOST_KIND, RUNNING, SILENT_S, STOPPED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STACKS_SIGNAL = signal.SIGURG  # because: the default action is to ignore it, so it harms no process without a handler
_TICK_S = 0.5
_MOST_S = 1.0  # counted as standing still per look; because: while this process slept, the rank may have worked
_SLEPT_S = 2.0  # seconds between two looks that show that this process itself was not scheduled
_WAY_S = 1.0  # seconds; because: `way` is long, and only needed if the rank does not move
_STACKS_S = 1.0
# Seconds that the main thread of a rank has to raise an error of its own before the rank is ended. Only a failure is
# sure to reach that thread, as an error of its own or as closed connections.
POLITE_S = {HANG_KIND: 1.0, LOST_KIND: 3.0, FAILED_KIND: 10.0}
# shorter for NCCL: a collective whose peer is gone waits on the device, and raises nothing
DEVICE_POLITE_S = {HANG_KIND: 1.0, LOST_KIND: 0.5, FAILED_KIND: 3.0}
_END_S = 3.0  # seconds after that until the rank is killed
_LEAVING_S = 20.0  # seconds for a rank that has announced its end, because it may have to give up its last save first
_LINGER_S = 3.0  # seconds that the hub outlives its rank, to inform the other ranks


class Companion:
    def __init__(self, told: dict[str, Any]) -> None:
        self.rank, self.host, self.pid, self.folder = told["rank"], told["host"], told["pid"], told["folder"]
        self.polite_s: dict[str, float] = told["polite_s"]
        self.control = Lines(socket.socket(fileno=told["control"]))
        self.marks = mmap.mmap(told["marks"], NUM_BYTES, prot=mmap.PROT_READ)
        self.stacks: int = told["stacks"]
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.control, selectors.EVENT_READ, self.hear_rank)
        self.mark = Mark(self.marks)
        self.stood_s, self.looked_at = 0.0, time.monotonic()
        self.longest: dict[str, float] = {}
        self.state, self.cpu_s = RUNNING, 0.0
        self.stopping = False  # this rank received another rank's stop request
        self.rank_gone = self.over = self.said = False
        self.verdict: dict[str, Any] | None = None
        self.deadline: float | None = None  # monotonic time at which the rank is killed, or this process ends
        self.hub: Hub | None = None
        self.link: Lines | None = None
        self.silent_s, self.heard_at = min(told["timeout_s"], SILENT_S), time.monotonic()
        if told["address"] is None:
            self.hub = Hub(
                self.rank, told["secret"], self.folder, told["timeout_s"], told["world_size"], on_node=told["on_node"]
            )
            self.hub.register(self.selector)
            self.control.send({"port": self.hub.port})
        else:
            self.hub_host = told["address"][0]
            self.link = Lines(socket.create_connection(tuple(told["address"]), timeout=told["timeout_s"]))
            self.selector.register(self.link, selectors.EVENT_READ, self.hear_hub)
            self.link.send({"token": told["secret"], "rank": self.rank})

    def run(self) -> None:
        due = time.monotonic()
        while not self.is_over():
            for key, _ in self.selector.select(max(0.0, due - time.monotonic())):
                key.data()
            if time.monotonic() >= due or self.rank_gone:
                self.look()
                due = time.monotonic() + (_TICK_S if not self.rank_gone else 0.05)
            if self.hub is not None:
                self.hub.tick()
                told, self.hub.told = self.hub.told, []
                for message in told:
                    self.obey(message)

    def is_over(self) -> bool:
        if self.over or not self.rank_gone:
            return self.over
        if self.hub is None:
            return True
        late = self.deadline is not None and time.monotonic() > self.deadline
        return late or (self.hub.verdict is not None and all(peer.idle for peer in self.hub.peers))

    def look(self) -> None:
        """Check the rank: read its mark and process state, send a heartbeat, and kill the rank after its deadline."""
        if self.rank_gone:
            return
        now = time.monotonic()
        if self.verdict is not None and self.deadline is not None and now > self.deadline:
            self.speak_for_rank()  # because: once all ranks have ended, the launcher ends this process too
            self.kill(signal.SIGKILL)
        mark, since = read_mark(self.marks), now - self.looked_at
        self.looked_at = now
        if self.link is not None and self.verdict is None:
            self.listen_for_hub(now, since)
        if mark.num_marks != self.mark.num_marks:
            key = self.mark.name or self.mark.phase
            self.longest[key] = max(self.longest.get(key, 0.0), self.stood_s)
            self.mark, self.stood_s = mark, 0.0
        else:
            self.stood_s += min(since, _MOST_S)
        self.state, self.cpu_s = state_of(self.pid)
        self.beat(mark)

    def listen_for_hub(self, now: float, since: float) -> None:
        """Report rank 0 as lost if its hub is silent; a node that loses power or network closes no connection."""
        if since > _SLEPT_S:  # because: a process that was not scheduled itself cannot tell that the hub was silent
            self.heard_at += since
        if not self.over and now - self.heard_at > self.silent_s:
            silent = (
                f"rank 0, met at {self.hub_host}, is not heard of any more, nor what watches it, as when its node "
                "fails."
            )
            self.obey({"verdict": silent, "kind": LOST_KIND, "ranks": [0]})
            write_stop(self.folder, {"verdict": silent, "ranks": [0]})  # because: rank 0 may not exist any more

    def beat(self, mark: Mark) -> None:
        odd, stood_s = read_misordered(self.marks), self.stood_s if mark.num_marks == self.mark.num_marks else 0.0
        self.to_hub({"beat": {
            "host": self.host, "phase": mark.phase, "step": mark.step, "microbatch": mark.microbatch,
            "stage": mark.stage, "what": mark.name, "stood_s": stood_s, "state": self.state,
            "count": mark.num_collectives, "cpu_s": self.cpu_s, "odd": odd if odd[0] > 0 else None,
            "way": read_order(self.marks) if stood_s > _WAY_S else None,
            "longest": {name: self.longest.get(name, 0.0) for name in read_seen_names(self.marks, mark.seen_bits)},
        }})  # fmt: skip

    def hear_rank(self) -> None:
        for message in self.control.read():
            if message.get("said"):
                self.said = True
                continue
            self.beat(read_mark(self.marks))  # because: the message is about the present state
            self.to_hub(message)
            if message.get("left") and self.hub is None:
                self.over = True  # because: the hub's companion must stay to inform the other ranks
            if message.get("done"):
                self.over = True
                if self.hub is not None:
                    self.hub.tell_all({"over": True}, but=self.rank)
                    self.hub.save_times()
            if "failed" in message:
                self.said = True  # because: the rank's command line reports the error
                self.deadline = time.monotonic() + _LEAVING_S
        if self.control.ended and not self.rank_gone:
            self.rank_gone = True
            self.selector.unregister(self.control)
            self.deadline = time.monotonic() + _LINGER_S
            if self.verdict is None:
                how = how_ended(self.pid)  # because: once the parent has reaped the process, its exit status is gone
                self.beat(read_mark(self.marks))
                self.to_hub({"lost": how})
            self.speak_for_rank()

    def hear_hub(self) -> None:
        assert self.link is not None
        for message in self.link.read():
            self.heard_at = time.monotonic()
            if "here" not in message:
                self.obey(message)
        if self.link.ended:
            self.selector.unregister(self.link)
            if self.verdict is None and not self.over and not self.stopping:
                gone = "rank 0 is gone, and what watched it too, as when its node fails."
                self.obey({"verdict": gone, "kind": LOST_KIND, "ranks": [0]})

    def to_hub(self, message: dict[str, Any]) -> None:
        if self.hub is not None:
            self.hub.hear(self.rank, message)
        elif self.link is not None:
            self.link.send(message)

    def obey(self, message: dict[str, Any]) -> None:
        if message.get("over"):
            self.over = True
            self.control.send(message)  # because: a rank that has not left yet would miss its companion
        elif message.get("verdict") and self.verdict is None:
            self.verdict = message
            if message.get("kind") == HANG_KIND and not self.rank_gone:
                self.write_stacks(str(message.get("folder")))
            self.control.send({**message, "end": True})
            if not self.rank_gone:  # a rank that has announced its end keeps its longer deadline
                self.deadline = max(self.deadline or 0.0, time.monotonic() + self.polite_s[message["kind"]] + _END_S)
            else:
                self.speak_for_rank()
        else:
            self.stopping = self.stopping or "stop" in message
            self.control.send(message)

    def write_stacks(self, folder: str) -> None:
        """Write the stacks of all the rank's threads, by a signal handler in C that needs no interpreter lock."""
        before, stopped = os.fstat(self.stacks).st_size, self.state == STOPPED
        self.kill(STACKS_SIGNAL)
        if stopped:
            self.kill(signal.SIGCONT)
        end, size = time.monotonic() + _STACKS_S, before
        while time.monotonic() < end:
            time.sleep(0.05)
            size, last = os.fstat(self.stacks).st_size, size
            if size == last > before:
                break
        if stopped:
            self.kill(signal.SIGKILL)  # because: the rank would continue, while the others are ending
        stacks = os.pread(self.stacks, size - before, before) or b"(it did not answer: the system itself holds it)\n"
        place = (
            f"rank {self.rank} on {self.host}, process {self.pid}, {self.state}, for {self.stood_s:.1f} s in "
            + f"{self.mark.phase} {self.mark.name}".strip() + f" of step {self.mark.step}\n\n"
        )  # fmt: skip
        write_file(folder, f"rank_{self.rank:05d}.txt", place.encode() + stacks)

    def speak_for_rank(self) -> None:
        """Print the verdict and write stop.json in place of rank 0 if it could not. Does nothing on other ranks."""
        if self.hub is None or self.said or self.verdict is None:
            return
        self.said = True
        sys.stderr.write(f"error: {explained(self.verdict).encode('ascii', 'backslashreplace').decode()}\n")
        sys.stderr.flush()
        write_stop(self.folder, self.verdict)

    def kill(self, number: int) -> None:
        if os.getppid() == self.pid:  # because: process ids are reused
            os.kill(self.pid, number)


def state_of(pid: int) -> tuple[str, float]:
    """Return whether a process is stopped, and its CPU time in seconds; without /proc, (RUNNING, 0.0)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return STOPPED if fields[0] in (b"T", b"t") else RUNNING, ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return RUNNING, 0.0


def how_ended(pid: int) -> str:
    """Return how a process ended, from the zombie's exit status; unknown if the parent has reaped it already."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            status = int(file.read().rpartition(b")")[2].split()[49])
    except (OSError, ValueError, IndexError):
        status = 0
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with exit code {os.WEXITSTATUS(status)}" if status else "ended without a word, as one that is killed"


def main() -> None:
    """Watch the rank that started this process, as the JSON in the last argument describes."""
    _ignore_signals()
    Companion(json.loads(sys.argv[-1])).run()


def main_of_fork(connection: socket.socket) -> None:
    """Watch the rank that forked this process, after receiving a description and descriptors over `connection`.

    Return at once if the rank ends without sending them.
    """
    _ignore_signals()
    gc.disable()  # because: a garbage collection would copy memory pages that are shared with the rank
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nowhere, number)
    # because: the rank's sockets and pipes must close when the rank ends
    _close_all_but((0, 1, 2, connection.fileno(), nowhere))
    data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 2)
    if not data:
        return
    told = json.loads(data)
    if told["rank"] > 0:
        os.dup2(nowhere, 2)  # because: only rank 0's companion prints
    Companion(told | {"control": connection.detach(), "marks": fds[0], "stacks": fds[1]}).run()


def _close_all_but(kept: tuple[int, ...]) -> None:
    """Close all open descriptors except these.

    The open ones are listed, because the limit may be a thousand million.
    """
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd not in kept:
            with suppress(OSError):  # because: the listing's own descriptor is closed by now
                os.close(fd)


def _ignore_signals() -> None:
    # because: signals to a whole group are meant for ranks, and this process ends when its rank does
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
