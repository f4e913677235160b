"""The child process that uses the wandb package: executes each JSON line of stdin and answers with an empty line.

Started by weights_and_biases.py. The first line opens the run, later lines log to it. At the end of its input the
process finishes the run, with a limit of 600 seconds for uploading the rest.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from typing import Any, BinaryIO

from lmtrain.runtime.files.safe_files import json_bytes

_UPLOAD_S = 600.0  # seconds for uploading after the input has ended


def main() -> None:
    # because: a node that is shut down signals all processes, and this one's last rows come after the signal
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # because: the package's own output must not be taken for answers
    try:
        _serve(sys.stdin.buffer, answers)
    except Exception as error:
        answers.write(json_bytes(f"{type(error).__name__}: {error}") + b"\n")
        sys.stdout.flush()
        os._exit(1)  # because: the package's exit handler would wait for the part that has just failed


def _serve(requests: BinaryIO, answers: Any) -> None:
    package, exit_code = importlib.import_module("wandb"), 1  # because: it takes seconds, and the run does not wait
    run_settings = json.loads(requests.readline())
    run = package.init(
        id=run_settings["id"], project=run_settings["project"], entity=run_settings["entity"],
        name=run_settings["name"], tags=run_settings["tags"],
        config=run_settings["config"], dir=run_settings["dir"], mode=run_settings["mode"], resume="allow",
        settings=package.Settings(console="off", x_stats_pid=run_settings["pid"]),
    )  # fmt: skip
    answers.write(b"\n")
    for line in requests:
        request = json.loads(line)
        if "exit_code" in request:
            exit_code = request["exit_code"]
        else:
            histograms = {
                name: package.Histogram(np_histogram=(counts, request["edges"]))
                for name, counts in request.get("histograms", {}).items()
            }
            run.log(request.get("values", histograms), step=request["step"])
        answers.write(b"\n")
    end = threading.Timer(_UPLOAD_S, os._exit, (1,))
    end.daemon = True
    end.start()
    run.finish(exit_code)
