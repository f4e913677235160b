"""What a report of a long run takes: 1,000,000 steps in 100,000 rows, five starts, 512 ranks.

    python -m tests.benchmarks.report_page [FOLDER]

It writes the run into FOLDER (or one that goes again), then the report in a process of its own, and prints CPU
seconds, peak memory and the size of the page.
"""

from __future__ import annotations

import json
import math
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from lmtrain.config.compose_run_settings import compose
from lmtrain.layout import Layout
from lmtrain.train.run_config import RunConfig
from tests.unit.observe.timeline.made_up import Made

STEPS, EVERY = 1_000_000, 10
LAYOUT = (
    "model=gpt3_175b", "data.path=text", "parallel.pp=8", "parallel.dp_replicate=2", "parallel.dp_shard=4",
    "parallel.tp=8", "train.global_batch=1536", f"train.steps={STEPS}", "precision=bf16",
)  # fmt: skip
_TOKENS = 1536 * 2048


def write_run(folder: Path, steps: int = STEPS, every: int = EVERY, *, trace: bool = False) -> dict[str, Any]:
    """A long run with all that can happen to one; returns the extremes that a report has to keep."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = compose(RunConfig, [*LAYOUT, f"run.dir={folder}"]).to_dict()
    (folder / "environment.json").write_text(json.dumps({"python": "3.11.2", "packages": {"torch": "2.13.0"}}))
    if trace:
        layout = Layout(pp=8, dp_replicate=2, dp_shard=4, tp=8)
        Made(layout=layout, num_microbatches=16, steps=(10, 11, 12, 13, 14, 15), slow={77: 1.3}, hosts=64).write(folder)
    (folder / "config.json").write_text(json.dumps(settings))
    highest: dict[str, Any] = {"loss": (0.0, 0), "data_wait_s": (0.0, 0)}
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for row in _rows(steps, every):
            file.write(json.dumps(row) + "\n")
            if row["event"] == "step" and row["step"] > every * 100:
                for key in highest:
                    highest[key] = max(highest[key], (row[key], row["step"]))
    return highest


def _rows(steps: int, every: int) -> Iterator[dict[str, Any]]:
    draw, began, attempt, since = random.Random(5), datetime(2026, 1, 1, tzinfo=UTC), 1, 0
    has_told = False
    restarts = {round(steps * share) // every * every for share in (0.13, 0.4, 0.41, 0.77)}

    def row(event: str, step: int, **values: Any) -> dict[str, Any]:
        time = (began + timedelta(seconds=step * 0.42)).isoformat(timespec="milliseconds")
        return {"event": event, "step": step, "attempt": attempt, "time": time} | values

    yield row("start", 0, resumed_from=None, weights_from=None)
    for step in range(every, steps + 1, every):
        clean = 1.9 + 9 * (1 + step * 100_000 / steps) ** -0.33
        spike = draw.uniform(0.5, 4) if draw.random() < 40 / (steps / every) else 0.0
        yield row(
            "step", step, loss=clean + draw.gauss(0, 0.03) + spike,
            grad_norm=0.4 * math.exp(draw.gauss(0, 0.3)) + spike,
            lr=6e-5 * min(step / (steps / 500), 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))), skipped=0,
            samples=step * 1536, tokens=step * _TOKENS, samples_hash=f"{step:016x}",
            tokens_per_s=draw.gauss(7.4e6, 6e4),
            flops_per_s=draw.gauss(7.9e16, 1e14), mfu=draw.gauss(0.43, 0.004),
            data_wait_s=draw.expovariate(4000) + 30 * (draw.random() < 5 / (steps / every)),
            memory_bytes=72_000_000_000 + round(draw.gauss(0, 1e6)), elapsed_s=(step - since) * 0.42, eta_s=1.0,
        )  # fmt: skip
        if not has_told:
            has_told = True
            yield row("memory", step, peak_bytes=[(60 + rank // 64 + rank % 2) << 30 for rank in range(512)])
        if step % (steps // 200) == 0:
            yield row("valid", step, loss=clean + 0.03, ppl=math.exp(clean + 0.03), accuracy=0.5, samples=1000)
            yield row(
                "save", step, saved_step=step, bytes=2_100_000_000_000, write_s=61.0, stall_s=0.4, bytes_per_s=3e10
            )
        if step % (steps // 20) == 0:
            yield row(
                "eval", step, name="wiki", protocol="wikitext103", protocol_version=2, headline="word_perplexity",
                measures={"word_perplexity": math.exp(clean) * 1.3, "loss": clean}, data="wikitext103/test",
                text_sha256="ab" * 32, num_targets=245_569, nll_sum_nats=clean * 245_569, seq_len=2048, dtype="bf16",
                seconds=31.0,
            )  # fmt: skip
        if step in restarts:
            has_told = False
            since, attempt = step - step % (steps // 200), attempt + 1
            yield row("start", since, resumed_from=f"checkpoints/step_{since:08d}", weights_from=None)
    yield row("stop", steps, stopped_by=None, elapsed_s=steps * 0.42)


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments[0]) if arguments else Path(temporary) / "run"
        write_run(folder, trace=True)
        subprocess.run([sys.executable, "-m", "lmtrain", "report", str(folder)], check=True)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"CPU {used.ru_utime + used.ru_stime:.1f} s (bar 15), memory {used.ru_maxrss / 1e6:.2f} GB (bar 1), "
              f"page {(folder / 'report.html').stat().st_size / 1e6:.2f} MB (bar 3)")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
