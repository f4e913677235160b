"""What drills share: a small run at any layout, what it must come to, and what must not be left of it.

Called by every drill. A run is started as users start it, in processes of its own that bear a mark in their
environment, by which all of them are found again, whoever started them.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmtrain.observe.metrics import read_metrics
from tests.toytext import write_toy_last_words, write_toy_texts

ROOT = Path(__file__).resolve().parents[2]
MARK = "LMTRAIN_DRILL"
SHARED = Path("/dev", "shm")
STEPS = 15
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "dp2": (2, ("parallel.dp_shard=2", "parallel.zero=2")),
    "tp2": (2, ("parallel.tp=2",)),
    "pp2": (2, ("parallel.pp=2",)),
    "dp2 tp2": (4, ("parallel.dp_shard=2", "parallel.zero=2", "parallel.tp=2")),
    "tp2 pp2 dp2": (8, ("parallel.dp_shard=2", "parallel.zero=1", "parallel.tp=2", "parallel.pp=2")),
}
_EXACT = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "samples_hash", "skipped")
_LONGEST_S = 600.0  # because: a machine may be busy, and what hangs longer than this is a failure
_GONE_S = 20.0


@dataclass(frozen=True)
class World:
    """A text, a tokenizer and a dataset, made once."""

    text: Path
    data: Path
    lines: Path

    @classmethod
    def made(cls, folder: Path) -> World:
        world = cls(folder / "text", folder / "data/toy", folder / "lambada_test.jsonl")
        if not (folder / "made").exists():
            world.text.mkdir(parents=True, exist_ok=True)
            write_toy_texts(world.text)
            tokenizer = folder / "tokenizer"
            for words in (
                ["tokenizer", "train", world.text, "--output", tokenizer, "--vocab-size", 400],
                ["preprocess", world.text, "--tokenizer", tokenizer, "--output", world.data],
            ):
                done = Broken(words).to_the_end()
                assert done.code == 0, done.output
            write_toy_last_words(world.lines, 4)
            (folder / "made").touch()
        return world

    def settings(self, layout: str, folder: Path, **changed: object) -> list[str]:
        """`lmtrain pretrain` of a run of seconds, with dropout, validations, an evaluation and five checkpoints."""
        nproc, words = LAYOUTS[layout]
        values: dict[str, object] = {
            "data.path": self.data, "run.dir": folder, "train.steps": STEPS, "train.global_batch": 4,
            "train.micro_batch": 1, "train.valid_interval_steps": 4, "train.valid_samples": 4, "model.seq_len": 32,
            "model.num_layers": 2, "model.width": 32, "model.num_heads": 2, "model.vocab_multiple": 8,
            "model.dropout": 0.1, "compute.threads": 1, "observe.log_interval_steps": 1, "observe.tensorboard": "false",
            "checkpoint.interval_steps": 3, "checkpoint.verify_after_save": "true", "schedule.warmup_steps": 2,
            "optim.lr": "3e-3", "eval.tasks": f"[{{task: lambada/megatron-strict, data: {self.lines}}}]",
            "eval.interval_steps": 5, "parallel.timeout_s": 60,
        }  # fmt: skip
        values |= {key.replace("__", "."): value for key, value in changed.items()}
        several = ["--nproc", str(nproc)] if nproc > 1 else []
        return ["pretrain", *several, *words, *(f"{key}={value}" for key, value in values.items())]


@dataclass(frozen=True)
class Options:
    world: World
    folder: Path  # of this drill
    seed: int = 1
    count: int | None = None
    seconds: float | None = None
    layouts: tuple[str, ...] | None = None


@dataclass
class Ended:
    code: int
    seconds: float
    output: str
    left: list[str] = field(default_factory=list)  # processes that outlived it, in words


class Broken:
    """One start of a command that is about to be broken."""

    def __init__(self, words: Sequence[object], env: Mapping[str, str] | None = None, fault: str | None = None) -> None:
        self.mark = secrets.token_hex(8)
        asked = {"LMTRAIN_FAULT": fault, "LMTRAIN_ALLOW_FAULTS": "1"} if fault else {}
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lmtrain", *map(str, words)], cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200", MARK: self.mark}
            | asked | dict(env or {}),
        )  # fmt: skip
        self.lines: list[tuple[float, str]] = []  # with the time at which each came
        self._came = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._came:
                    self.lines.append((time.monotonic(), line))
                    self._came.notify_all()

    def line(self, wanted: Callable[[str], bool], timeout_s: float = 120.0) -> tuple[float, str] | None:
        """The first line that is wanted and when it came, or None if the command ends without one."""
        deadline = time.monotonic() + timeout_s
        with self._came:
            while True:
                for when, text in self.lines:
                    if wanted(text):
                        return when, text
                if time.monotonic() > deadline or not (self._reader.is_alive() or self.lines):
                    return None
                if not self._came.wait(0.2) and not self._reader.is_alive():
                    return next(((when, text) for when, text in self.lines if wanted(text)), None)

    def rank(self, rank: int) -> int | None:
        """The process id of one rank of a launcher."""
        for pid in marked(self.mark):
            with suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in variables and _parent(pid) == self.process.pid:
                    return pid
        return None

    def to_the_end(self, timeout_s: float = _LONGEST_S) -> Ended:
        """Waits, and ends and names whatever is still there afterwards."""
        hung = False
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            hung = True
        seconds = time.monotonic() - self.began
        left = [f"hung for {timeout_s:.0f} s"] if hung else []
        deadline = time.monotonic() + _GONE_S
        while not hung and marked(self.mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in marked(self.mark):
            left.append(f"process {pid}: {_words(pid)}")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code = self.process.wait()
        self._reader.join(10)
        return Ended(code, seconds, "".join(text for _, text in self.lines), left)


def marked(mark: str) -> list[int]:
    """All living processes that were started, by whomever, under this mark."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with suppress(OSError):
                if wanted in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _words(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "gone by now"


def reached(folder: Path) -> dict[str, Any]:
    """What two runs must agree on to the last bit: rows of metrics, and the roots of the final checkpoint's files."""
    rows = read_metrics(folder / "metrics.jsonl")
    steps = [[row[key] for key in _EXACT] for row in rows if row["event"] == "step"]
    valid = [[row["step"], row["loss"]] for row in rows if row["event"] == "valid"]
    manifest = json.loads((folder / f"checkpoints/step_{STEPS:08d}/manifest.json").read_text())
    files = {name: entry["root"] for name, entry in manifest["files"].items() if name.endswith(".safetensors")}
    return {"steps": steps, "valid": valid, "files": files}


def temporary(folder: Path) -> list[str]:
    """What a run that is done must not have left."""
    return [str(path) for path in folder.rglob("*") if ".tmp" in path.name]


def shared_memory() -> set[str]:
    """Of our own, which a run leaves only if it is killed with all that could remove it."""
    return {path.name for path in SHARED.glob("lmtrain*")} if SHARED.is_dir() else set()


def journal(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.is_file() else ():
        with suppress(json.JSONDecodeError):  # because: a kill may cut the last line
            yield json.loads(line)
