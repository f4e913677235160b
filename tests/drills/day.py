"""A day of failures, with the clock run faster: how much of the time counts, beside the most that could.

Processes are killed at random moments, as often as a cluster of a certain size loses one, and the launcher starts them
again. The interval of the checkpoints is Young's for the save that was measured. What counts is steps that were done
once, at the time of a step; the most that could is Daly's, for the save, the start and the interval that were measured.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import shutil
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmtrain.observe.metrics import read_metrics
from tests.drills.broken import Broken, Options

COUNT = 144  # failures: one each ten minutes of a day
SPEED = 30.0  # how much faster the clock runs: ten minutes are 20 seconds
BETWEEN_S = 600.0 / SPEED
_MODEL: dict[str, object] = {
    "model__num_layers": 4, "model__width": 128, "model__num_heads": 4, "model__seq_len": 64,
    "eval__tasks": "[]", "eval__interval_steps": 0, "train__valid_interval_steps": 0,
    "checkpoint__verify_after_save": "false",
}  # fmt: skip


def young(save_s: float, between_s: float) -> float:
    """The interval at which what is saved for nothing and what is lost add up to the least."""
    return math.sqrt(2 * save_s * between_s)


def effective(interval_s: float, save_s: float, start_s: float, up_s: float) -> float:
    """The share of the time that counts, where failures come at random: Daly's exact sum over all that can happen.

    `start_s` is a start's mean from a failure to the first step, however many failures come in between, and `up_s` the
    mean from there to the next failure. A start that lasts r undisturbed lasts M (exp(r / M) - 1) so, if they come in
    it as often as at other times, M apart.
    """
    return interval_s / ((up_s + start_s) * math.expm1((interval_s + save_s) / up_s))


def best(save_s: float, start_s: float, up_s: float) -> float:
    return max(effective(up_s * n / 1000, save_s, start_s, up_s) for n in range(1, 3000))


def drill(options: Options) -> dict[str, Any]:
    folder, count, rng = options.folder / "run", options.count or COUNT, random.Random(options.seed)
    step_s, save_s, write_s = _measured(options)
    interval = max(1, round(young(write_s, BETWEEN_S) / step_s))  # because: no more are saved than can be written
    shutil.rmtree(folder, ignore_errors=True)
    words = [*_words(options, folder, interval), f"--max-restarts={10 * count}"]
    began, failures, given_up, left = time.monotonic(), 0, 0, list[str]()
    starts: list[float] = []  # seconds from a failure to the first step after it
    process, due = Broken(words), time.monotonic() + rng.expovariate(1 / BETWEEN_S)
    failed_at: float | None = began
    while failures < count or failed_at is not None:
        time.sleep(0.02)
        if failed_at is not None and (at := _first_step(process, failed_at)) is not None:
            starts.append(at - failed_at - step_s)
            failed_at = None
        if process.process.poll() is not None:  # lost three times at one step, where a person has to look
            left += process.to_the_end().left
            given_up += 1
            (folder / "starts.json").unlink(missing_ok=True)
            process = Broken(words)
        if time.monotonic() >= due and failures < count:
            due = time.monotonic() + rng.expovariate(1 / BETWEEN_S)
            pid = process.rank(rng.randrange(2))
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                failures += 1
                failed_at = failed_at or time.monotonic()
    wall_s = time.monotonic() - began
    process.process.send_signal(signal.SIGTERM)
    left += process.to_the_end().left
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]
    last = max(row["step"] for row in rows)
    step_s = _step_s(rows)  # because: all day long there may be neighbours
    # because: a failure before the first step after another one makes one long start of two
    start_s = statistics.mean(starts)
    up_s = wall_s / len(starts) - start_s
    share, most = last * step_s / wall_s, best(save_s, start_s, up_s)
    shutil.rmtree(folder)
    return {
        "passed": share >= 0.9 * most and not left, "failures": failures, "wall_s": round(wall_s), "given_up": given_up,
        "steps": last, "step_s": round(step_s, 4), "save_s": round(save_s, 4), "write_s": round(write_s, 4),
        "start_s": round(start_s, 2), "up_s": round(up_s, 1), "interval_steps": interval,
        "effective": round(share, 4), "optimum": round(most, 4), "of_the_optimum": round(share / most, 4), "left": left,
    }  # fmt: skip


def _first_step(process: Broken, failed_at: float) -> float | None:
    """When the first step was done after a failure, which is after the launcher's line about its next start."""
    begun = process.began > failed_at or not process.lines
    for when, line in process.lines[-500:]:
        begun = begun or (when > failed_at and "goes on from" in line) or when < process.began
        if begun and when > failed_at and line.startswith("step "):
            return when
    return None


def _words(options: Options, folder: Path, interval: int, **changed: object) -> list[str]:
    values = {**_MODEL, "train__steps": 1_000_000, "checkpoint__interval_steps": interval, **changed}
    return options.world.settings("dp2", folder, **values)


def _measured(options: Options) -> tuple[float, float, float]:
    """Seconds of a step, that a save keeps it waiting, and that the save is written in."""
    folder = options.folder / "measured"
    shutil.rmtree(folder, ignore_errors=True)
    ended = Broken(_words(options, folder, 10, train__steps=60)).to_the_end()
    assert ended.code == 0, ended.output
    rows = read_metrics(folder / "metrics.jsonl")
    shutil.rmtree(folder)
    stalls, writes = ([row[key] for row in rows if row["event"] == "save"] for key in ("stall_s", "write_s"))
    steps = [row for row in rows if row["event"] == "step"]
    return _step_s(steps), max(statistics.median(stalls), 1e-3), max(statistics.median(writes), 1e-3)


def _step_s(rows: Sequence[Mapping[str, Any]]) -> float:
    """Of steps that followed one another without a new start."""
    pairs = [(a, b) for a, b in itertools.pairwise(rows) if b["step"] == a["step"] + 1]
    took = [b["elapsed_s"] - a["elapsed_s"] for a, b in pairs]
    return float(statistics.median(seconds for seconds in took if seconds > 0))
