"""Jobs of a real Slurm with two nodes n1 and n2, for tests that are skipped aloud where there is none."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmtrain.errors import LmtrainError
from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import lmtrain

ENV = {"OMP_NUM_THREADS": "1"}
_LONGEST_S = 900.0  # because: the nodes share two cores with whatever else runs


def need_two_nodes() -> None:
    if shutil.which("sinfo") is None:
        pytest.skip("no Slurm with two nodes")
    nodes = set(slurm("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines())
    if sum(line.split()[1].rstrip("*") in ("idle", "mix", "alloc", "comp") for line in nodes) < 2:
        pytest.skip("no Slurm with two nodes")


def slurm(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True).stdout


def until(happens: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _LONGEST_S
    while not happens():
        assert time.monotonic() < end, what
        time.sleep(0.1)


@dataclass
class BatchJob:
    number: str
    folder: Path

    @classmethod
    def submit(cls, folder: Path, *words: object, tasks_per_node: int = 4, tasks: str = "node") -> BatchJob:
        way = [] if tasks == "node" else ["--tasks", tasks]
        said = lmtrain("slurm", "submit", *words, "--tasks-per-node", tasks_per_node, *way, env=ENV)
        return cls(said.split()[0], folder)

    @property
    def log(self) -> str:
        with suppress(FileNotFoundError):
            return (self.folder / f"slurm-{self.number}.out").read_text()
        return ""

    @property
    def state(self) -> str:
        """RUNNING, PENDING and so on; empty once Slurm has forgotten it."""
        return slurm("squeue", "--noheader", f"--jobs={self.number}", "--format=%T").strip()

    @property
    def is_over(self) -> bool:
        return self.state in ("", "CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL")

    def until_queued(self) -> None:
        """Slurm lets a job that was queued again wait for two minutes; nodes refuse it for some seconds."""
        self.until_queued_or_over()
        assert self.state == "PENDING", self.log

    def until_queued_or_over(self) -> None:
        until(lambda: self.state == "PENDING" or self.is_over, f"job {self.number} is not queued:\n{self.log}")
        if self.state == "PENDING":
            slurm("scontrol", "update", f"jobid={self.number}", "StartTime=now+4seconds")

    def until_running(self) -> None:
        until(lambda: self.state == "RUNNING" or self.is_over, f"job {self.number} does not run")
        assert self.state == "RUNNING", self.log

    def until_over(self) -> str:
        until(lambda: self.is_over, f"job {self.number} does not end:\n{self.log}")
        until(lambda: not self.processes(), "processes are left")
        return self.log

    def until_step(self, step: int) -> None:
        until(lambda: max(self.steps, default=0) >= step or self.is_over, f"step {step} does not come:\n{self.log}")
        assert max(self.steps, default=0) >= step, self.log

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self._rows()]

    @property
    def losses(self) -> list[tuple[int, str, str]]:
        """Each step's loss and norm to the last bit; of a step that was done again the last."""
        rows = {row["step"]: row for row in self._rows()}
        return [(step, float(row["loss"]).hex(), float(row["grad_norm"]).hex()) for step, row in sorted(rows.items())]

    def _rows(self) -> list[dict[str, Any]]:
        with suppress(LmtrainError):
            return [row for row in read_metrics(self.folder / "metrics.jsonl") if row["event"] == "step"]
        return []

    def processes(self, rank: int | None = None, launcher: str | None = None) -> list[int]:
        """Process ids of this job's tasks and ranks: all of them, of one rank, or of the launcher of a node."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = set((entry / "environ").read_bytes().decode(errors="replace").split("\0"))
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                is_task = "-m lmtrain pretrain" in command
                starts_ranks = is_task and "--nproc-per-node" in command
                is_wanted = "pretrain" in command
                if launcher is not None:
                    is_wanted = starts_ranks and f"SLURMD_NODENAME={launcher}" in variables
                elif rank is not None:
                    is_rank_task = is_task and not starts_ranks and f"SLURM_PROCID={rank}" in variables
                    is_wanted = is_rank_task or command.startswith(f"lmtrain rank {rank} of ")
                if is_wanted and f"SLURM_JOB_ID={self.number}" in variables:
                    found.append(int(entry.name))
        return found
