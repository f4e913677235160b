"""A run that is slow and not hung: every core busy with other work, and saves of a gigabyte. Nobody may be named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from typing import Any

from lmtrain.observe.metrics import read_metrics
from tests.drills.broken import Broken, Options

SECONDS = 30 * 60.0
_BUSY = "while True: pass"
# because: 12 bytes of checkpoint a weight make this one a gigabyte
_LARGE = {"model__num_layers": 12, "model__width": 768, "model__num_heads": 12, "train__global_batch": 2}


def drill(options: Options) -> dict[str, Any]:
    seconds, folder = options.seconds or SECONDS, options.folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    words = options.world.settings(
        "dp2", folder, **_LARGE, train__steps=1_000_000, checkpoint__interval_steps=5, checkpoint__keep_last=1,
        parallel__timeout_s=600, eval__tasks="[]", eval__interval_steps=0, checkpoint__verify_after_save="false",
    )  # fmt: skip
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(os.cpu_count() or 1)]
    try:
        process = Broken(words)
        process.line(lambda line: line.startswith("step "))
        began = time.monotonic()
        while process.process.poll() is None and time.monotonic() - began < seconds:
            time.sleep(1)
        process.process.terminate()
        ended = process.to_the_end()
    finally:
        for one in busy:
            one.kill()
            one.wait()
    alarms = [line for line in ended.output.splitlines() if re.search(r"error: |has been in", line)]
    rows = read_metrics(folder / "metrics.jsonl")
    saves = [row for row in rows if row["event"] == "save"]
    stop_json = (folder / "stop.json").read_text()
    shutil.rmtree(folder)
    return {
        "passed": ended.code == 75 and not alarms and not ended.left, "code": ended.code, "alarms": alarms,
        "seconds": round(time.monotonic() - began), "steps": sum(row["event"] == "step" for row in rows),
        "saves": len(saves), "bytes": max((row.get("bytes", 0) for row in saves), default=0), "stop": stop_json,
        "left": ended.left,
    }  # fmt: skip
