"""The companion process of each rank: reads the rank's marks and state, sends heartbeats to the hub, kills a hung rank.

Started by start_companion_and_raise_verdict.py without torch and without site packages, or forked together with its
rank; it ends with the rank, however the rank ends, because the socket between them closes. Rank 0's companion is also
the hub. A companion works where the rank cannot: while the rank is stopped, or its interpreter's lock is held.
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

from lmtrain.observe.hang_watch.hang_verdict import FAILED_KIND, HANG_KIND, LOST_KIND, RUNNING, SILENT_S, STOPPED
from lmtrain.observe.hang_watch.heartbeat_server import Hub, LineConnection, verdict_text, write_file, write_stop
from lmtrain.runtime.processes.current_phase import (
    NUM_BYTES,
    Mark,
    read_mark,
    read_misordered,
    read_order,
    read_seen_names,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STACKS_SIGNAL = signal.SIGURG  # because: the default action is to ignore it, so it harms no process without a handler
_TICK_S = 0.5
_MAX_STILL_S = 1.0  # counted as standing still per look; because: while this process slept, the rank may have worked
_STALL_S = 2.0  # seconds between two looks that show that this process itself was not scheduled
_ORDER_AFTER_S = 1.0  # seconds; because: `way` is long, and only needed if the rank does not move
_STACKS_S = 1.0
# Seconds that the main thread of a rank has to raise an error of its own before the rank is ended. Only a failure is
# sure to reach that thread, as an error of its own or as closed connections.
GRACE_S = {HANG_KIND: 1.0, LOST_KIND: 3.0, FAILED_KIND: 10.0}
# shorter for NCCL: a collective whose peer is gone waits on the device, and raises nothing
DEVICE_GRACE_S = {HANG_KIND: 1.0, LOST_KIND: 0.5, FAILED_KIND: 3.0}
_END_S = 3.0  # seconds after that until the rank is killed
_ANNOUNCED_END_S = 20.0  # seconds for a rank that has announced its end; because: it may have to give up a save first
_LINGER_S = 3.0  # seconds that the hub outlives its rank, to inform the other ranks


class Companion:
    """The state of a companion process: its rank's marks, the connections to the rank and the hub, and deadlines."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Connect to the rank and to the hub, or start the hub; `config` is what Watch.open of the rank has sent."""
        self.rank, self.host, self.pid, self.folder = config["rank"], config["host"], config["pid"], config["folder"]
        self.grace_s: dict[str, float] = config["polite_s"]
        self.rank_connection = LineConnection(socket.socket(fileno=config["control"]))
        self.marks = mmap.mmap(config["marks"], NUM_BYTES, prot=mmap.PROT_READ)
        self.stacks: int = config["stacks"]
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.rank_connection, selectors.EVENT_READ, self.receive_from_rank)
        self.mark = Mark(self.marks)
        self.still_s, self.checked_at = 0.0, time.monotonic()
        self.longest_still_s: dict[str, float] = {}
        self.state, self.cpu_s = RUNNING, 0.0
        self.stopping = False  # another rank's stop request was passed on to this rank
        self.rank_gone = self.over = self.is_reported = False
        self.verdict: dict[str, Any] | None = None
        self.deadline: float | None = None  # monotonic time at which the rank is killed, or this process ends
        self.hub: Hub | None = None
        self.hub_connection: LineConnection | None = None
        self.hub_silence_s, self.hub_message_at = min(config["timeout_s"], SILENT_S), time.monotonic()
        if config["address"] is None:
            self.hub = Hub(
                self.selector, self.rank, config["secret"], self.folder, config["timeout_s"], config["world_size"],
                single_node=config["on_node"],
            )  # fmt: skip
            self.rank_connection.send({"port": self.hub.port})
        else:
            self.hub_host = config["address"][0]
            self.hub_connection = LineConnection(
                socket.create_connection(tuple(config["address"]), timeout=config["timeout_s"])
            )
            self.selector.register(self.hub_connection, selectors.EVENT_READ, self.receive_from_hub)
            self.hub_connection.send({"token": config["secret"], "rank": self.rank})

    def run(self) -> None:
        """Handle the messages of the rank and of the watchdog's hub on rank 0, and check the rank twice a second, until
        the rank or the run has ended.
        """
        next_check = time.monotonic()
        while not self.is_over():
            for key, _ in self.selector.select(max(0.0, next_check - time.monotonic())):
                key.data()
            if time.monotonic() >= next_check or self.rank_gone:
                self.check_rank()
                next_check = time.monotonic() + (_TICK_S if not self.rank_gone else 0.05)
            if self.hub is not None:
                self.hub.tick()
                messages, self.hub.own_messages = self.hub.own_messages, []
                for message in messages:
                    self.handle_message(message)

    def is_over(self) -> bool:
        """Return True if this companion process may exit. Rank 0's companion, which decides for all ranks, first waits
        until it has sent the verdict (which rank is to blame) to the others, or until its deadline.
        """
        if self.over or not self.rank_gone:
            return self.over
        if self.hub is None:
            return True
        late = self.deadline is not None and time.monotonic() > self.deadline
        return late or (self.hub.verdict is not None and all(peer.is_idle for peer in self.hub.peers))

    def check_rank(self) -> None:
        """Read the rank's position from shared memory and its process state from /proc, and send both to the watchdog's
        hub on rank 0. Kill the rank if its deadline to end by itself after a verdict has passed.
        """
        if self.rank_gone:
            return
        now = time.monotonic()
        if self.verdict is not None and self.deadline is not None and now > self.deadline:
            self.report_for_rank()  # because: once all ranks have ended, the launcher ends this process too
            self.send_signal(signal.SIGKILL)
        mark, elapsed_s = read_mark(self.marks), now - self.checked_at
        self.checked_at = now
        if self.hub_connection is not None and self.verdict is None:
            self.check_hub(now, elapsed_s)
        if mark.num_marks != self.mark.num_marks:
            key = self.mark.name or self.mark.phase
            self.longest_still_s[key] = max(self.longest_still_s.get(key, 0.0), self.still_s)
            self.mark, self.still_s = mark, 0.0
        else:
            self.still_s += min(elapsed_s, _MAX_STILL_S)
        self.state, self.cpu_s = process_state(self.pid)
        self.send_heartbeat(mark)

    def check_hub(self, now: float, elapsed_s: float) -> None:
        """End the run as if rank 0 were lost, if the watchdog's hub on rank 0 has sent nothing for too long: a node
        that loses power closes no connection. `now` is the monotonic time, `elapsed_s` the seconds since the last
        check.
        """
        if elapsed_s > _STALL_S:  # because: a process that was not scheduled itself cannot tell that the hub was silent
            self.hub_message_at += elapsed_s
        if not self.over and now - self.hub_message_at > self.hub_silence_s:
            text = f"rank 0 at {self.hub_host} and its companion send no heartbeats any more, as if their node failed."
            self.handle_message({"verdict": text, "kind": LOST_KIND, "ranks": [0]})
            write_stop(self.folder, {"verdict": text, "ranks": [0]})  # because: rank 0 may not exist any more

    def send_heartbeat(self, mark: Mark) -> None:
        """Send the rank's position `mark` (phase, step, collective), how long it has been there, and its process state
        to the watchdog's hub on rank 0.
        """
        misordered = read_misordered(self.marks)
        still_s = self.still_s if mark.num_marks == self.mark.num_marks else 0.0
        self.send_to_hub({"beat": {
            "host": self.host, "phase": mark.phase, "step": mark.step, "microbatch": mark.microbatch,
            "stage": mark.stage, "what": mark.name, "stood_s": still_s, "state": self.state,
            "count": mark.num_collectives, "cpu_s": self.cpu_s, "odd": misordered if misordered[0] > 0 else None,
            "way": read_order(self.marks) if still_s > _ORDER_AFTER_S else None,
            "longest": {
                name: self.longest_still_s.get(name, 0.0) for name in read_seen_names(self.marks, mark.seen_bits)
            },
        }})  # fmt: skip

    def receive_from_rank(self) -> None:
        """Pass the messages that the rank has sent on to the watchdog's hub on rank 0. If the rank has closed its
        connection, report to the hub how its process ended.
        """
        for message in self.rank_connection.receive():
            if message.get("said"):
                self.is_reported = True
                continue
            self.send_heartbeat(read_mark(self.marks))  # because: the message is about the present state
            self.send_to_hub(message)
            if message.get("left") and self.hub is None:
                self.over = True  # because: the hub's companion must stay to inform the other ranks
            if message.get("done"):
                self.over = True
                if self.hub is not None:
                    self.hub.send_to_all({"over": True}, except_rank=self.rank)
                    self.hub.save_times()
            if "failed" in message:
                self.is_reported = True  # because: the rank's command line reports the error
                self.deadline = time.monotonic() + _ANNOUNCED_END_S
        if self.rank_connection.has_ended and not self.rank_gone:
            self.rank_gone = True
            self.selector.unregister(self.rank_connection)
            self.deadline = time.monotonic() + _LINGER_S
            if self.verdict is None:
                # because: once the parent has reaped the process, its exit status is gone
                exit_text = describe_exit(self.pid)
                self.send_heartbeat(read_mark(self.marks))
                self.send_to_hub({"lost": exit_text})
            self.report_for_rank()

    def receive_from_hub(self) -> None:
        """Handle the messages that the watchdog's hub on rank 0 has sent. If it has closed the connection before the
        run is over, end the run as if rank 0 were lost.
        """
        assert self.hub_connection is not None
        for message in self.hub_connection.receive():
            self.hub_message_at = time.monotonic()
            if "here" not in message:
                self.handle_message(message)
        if self.hub_connection.has_ended:
            self.selector.unregister(self.hub_connection)
            if self.verdict is None and not self.over and not self.stopping:
                self.handle_message({
                    "verdict": "rank 0 and its companion are gone, as if their node had failed.", "kind": LOST_KIND,
                    "ranks": [0],
                })  # fmt: skip

    def send_to_hub(self, message: dict[str, Any]) -> None:
        if self.hub is not None:
            self.hub.handle_message(self.rank, message)
        elif self.hub_connection is not None:
            self.hub_connection.send(message)

    def handle_message(self, message: dict[str, Any]) -> None:
        """Act on a message of the watchdog's hub, and pass it on to the rank. The message says that the run is over,
        which rank is to blame for a failure (the verdict), or that a rank was asked to stop.
        """
        if message.get("over"):
            self.over = True
            self.rank_connection.send(message)  # because: a rank that has not left yet would miss its companion
        elif message.get("verdict") and self.verdict is None:
            self.verdict = message
            if message.get("kind") == HANG_KIND and not self.rank_gone:
                self.write_stacks(str(message.get("folder")))
            self.rank_connection.send({**message, "end": True})
            if not self.rank_gone:  # a rank that has announced its end keeps its longer deadline
                self.deadline = max(self.deadline or 0.0, time.monotonic() + self.grace_s[message["kind"]] + _END_S)
            else:
                self.report_for_rank()
        else:
            self.stopping = self.stopping or "stop" in message
            self.rank_connection.send(message)

    def write_stacks(self, folder: str) -> None:
        """Write the Python stacks of all threads of the rank to a file in `folder`. A signal makes the rank write them,
        in C, even while its interpreter lock is held. A rank that was stopped by a signal is killed afterwards.
        """
        before, stopped = os.fstat(self.stacks).st_size, self.state == STOPPED
        self.send_signal(STACKS_SIGNAL)
        if stopped:
            self.send_signal(signal.SIGCONT)
        end, size = time.monotonic() + _STACKS_S, before
        while time.monotonic() < end:
            time.sleep(0.05)
            size, last = os.fstat(self.stacks).st_size, size
            if size == last > before:
                break
        if stopped:
            self.send_signal(signal.SIGKILL)  # because: the rank would continue, while the others are ending
        stacks = os.pread(self.stacks, size - before, before) or b"(no answer: it is blocked in the kernel)\n"
        heading = (
            f"rank {self.rank} on {self.host}, process {self.pid}, {self.state}, for {self.still_s:.1f} s in "
            + f"{self.mark.phase} {self.mark.name}".strip() + f" of step {self.mark.step}\n\n"
        )  # fmt: skip
        write_file(folder, f"rank_{self.rank:05d}.txt", heading.encode() + stacks)

    def report_for_rank(self) -> None:
        """Print the verdict (which rank is to blame) and write it to stop.json, unless rank 0 has reported it itself.
        Does nothing in the companions of other ranks.
        """
        if self.hub is None or self.is_reported or self.verdict is None:
            return
        self.is_reported = True
        sys.stderr.write(f"error: {verdict_text(self.verdict).encode('ascii', 'backslashreplace').decode()}\n")
        sys.stderr.flush()
        write_stop(self.folder, self.verdict)

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to the rank, if it is still this process's parent."""
        if os.getppid() == self.pid:  # because: process ids are reused
            os.kill(self.pid, signal_number)


