"""Weights & Biases sink: sends each row to a child process that uses the wandb package, and waits for the answer.

Called through queued_sink.py. The package starts threads and processes, asks for passwords and can exit the program;
all of that happens in the child process, which runs `main_of_child`, and neither reaches the run nor delays its steps.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lmtrain.observe.sinks.queued_sink import row_scalars
from lmtrain.runfolder.tensorboard_metric_names import EDGES, Histogram
from lmtrain.runtime.files.atomic_files import json_bytes

_ROOT = Path(__file__).parents[3]
_CODE = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from lmtrain.observe.sinks.weights_and_biases import main_of_child; main_of_child()"
)
FOLDER = "wandb"  # inside the run folder, where the package writes
_ID, _OUTPUT = "run_id", "output.txt"
_UPLOAD_S = 20.0  # seconds for uploading the rest; after that the process is left to finish alone
_CHILD_UPLOAD_S = 600.0  # seconds for uploading in that process after its input has ended


@dataclass(frozen=True)
class Account:
    """The destination of the records, and the run's name there."""

    mode: str  # offline or online
    project: str
    entity: str | None
    name: str
    tags: tuple[str, ...]


class WeightsAndBiases:
    def __init__(self, folder: Path, account: Account, settings: Mapping[str, Any]) -> None:
        """Start the process and open the run.

        `folder` is the run folder; a resumed run keeps the id of its first start.
        """
        wandb_folder = folder / FOLDER
        wandb_folder.mkdir(exist_ok=True)
        self._output = wandb_folder / _OUTPUT
        with open(self._output, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CODE, str(_ROOT)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
                start_new_session=True,  # because: Ctrl-C is meant for the run, which sends its last rows afterwards
            )  # fmt: skip
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        self._requests, self._answers = requests, answers
        try:
            self._request({
                **asdict(account), "id": wandb_run_id(wandb_folder), "dir": str(folder), "config": dict(settings),
                "pid": os.getpid(),
            })  # fmt: skip
        except ConnectionError:
            self.close()
            raise

    def write_row(self, row: Mapping[str, Any]) -> None:
        if values := row_scalars(row):
            self._request({"step": row["step"], "values": values})
        if row["event"] == "stop":
            self._request({"exit_code": int(bool(row.get("stopped_by")))})

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        counts = {name: histogram.counts[1:-1] for name, histogram in histograms.items()}
        self._request({"step": step, "edges": EDGES, "histograms": counts})

    def close(self) -> None:
        with suppress(OSError):  # because: closing the pipe to a process that has ended fails
            self._requests.close()
        self._answers.close()
        try:
            self._process.wait(_UPLOAD_S)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"wandb's process {self._process.pid} still uploads after {_UPLOAD_S:g} s, and goes on by itself"
            ) from None

    def _request(self, message: Mapping[str, Any]) -> None:
        """Send `message` to the process that runs the wandb package, and wait for its answer. Raise ConnectionError if
        the answer is an error or does not come.
        """
        try:
            self._requests.write(json_bytes(message) + b"\n")
            self._requests.flush()
            answer = self._answers.readline()
        except OSError:
            answer = b""
        if not answer:
            raise ConnectionError(f"the process that runs wandb has ended; its output is in {self._output}")
        if answer != b"\n":
            raise ConnectionError(json.loads(answer))


def wandb_run_id(folder: Path) -> str:
    """Return the Weights & Biases run id that is stored in `folder`. If there is none, draw it at random and store it
    first.
    """
    path = folder / _ID
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text()


def main_of_child() -> None:
    """Run the process that uses the wandb package: carry out each JSON line of standard input, and answer it with an
    empty line. After a failure answer with a JSON text instead, and exit with code 1.

    The first line opens the run, later lines log to it. At the end of its input the process finishes the run, with a
    limit of 600 seconds for uploading the rest.
    """
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
    pid = run_settings.pop("pid")
    run = package.init(
        **run_settings, resume="allow", settings=package.Settings(console="off", x_stats_pid=pid)
    )
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
    end = threading.Timer(_CHILD_UPLOAD_S, os._exit, (1,))
    end.daemon = True
    end.start()
    run.finish(exit_code)
