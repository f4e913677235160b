"""The names of the files in a run folder, each defined only here. Torch-free.

Imported by every reader and writer. Imports little itself, because each rank's companion process has to start in
milliseconds.
"""

from __future__ import annotations

import os
import re

METRICS = "metrics.jsonl"  # one row per event: metrics_rows.py
STOP = "stop.json"  # why the newest start ended: read_and_record_run_end.py
LINEAGE = "lineage.json"  # the checkpoints of other runs from which the run descends: lineage.py
CONFIG = "config.json"  # the settings of the newest start
ENVIRONMENT = "environment.json"  # versions and machine of the newest start
WORKING_DIRECTORY = "folder"  # key of environment.json: the start's working directory, for its relative paths
SLURM_JOB = "slurm_job"  # key of environment.json: the number of the Slurm job in which the start ran, if it was in one
TOKENIZER = "tokenizer.json"
FAILED_STARTS = "starts.json"  # failed starts since the newest checkpoint: train/in_loop/failed_start_counter.py
PHASE_TIMES = "phase_times.json"  # the longest time seen per phase, in seconds, for the watchdog of the next start
LOG = "log.txt"
DATA = "data"  # folder with what is made of data.text
TEXT_PREFIX = "text"  # name of the dataset in it, without suffix
TEXT_RECORD = "text_sources.json"  # file in it that records the text and how the dataset was made of it
CHECKPOINTS, TENSORBOARD, TRACES, HANGS = "checkpoints", "tensorboard", "trace", "hangs"  # folders
IMPORTED = "imported"  # the folder of the checkpoint made of another program's model that the run began with
SAVE_FILE, STOP_FILE, TRACE_FILE = "SAVE", "STOP", "TRACE"  # a user creates the file as a request
# what a start writes before it writes its first row to METRICS
START_FILES = (STOP, FAILED_STARTS, CONFIG, ENVIRONMENT, TOKENIZER, LINEAGE, LOG)
START_FOLDERS = (DATA, IMPORTED, CHECKPOINTS)

_STEP = re.compile(r"step_([0-9]{8,18})")


def step_folder_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_from_name(name: str) -> int | None:
    """Return the step of a checkpoint folder's name, or None if it is not the name of a checkpoint."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_folder_name(int(match[1])) == name else None


def checkpoint_names(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of the checkpoints in a folder, oldest first; an empty list if the folder does not exist."""
    steps = {step_from_name(name): name for name in os.listdir(folder)} if os.path.isdir(folder) else {}
    return [steps[step] for step in sorted(step for step in steps if step is not None)]