def process_state(pid: int) -> tuple[str, float]:
    """Return (state, CPU time in seconds) of process `pid`. The state is STOPPED if a signal has stopped the process,
    else RUNNING; on a system without /proc the result is (RUNNING, 0.0).
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return STOPPED if fields[0] in (b"T", b"t") else RUNNING, cpu_s
    except (OSError, ValueError, IndexError):
        return RUNNING, 0.0


def describe_exit(pid: int) -> str:
    """Return how process `pid` ended, such as "was ended by SIGKILL", read from /proc before its parent has waited for
    it. If that is too late, the text says only that the process ended.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            status = int(file.read().rpartition(b")")[2].split()[49])
    except (OSError, ValueError, IndexError):
        status = 0
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with exit code {os.WEXITSTATUS(status)}" if status else "ended without a word, as if killed"


def main() -> None:
    """Watch the rank that started this process, as the JSON in the last argument describes."""
    _ignore_signals()
    Companion(json.loads(sys.argv[-1])).run()


def main_of_fork(connection: socket.socket) -> None:
    """Run as the companion (the watchdog process) of the rank that forked this process, until that rank ends. The rank
    sends its settings as JSON and two file descriptors (its shared memory, and the file for its stacks) over
    `connection`.

    Return at once if the rank ends without sending them.
    """
    _ignore_signals()
    gc.disable()  # because: a garbage collection would copy memory pages that are shared with the rank
    null_fd = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null_fd, number)
    # because: the rank's sockets and pipes must close when the rank ends
    _close_other_descriptors((0, 1, 2, connection.fileno(), null_fd))
    data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 2)
    if not data:
        return
    config = json.loads(data)
    if config["rank"] > 0:
        os.dup2(null_fd, 2)  # because: only rank 0's companion prints
    Companion(config | {"control": connection.detach(), "marks": fds[0], "stacks": fds[1]}).run()


def _close_other_descriptors(kept_fds: tuple[int, ...]) -> None:
    """Close all open file descriptors of this process except `kept_fds`.

    The open descriptors are listed, because the limit may be a thousand million.
    """
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd not in kept_fds:
            with suppress(OSError):  # because: the listing's own descriptor is closed by now
                os.close(fd)


def _ignore_signals() -> None:
    # because: signals to a whole group are meant for ranks, and this process ends when its rank does
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
