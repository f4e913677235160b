"""The lines on the screen about settings that changed since a run's last start, or since the run that it goes on from.

Called by metrics_writer.py at the start of a run, on rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lmtrain.config.settings_base import show
from lmtrain.runfolder.file_names import METRICS
from lmtrain.runfolder.lineage import run_of_checkpoint
from lmtrain.runfolder.metrics_rows import read_last_rows, read_metrics, rows_in_force
from lmtrain.train.run_objects_and_resume import Run

_WARN_RATIO = 1.1  # ratio of learning rates between two steps above which a warning is shown
_LEARNING_RATE_KEYS = ("schedule.", "train.steps", "train.tokens")


def change_lines(run: Run) -> Iterator[str]:
    """Yield a line of text for each setting that changed since the run's last start or, for a run that begins from the
    checkpoint of another, since that run. Then yield a warning if the learning rate jumps because of a change.
    """
    for key, (old, new) in run.changed_settings.items():
        if not key.startswith("stages."):  # because: a line with the run's stages was shown
            yield f"{key} is {show(new)} from here on; it was {show(old)}"
    # because: a changed optim.lr is meant to jump, and so is that of a stage
    is_meant = not any(key.startswith(_LEARNING_RATE_KEYS) for key in run.changed_settings)
    if not is_meant and not run.config.stage_name:
        yield from _jump_warnings(run)


def _jump_warnings(run: Run) -> Iterator[str]:
    """Yield a warning if the learning rate of the next step differs much from that of the step before it."""
    step, total, schedule = run.progress.step, run.config.total_steps, run.config.schedule
    before = _learning_rate_of_step(run.folder, run.inputs.resume_from, step)
    after = run.config.learning_rate(min(step, total - 1))
    if before is None or max(before, after) <= _WARN_RATIO * min(before, after):
        return
    words = f"stages.next.steps={total - step} stages.next.schedule={schedule.kind}"
    stage = f", and {words} in place of schedule and train.steps lets a schedule begin here"
    yield (
        f"warning: with that the learning rate goes from {before:.2e} to {after:.2e} in one step, because the schedule "
        f"counts from the run's first step; schedule=constant optim.lr={before:.2e} keeps the rate"
        f"{stage if schedule.kind != 'constant' else ''}"
    )


def _learning_rate_of_step(folder: Path, resumed: Path | None, step: int) -> float | None:
    """Return the learning rate of `step`, from which the run in `folder` goes on, as recorded there or, if `resumed` is
    the checkpoint of another run, in the folder of that run; None if it was not recorded.
    """
    if resumed is None or resumed.resolve().is_relative_to(folder.resolve()):
        rows = rows_in_force(read_last_rows(folder / METRICS))
    else:
        metrics = run_of_checkpoint(resumed) / METRICS
        rows = read_metrics(metrics) if metrics.is_file() else []
    rates = [row.get("lr") for row in rows if row["event"] == "step" and row["step"] == step]
    return next((rate for rate in reversed(rates) if isinstance(rate, float)), None)
