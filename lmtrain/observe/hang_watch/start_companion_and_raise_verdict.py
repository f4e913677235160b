"""The rank's side of the watchdog: starts the companion, receives its verdicts, and names the culprit of a failed wait.

Called by the command line around a run of several processes. A thread receives messages; it ends this process if the
main thread cannot. If that thread cannot run either, the companion kills the process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lmtrain.errors import LmtrainError, PeerLostError, StoppedEarly
from lmtrain.observe.hang_watch.hang_verdict import HANG_KIND
from lmtrain.observe.hang_watch.heartbeat_server import verdict_text
from lmtrain.observe.hang_watch.watchdog_companion_process import DEVICE_GRACE_S, GRACE_S, STACKS_SIGNAL
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.process_environment import ProcessEnv, Rendezvous, take_companion
from lmtrain.runtime.processes.process_group import RunGroup, is_peer_error
from lmtrain.runtime.processes.start_rank_processes import ForkedProcess
from lmtrain.runtime.processes.stop_signals import Stopped, ignore_stops
from lmtrain.runtime.terminal_safe_text import warn

_ROOT = Path(__file__).resolve().parents[3]
_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from lmtrain.observe.hang_watch.watchdog_companion_process import main; main()"
)
_KEY = "watch"  # key of the run's store: the hub's host, port and secret
_ANSWER_S = 5.0
_COMPANION_END_S = 5.0
_VERDICT_S = 0.5  # because: srun ends all tasks once one is gone, and its signal may come before the verdict
_MAX_ROWS = 30
_DUMP_S = 1.0  # because: the dump takes locks that a hung process may hold


class Watch:
    """Messages between the processes of a run, beside their collectives. Does nothing in a run of one process."""

    def __init__(
        self, process: ProcessEnv, on_stop: Callable[[str], None], on_end: Callable[[LmtrainError], None],
        *, on_device: bool = False,
    ) -> None:  # fmt: skip
        """Create a watchdog, which does nothing before `open`.

        `on_stop` receives the name of the signal that another process was sent; `on_end` the error for which this
        process is ended from outside its main thread, on rank 0. With `on_device`, collectives wait on a device and do
        not raise if a peer fails.
        """
        self.process, self._on_stop, self._on_end = process, on_stop, on_end
        self.grace_s = DEVICE_GRACE_S if on_device else GRACE_S
        self.stop_signal: str | None = None  # name of the signal that another process received
        self._verdict: dict[str, Any] | None = None
        self._is_answered, self._is_leaving = threading.Event(), threading.Event()
        self._control: socket.socket | None = None
        self._sending = threading.Lock()
        self._companion: subprocess.Popen[bytes] | ForkedProcess | None = None

    def send_stop(self, signal_name: str) -> None:
        """Report to all other processes of the run that this process has received the signal `signal_name`, which asks
        it to stop.
        """
        self._send({"stop": signal_name})

    def open(self, group: RunGroup, folder: Path, timeout_s: float) -> None:
        is_leader, address, secret = self.process.rank == 0, None, secrets.token_hex(16)
        single_node = len(set(group.hosts)) == 1
        if not is_leader:
            hub_entry = json.loads(group.store.get(_KEY))
            if not hub_entry:
                return
            *address, secret = hub_entry
        config = {
            "rank": self.process.rank, "host": self.process.host, "pid": os.getpid(), "folder": str(folder.absolute()),
            "timeout_s": timeout_s, "world_size": self.process.world_size, "on_node": single_node, "secret": secret,
            "address": address, "polite_s": self.grace_s,
        }  # fmt: skip
        try:
            port = self._start(config, is_leader)
        except (OSError, ValueError) as error:
            warn(f"{self.process.label} has no watchdog, because its companion process could not be started ({error}).")
            port = None
        if is_leader:
            host = "127.0.0.1" if single_node else Rendezvous.detect(self.process).host
            group.store.set(_KEY, json.dumps([host, port, secret] if port else None))

    def _start(self, config: dict[str, Any], is_leader: bool) -> int | None:
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115  # because: it stays open until the process ends
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True, chain=False)
        marks = current_phase.open_memory()
        fds = {"marks": marks, "stacks": self._stacks.fileno()}
        waiting = take_companion()
        if waiting is None:
            self._control, self._companion = _start_companion(config, fds, may_print=is_leader)
        else:
            self._control, self._companion = socket.socket(fileno=waiting[0]), ForkedProcess(waiting[1])
            socket.send_fds(self._control, [json.dumps(config).encode()], list(fds.values()))
        os.close(marks)
        port = None
        if is_leader:
            self._control.settimeout(60.0)
            port = json.loads(self._control.recv(100))["port"]
            self._control.settimeout(None)
        threading.Thread(target=self._listen, name="watch", daemon=True).start()
        return port

    def _listen(self) -> None:
        assert self._control is not None
        is_over = False  # rank 0 is done, and this process will be shortly
        with suppress(OSError), self._control.makefile("r") as lines:
            for line in lines:
                message = json.loads(line)
                if "stop" in message:
                    if self._verdict is None:  # because: a rank that leaves after a loss leaves because of the loss
                        self.stop_signal = self.stop_signal or message["stop"]
                    self._on_stop(message["stop"])
                elif message.get("end"):
                    self._verdict = message
                    self._is_answered.set()
                    self._exit_after_grace(message)
                elif message.get("over"):
                    is_over = True
                else:
                    self._is_answered.set()
        self._is_answered.set()
        if not (self._is_leaving.is_set() or self._verdict or is_over):
            warn(f"{self.process.label} has no watchdog any more, because its companion process has ended.")

    def _exit_after_grace(self, verdict: dict[str, Any]) -> None:
        """Give the main thread a grace period in which to end the run by itself, and return if it begins to; otherwise
        end this process with the exit code of `verdict`, the watchdog's message that names the ranks to blame.
        """
        if verdict["kind"] == HANG_KIND and (rows := flight_recorder_rows()):
            with suppress(OSError):
                (Path(verdict["folder"]) / f"rank_{self.process.rank:05d}.flight_recorder.txt").write_text(rows)
        if self._is_leaving.wait(self.grace_s[verdict["kind"]]):
            return
        error = self.verdict_error(verdict)
        if self.process.rank == 0:
            self._send({"said": True})
            self._on_end(error)
        os._exit(error.exit_code)

    def verdict_error(self, verdict: dict[str, Any]) -> LmtrainError:
        if self.stop_signal and current_phase.main.num_steps <= 1:
            return StoppedEarly(f"{self.stop_signal} came before the first step was done.")
        return PeerLostError(verdict_text(verdict), rank=verdict["ranks"][0], stacks=verdict.get("folder"))

    def find_culprit(self, error: BaseException) -> LmtrainError | None:
        """Return the watchdog's error that names the rank to blame, after a collective of this rank has failed with
        `error` because of a peer. None if the watchdog does not name a rank within 5 seconds.
        """
        if not self._is_answered.is_set():
            self._send({"asks": str(error)[:500]})
            self._is_answered.wait(_ANSWER_S)
        self._is_leaving.set()
        return self.verdict_error(self._verdict) if self._verdict else None

    def earlier_error(self) -> LmtrainError | None:
        """Return the error that the watchdog has decided on, to be reported instead of the signal that stopped this
        process. Wait up to half a second for its decision. Return None if there is none, or if the signal was a request
        to stop the run.
        """
        if self._companion is not None and self.stop_signal is None:
            self._is_answered.wait(_VERDICT_S)
        if self._verdict is None or self.stop_signal is not None:
            return None
        self._is_leaving.set()
        return self.verdict_error(self._verdict)

    def report_end(self, message: dict[str, Any]) -> None:
        """Tell the companion (the watchdog process of this rank) how the main thread ended: `message` has the key
        "done", "left" or "failed". With "done", also wait until the companion has ended, kill it if it takes too long,
        and close the memory shared with it.
        """
        self._is_leaving.set()
        self._send(message)
        if self._companion is not None and "done" in message:
            with suppress(subprocess.TimeoutExpired):
                self._companion.wait(_COMPANION_END_S)
            with suppress(ProcessLookupError):
                self._companion.kill()
            self._companion.wait()
            current_phase.close_memory()

    def _send(self, message: dict[str, Any]) -> None:
        if self._control is not None:
            with self._sending, suppress(OSError):
                self._control.sendall(json.dumps(message).encode() + b"\n")


def _start_companion(
    config: dict[str, Any], fds: dict[str, int], *, may_print: bool
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    own_end, companion_end = socket.socketpair()
    with companion_end:
        fds = fds | {"control": companion_end.fileno()}
        return own_end, subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CODE, str(_ROOT), json.dumps(config | fds)],
            pass_fds=list(fds.values()), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=None if may_print else subprocess.DEVNULL,
        )  # fmt: skip


def _error_of_rank(process: ProcessEnv, verdict_error: LmtrainError) -> BaseException:
    """Return the error that this rank raises for a verdict: rank 0 or its companion prints it for all ranks."""
    return SystemExit(verdict_error.exit_code) if process.rank > 0 else verdict_error


@contextmanager
def watch_run(
    process: ProcessEnv, group: RunGroup, folder: Path, timeout_s: float,
    on_stop: Callable[[str], None] = lambda name: None, on_end: Callable[[LmtrainError], None] = lambda error: None,
    *, on_device: bool = False,
) -> Iterator[Watch]:  # fmt: skip
    """Start the watchdog of this rank for the enclosed run, and report to it whether the run succeeds, fails or is
    stopped. `folder` is the run folder, and `timeout_s` how long a rank may stay in one phase or collective. `on_stop`
    receives the name of the signal that another process got, and `on_end`, on rank 0, the error for which the watchdog
    ends the process.

    If a peer caused the end, raise the verdict that names it; on ranks other than 0 raise SystemExit with the same exit
    code, because rank 0 prints the error. `on_stop` and `on_end` are called from another thread. With `on_device`,
    collectives wait on a device and do not raise if a peer fails.
    """
    watch = Watch(process, on_stop, on_end, on_device=on_device)
    current_phase.enter("build")
    if process.world_size > 1:
        watch.open(group, folder, timeout_s)
    try:
        yield watch
    except LmtrainError as error:
        watch.report_end({"failed": str(error)[:2000], "code": error.exit_code})
        raise
    except Stopped as stopped:
        ignore_stops()  # because: other ranks that leave report it, too, and this rank already has its reason
        if (earlier_error := watch.earlier_error()) is None:
            watch.report_end({"left": True})  # because: the report makes the other ranks stop as well
            raise
        watch.report_end({"failed": str(stopped), "code": earlier_error.exit_code})
        raise _error_of_rank(process, earlier_error) from stopped
    except BaseException as error:
        of_peers = is_peer_error(error)
        culprit = watch.find_culprit(error) if of_peers else None
        code = culprit.exit_code if culprit else 76 if of_peers else 1
        watch.report_end({"failed": f"{type(error).__name__}: {error}"[:2000], "code": code})
        if culprit is None:
            raise
        raise _error_of_rank(process, culprit) from error
    watch.report_end({"done": True})


def flight_recorder_rows() -> str:
    """Return the newest 30 entries of torch's flight recorder of collectives as text, one JSON object per line; an
    empty text if there are none.

    Empty if this torch has no recorder, it is switched off, or it does not answer within a second.
    """
    answer: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(_read_flight_recorder()), name="flight recorder", daemon=True).start()
    try:
        return answer.get(timeout=_DUMP_S)
    except queue.Empty:
        return ""


def _read_flight_recorder() -> str:
    try:
        from torch._C import _distributed_c10d  # because: there is no public API, and not every build has this one

        dump: Any = vars(_distributed_c10d)["_dump_fr_trace_json"]
        return "".join(f"{json.dumps(entry)}\n" for entry in json.loads(dump()).get("entries", [])[-_MAX_ROWS:])
    except Exception:  # because: whatever is wrong with the recorder, the run is ending anyway
        return ""
