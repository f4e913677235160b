"""What it costs to start: a run of two steps beside an earlier checkout, `import torch`, and `--help`.

    python -m tests.benchmarks.start_up --before ../before --data data/books --pairs 7

Each pair runs before and now, the order changing from pair to pair. CPU seconds and memory are those of the whole tree
of processes: the launcher, the server that forks ranks, ranks, companions and guardian, whoever ended first. The two
checkouts run with this interpreter and from their own sources; what `before` compiled must lie in its lmtrain/.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = (
    "model=gpt_tiny", "model.seq_len=64", "train.steps=2", "schedule.warmup_steps=1", "train.valid_interval_steps=0",
    "train.global_batch=8", "train.micro_batch=2", "compute.device=cpu",
)  # fmt: skip
FOUR = ("parallel.tp=2", "parallel.dp_shard=2", "--nproc", "4")
HELP = "import sys; sys.argv = ['lmtrain', '--help']; from lmtrain.__main__ import main; main()"
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER: what outlives a launcher is counted too
_LOOK_S = 0.05


@dataclass(frozen=True)
class Cost:
    cpu_s: float
    wall_s: float
    pss_bytes: int  # the most that the tree held at one time; 0 where nobody looked


def cost(root: Path, words: list[str], *, look: bool = False) -> Cost:
    """Run Python with these words from the sources of a checkout; the cost of its whole tree of processes."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        cwd=root,  # because: Python looks there before PYTHONPATH
    )  # fmt: skip
    peak = _Peak(process.pid) if look else None
    _, said = process.communicate()
    wall_s = time.perf_counter() - began
    assert process.returncode == 0, said.decode()
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)  # what the command has left behind, which this process has adopted
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(cpu_s, wall_s, peak.stop() if peak else 0)


class _Peak:
    """Looks at the memory of a process and of all that it has started: shared pages count once."""

    def __init__(self, pid: int) -> None:
        self._pid, self._most, self._over = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self._most

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._most = max(self._most, sum(map(_pss_bytes, _tree(self._pid))))


def _tree(pid: int) -> list[int]:
    found = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _tree(int(child))
    return found


def _pss_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the commit to compare with")
    parser.add_argument("--data", type=Path, required=True, help="the prefix of a dataset")
    parser.add_argument("--pairs", type=int, default=7)
    asked = parser.parse_args()
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
    pretrain = ["-m", "lmtrain", "pretrain", *RUN, f"data.path={asked.data.resolve()}"]
    jobs = {"four ranks": [*pretrain, *FOUR], "one process": pretrain, "--help": ["-c", HELP]}
    yardsticks = {"import torch": ["-c", "import torch"], "import typer, rich": ["-c", "import typer, rich.console"]}
    roots = {"before": asked.before.resolve(), "now": ROOT}
    seen: dict[tuple[str, str], list[Cost]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for pair in range(asked.pairs + 1):  # the first fills caches and is not counted
            for job, words in jobs.items():
                for which in sorted(roots, reverse=pair % 2 == 1):
                    run = [f"run.dir={folder / 'run'}"] if "pretrain" in words else []
                    found = cost(roots[which], [*words[:4], *run, *words[4:]] if run else words)
                    shutil.rmtree(folder / "run", ignore_errors=True)
                    if pair:
                        seen.setdefault((job, which), []).append(found)
            for job, words in yardsticks.items():
                if pair:
                    seen.setdefault((job, ""), []).append(cost(ROOT, words))
        for which, root in roots.items():  # apart, since looking takes time itself
            words = [*jobs["four ranks"][:4], f"run.dir={folder / 'run'}", *jobs["four ranks"][4:]]
            print(f"four ranks, {which:6}: {cost(root, words, look=True).pss_bytes / 2**20:.0f} MiB at most (PSS)")
            shutil.rmtree(folder / "run", ignore_errors=True)
    for (job, which), costs in sorted(seen.items()):
        cpu, wall = (statistics.median(getattr(one, key) for one in costs) for key in ("cpu_s", "wall_s"))
        print(f"{job}, {which or 'alone':6}: {cpu:6.2f} CPU s, {wall:6.2f} s")
    for job in jobs:
        before, now = seen[job, "before"], seen[job, "now"]
        for key in ("cpu_s", "wall_s"):
            ratios = [getattr(b, key) / getattr(a, key) for a, b in zip(before, now, strict=True)]
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            print(f"{job}: now / before, {key}: median {statistics.median(ratios):.3f}, {spread}")
    for job, yardstick in (("four ranks", 0), ("one process", 0), ("--help", 1)):
        name = list(yardsticks)[yardstick]
        for which in roots:
            pairs = zip(seen[job, which], seen[name, ""], strict=True)
            ratio = statistics.median(one.cpu_s / base.cpu_s for one, base in pairs)
            print(f"{job}, {which}: {ratio:.2f} x the CPU seconds of `{name}`")


if __name__ == "__main__":
    main()
