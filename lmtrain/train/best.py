"""Whether a run can tell which of its checkpoints is best: a measure of that name, at steps that are saved. Torch-free.

Called with the checks across settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lmtrain.checkpoint.checkpoint_settings import CheckpointSettings
from lmtrain.config.base import Problem
from lmtrain.data.data_settings import DataChoice
from lmtrain.errors import nearest
from lmtrain.observe.measure.measures import names_of_validation
from lmtrain.train.eval_settings import EvalSettings
from lmtrain.train.train_settings import TrainSettings

_KEY = "checkpoint.best_by"


def best_problems(
    checkpoint: CheckpointSettings, data: DataChoice, train: TrainSettings, evaluation: EvalSettings, total_steps: int
) -> Iterator[Problem]:
    name, saves = checkpoint.best_by, checkpoint.interval_steps
    if checkpoint.keep_best == 0 or not saves:
        return
    if name.startswith("eval/"):
        every, interval = evaluation.interval_steps, "eval.interval_steps"
        prefixes = [f"eval/{one.called}/" for one in evaluation.tasks]
        known = any(name.startswith(prefix) for prefix in prefixes)
        way_out = f"Use {' or '.join(f'{one}MEASURE' for one in prefixes)}." if prefixes else "Give it in eval.tasks."
    else:
        every, interval = train.valid_interval_steps, "train.valid_interval_steps"
        names = names_of_validation(data.terms, data.valid_paths)
        known, way_out = name in names, nearest(name, names)
    if not known:
        yield Problem(_KEY, name, "is nothing that this run measures", way_out)
    elif every == 0:
        way_out = f"Add {interval}={saves}, or leave checkpoint.keep_best out."
        yield Problem(_KEY, name, f"is never measured before the end of the run with {interval}=0", way_out)
    elif math.lcm(saves, every) >= total_steps:
        rule = (
            f"is measured every {every} steps, and with checkpoint.interval_steps={saves} none of them is saved before "
            f"the end at {total_steps}"
        )
        yield Problem(_KEY, name, rule, f"Use {interval}={saves}, or less for both in a run as short as this.")
