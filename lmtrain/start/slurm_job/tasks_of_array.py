"""The text of --array-tasks: which jobs of an array are started, and how many of them at a time. Called by
slurm_command.py.
"""

from __future__ import annotations

import re

from lmtrain.errors import UsageError, example, own
from lmtrain.units import plural

_RANGE = r"\d{1,7}(-\d{1,7}(:[1-9]\d{0,6})?)?"
_TASKS = re.compile(rf"(?P<tasks>{_RANGE}(,{_RANGE})*)?(%[1-9]\d{{0,6}})?", re.ASCII)


def parse_array_tasks(text: str) -> int:
    """Return the largest number of a task in the text, such as 3 for 0-3%2; -1 if it has no task, as in %2, which is
    the limit of tasks at a time. Raise UsageError if sbatch could not read it.
    """
    match = _TASKS.fullmatch(text)
    parts = [[*map(int, re.split("[-:]", part))] for part in (match["tasks"] or "").split(",") if part] if match else []
    if match is None or not text or any(len(part) > 1 and part[1] < part[0] for part in parts):
        examples = ", ".join(map(example, ("0-3", "0,2", "%2")))
        raise UsageError(
            f"--array-tasks={text} does not name tasks as sbatch's --array does. Give some, as in {examples} or "
            f"{example('0-3%2')}: two at a time."
        )
    return max((max(part[:2]) for part in parts), default=-1)


def check_array_tasks(text: str, num_runs: int) -> None:
    """Raise UsageError if the text names a task without a run. The runs are the tasks 0 to `num_runs` - 1."""
    if parse_array_tasks(text) >= num_runs:
        limit = "".join(text.partition("%")[1:])
        raise UsageError(
            f"--array-tasks={text} names more than the {plural(num_runs, 'run')} of the array, which are the tasks 0 "
            f"to {num_runs - 1}. Use {own(f'0-{num_runs - 1}{limit}')}."
        )


def array_range(text: str | None, num_runs: int) -> str:
    """Return the value of sbatch's --array for `num_runs` runs: the text, or all tasks if it names none."""
    text = text or ""
    return f"0-{num_runs - 1}{text}" if text[:1] in ("", "%") else text
