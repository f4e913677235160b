"""The process that talks to the package wandb: reads a line of JSON, does what it says, answers with an empty line.

Started by weights_and_biases.py. The first line opens the run, later ones log to it. Where its input
ends, so does the run; it does not outlive the run that feeds it by more than it takes to upload what is left.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from typing import Any, BinaryIO

from lmtrain.runtime.files.files import json_bytes

_LEFT_S = 600.0  # for uploading when nobody feeds it any more


def main() -> None:
    # because: a node that is taken away tells all processes, and this one's last rows come after that
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # because: what the package prints is no answer
    try:
        _serve(sys.stdin.buffer, answers)
    except Exception as error:
        answers.write(json_bytes(f"{type(error).__name__}: {error}") + b"\n")
        sys.stdout.flush()
        os._exit(1)  # because: the package's own ending would wait for what has just failed


def _serve(asked: BinaryIO, answers: Any) -> None:
    package, exit_code = importlib.import_module("wandb"), 1  # because: it takes seconds, and the run does not wait
    told = json.loads(asked.readline())
    run = package.init(
        id=told["id"], project=told["project"], entity=told["entity"], name=told["name"], tags=told["tags"],
        config=told["config"], dir=told["dir"], mode=told["mode"], resume="allow",
        settings=package.Settings(console="off", x_stats_pid=told["pid"]),
    )  # fmt: skip
    answers.write(b"\n")
    for line in asked:
        what = json.loads(line)
        if "exit_code" in what:
            exit_code = what["exit_code"]
        else:
            drawn = {
                name: package.Histogram(np_histogram=(counts, what["edges"]))
                for name, counts in what.get("histograms", {}).items()
            }
            run.log(what.get("values", drawn), step=what["step"])
        answers.write(b"\n")
    end = threading.Timer(_LEFT_S, os._exit, (1,))
    end.daemon = True
    end.start()
    run.finish(exit_code)
