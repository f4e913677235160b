"""The names of what lies in the folder of a run, each written down here alone. Torch-free.

Called by whoever writes or reads one of them. Imports little, since each rank's companion has to start in milliseconds.
"""

from __future__ import annotations

import os
import re

METRICS = "metrics.jsonl"  # a row for each thing that happened: rows.py
STOP = "stop.json"  # why the newest start ended: ends.py
CONFIG = "config.json"  # the settings of the newest start
ENVIRONMENT = "environment.json"  # its versions and its machine
BEGAN_IN = "folder"  # key of environment.json: where the run was started, which its relative paths lead on from
TOKENIZER = "tokenizer.json"
STARTS = "starts.json"  # starts since the newest checkpoint that were lost
TIMES = "phase_times.json"  # the longest times that the watch has seen, with which the next start begins
LOG = "log.txt"
CHECKPOINTS, TENSORBOARD, TRACES, HANGS = "checkpoints", "tensorboard", "trace", "hangs"  # folders
SAVE_FILE, STOP_FILE, TRACE_FILE = "SAVE", "STOP", "TRACE"  # what somebody puts there to ask a run for it

_STEP = re.compile(r"step_([0-9]{8,18})")


def step_folder_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a folder's name tells, None for a name that no checkpoint of ours has."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_folder_name(int(match[1])) == name else None


def step_names(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of the checkpoints in a folder, oldest first; none where there is no such folder."""
    steps = {step_of(name): name for name in os.listdir(folder)} if os.path.isdir(folder) else {}
    return [steps[step] for step in sorted(step for step in steps if step is not None)]
