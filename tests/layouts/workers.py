"""Worker processes that outlive a test: `pool.run("module:function", n, {...})` gives what each rank returned.

One nursery process imports torch once and forks a worker in milliseconds whenever one is needed or has to be replaced.
The tests' own process talks to workers in lines of JSON; worker.py is the other end. Must not import torch.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
# because: ranks that wait for one that has failed see its connections close at once; longer means that they hang
GRACE_S = 5.0
# because: compiled code, and graphs that nobody went back through, keep their groups, of which each thread wakes a
# hundred times a second; some hundred of these take both cores
MOST_THREADS = 64
DEVICE = "LMTRAIN_TESTS_DEVICE"  # what a worker computes on; its CPU unless it is said


class WorkerFailed(AssertionError):
    """What went wrong, rank by rank, the first to fail first."""


class Worker:
    """One forked process, at the other end of a socket."""

    def __init__(self, pid: int, end: socket.socket, log: Path) -> None:
        self.pid, self.end, self.log = pid, end, log
        self.lines = end.makefile("r", encoding="utf-8")

    def send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # a dead worker is noticed where its answer is awaited
            self.end.sendall(json.dumps(message).encode() + b"\n")

    def answer(self) -> dict[str, Any] | None:
        """The next line, or None where the process has ended."""
        line = self.lines.readline()
        return dict(json.loads(line)) if line.endswith("\n") else None

    @property
    def is_worn(self) -> bool:
        """It has kept the threads of groups that are gone."""
        with suppress(FileNotFoundError):
            return len(os.listdir(f"/proc/{self.pid}/task")) > MOST_THREADS
        return False

    def last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self.lines.close()
        self.end.close()


class Nursery:
    """The process that has torch and no threads, and forks."""

    def __init__(self, logs: Path, device: str) -> None:
        self.logs, self.born = logs, 0
        self.end, theirs = socket.socketpair()
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.layouts.worker", str(theirs.fileno())],
            cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1",
                 "GLOO_SOCKET_IFNAME": loopback, DEVICE: device, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        )  # fmt: skip
        theirs.close()

    def bear(self) -> Worker:
        self.born += 1
        log = self.logs / f"worker_{self.born}.log"
        ours, theirs = socket.socketpair()
        with theirs, log.open("w") as file:
            socket.send_fds(self.end, [b"f"], [theirs.fileno(), file.fileno()])
        pid = self.end.recv(64)
        assert pid, "the nursery of workers has died: does `python -m tests.layouts.worker` import?"
        return Worker(int(pid), ours, log)

    def close(self) -> None:
        self.end.close()
        self.process.wait(60)


class Pool:
    """Up to as many workers as the largest case needs, started when it comes. Close it, or use it in a `with`.

    With `device="cuda"` they all compute on the first GPU, and talk by NCCL of what lies there.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._folder = tempfile.TemporaryDirectory(prefix="lmtrain_workers_")
        self._nursery: Nursery | None = None
        self._workers: list[Worker] = []

    def run(
        self, function: str, num_processes: int, arguments: dict[str, Any] | None = None, *, timeout_s: float = 300.0
    ) -> list[Any]:
        """Call `module:function(**arguments)` on each of the first n workers; gives their results by rank.

        Several workers have a default process group of their own, made before the call and gone after it; one has none.
        """
        workers = self._first(num_processes)
        request = {
            "function": function, "arguments": arguments or {}, "world_size": num_processes, "timeout_s": timeout_s,
        }  # fmt: skip
        port = None
        for rank, worker in enumerate(workers):
            worker.send(request | {"rank": rank, "port": port})
            if rank == 0 and num_processes > 1:
                port = (worker.answer() or {}).get("port")
        answers = self._gather(workers, timeout_s)
        if not all(ok for _, ok, _ in answers):
            raise WorkerFailed(f"{function} on {num_processes} processes\n{_told(answers)}")
        for worker in workers:
            worker.send({"release": True})  # only now: no rank may take its group away from one that still computes
        return [result for _, _, result in sorted(answers, key=lambda answer: answer[0])]

    def _first(self, num_processes: int) -> list[Worker]:
        if self._nursery is None:
            self._nursery = Nursery(Path(self._folder.name), self.device)
        for worker in [worker for worker in self._workers[:num_processes] if worker.is_worn]:
            self._bury(worker)
        while len(self._workers) < num_processes:
            self._workers.append(self._nursery.bear())
        return self._workers[:num_processes]

    def _gather(self, workers: list[Worker], timeout_s: float) -> list[tuple[int, bool, Any]]:
        """(rank, whether it went well, result or what happened), in the order in which they came."""
        answers: list[tuple[int, bool, Any]] = []
        for rank, worker in self._ready(workers, timeout_s, lambda: any(not ok for _, ok, _ in answers)):
            answer = worker.answer()
            if answer is None:
                answers.append((rank, False, f"the process ended\n{worker.last_words()}"))
                self._bury(worker)
            else:
                answers.append((rank, answer["ok"], answer["result"]))
        for rank in sorted(set(range(len(workers))) - {rank for rank, _, _ in answers}):
            answers.append((rank, False, f"gave no answer and was killed\n{workers[rank].last_words()}"))
            self._bury(workers[rank])
        return answers

    def _ready(self, workers: list[Worker], timeout_s: float, failed: Any) -> Iterator[tuple[int, Worker]]:
        """Each worker once it has something to say, until time is up; time is short once one has failed."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for rank, worker in enumerate(workers):
                selector.register(worker.end, selectors.EVENT_READ, (rank, worker))
            while selector.get_map():
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    return
                for key, _ in events:
                    selector.unregister(key.fileobj)
                    yield key.data
                if failed():
                    deadline = min(deadline, time.monotonic() + GRACE_S)

    def _bury(self, worker: Worker) -> None:
        worker.kill()
        self._workers.remove(worker)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()  # a worker ends with its socket
        self._workers.clear()
        if self._nursery is not None:
            self._nursery.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _told(answers: list[tuple[int, bool, Any]]) -> str:
    """What happened on which ranks, each story once."""
    stories: dict[str, list[int]] = {}
    for rank, ok, text in answers:
        if not ok:
            stories.setdefault(text, []).append(rank)
    return "\n".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in stories.items())
