"""`lmtrain.evaluate`: score a trained model on a task, as `lmtrain eval` does, in one process. Torch-free at first."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lmtrain.api.check_arguments import check_dtype, checked
from lmtrain.errors import UsageError
from lmtrain.observe.screen.command_progress import ProgressReporter
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.runtime.terminal_safe_text import write_line
from lmtrain.start.evaluation.run_tasks import Options, Session, Views, choose_layout, evaluate_one
from lmtrain.start.evaluation.tasks_and_texts import build_jobs, check_tasks_fit
from lmtrain.start.find_model_at_path import find_model


@checked
def evaluate(
    path: str | os.PathLike[str], task: str, data: str | os.PathLike[str], *, key: str = "text",
    format: str | None = None, baseline: str | os.PathLike[str] | None = None, batch_size: int = 8,
    stride: int | None = None, seq_len: int | None = None, limit: int | None = None, dtype: str = "fp32",
    device: str | None = None, weights: str = "model",
) -> dict[str, Any]:  # fmt: skip
    """Evaluate the model at `path`, which is anything that `lmtrain.load` takes, by a task of `lmtrain eval --list` on
    `data`: the task's file, or texts or a dataset. Return what `lmtrain eval --json` prints: the result is
    `["results"][0]`, its measures are `["results"][0]["measures"]`.

    The other parameters are the options of `lmtrain eval`; `dtype` is its --precision. `device` is cpu or cuda; without
    it a GPU is used if there is one. With `weights` "ema" the average of the weights is evaluated. Raise an
    LmtrainError if the model, the task or the data cannot be used.
    """
    for name, value in (("batch_size", batch_size), ("stride", stride), ("seq_len", seq_len), ("limit", limit)):
        if value is not None and value < 1:
            raise UsageError(f"{name}={value} must be at least 1. Leave it out for its default.")
    check_dtype(dtype)
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"device={device} is not a device that evaluations run on. Use cpu or cuda, or leave it out.")
    if str(data) == "-":
        raise UsageError("data=- is standard input, which a Python program does not hand over. Give a file.")
    jobs = build_jobs(
        [task], [str(data)], None if baseline is None else Path(baseline), format, key,
        report=lambda notice: write_line(notice, sys.stderr),
    )  # fmt: skip
    source, process = find_model(Path(path), weights), ProcessEnv()
    check_tasks_fit(jobs, [source], seq_len)
    options = Options(
        baseline=None if baseline is None else Path(baseline), batch_size=batch_size, stride=stride, seq_len=seq_len,
        limit=limit, device=device or "auto", precision=dtype, output=None, samples=None,
    )  # fmt: skip
    views = Views(_ignore, lambda activity, unit, note: nullcontext(ProgressReporter(activity, unit)), _ignore)
    session = Session(jobs, options, process, [choose_layout([], source.settings, process)], views)
    return evaluate_one(source, session, _ignore)


def _ignore(*shown: object) -> None:
    """Show nothing of an evaluation whose result is returned."""
