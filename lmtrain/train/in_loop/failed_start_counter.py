"""The counter of lost starts, kept in starts.json, which stops a run that makes no progress from restarting forever.

The file lists the starts since the newest checkpoint that were lost. Called by the command line on rank 0 around a
start, and by our own launcher before it restarts a run. A start that ends in any orderly way removes its entry; the end
of a start that could not is read from stop.json. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.find_and_prune import load_manifest
from lmtrain.errors import LmtrainError, NoProgressError, join_few, shorten
from lmtrain.runfolder.file_names import FAILED_STARTS, step_from_name
from lmtrain.runfolder.read_and_record_run_end import read_object_or_empty, read_stop_or_empty, stop_stamp, write_stop
from lmtrain.runtime.files.atomic_files import lock_holder, write_json
from lmtrain.runtime.processes.local_rank_launcher import CRASH_CODE, RESTARTABLE_CODES
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.runtime.terminal_safe_text import warn
from lmtrain.train.ranks.facts_equal_on_all_ranks import program_facts
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.preflight import Inputs, with_final_model

MAX_LOST = 3  # lost starts at the same step, after which the run is refused
_NO_CAUSE = "killed without a message"
_MAX_CAUSE_CHARACTERS = 300  # characters of a cause


@dataclass
class LostStarts:
    """The starts of a run, from one step, that ended in a crash or without a message, oldest first. While a start that
    is counted runs, its own entry is the last.
    """

    folder: Path
    step: int
    digest: str  # a digest of settings, data, code and libraries; a change of any begins a new count
    lost: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def for_run(cls, config: RunConfig, inputs: Inputs, resume_from: Path | None) -> LostStarts:
        """Read starts.json and return the lost starts at the step of the checkpoint `resume_from`, or at step 0 if it
        is None.
        """
        return cls(Path(config.run.dir), _resume_step(resume_from), _identity_digest(config, inputs)).load()

    def load(self) -> LostStarts:
        """Read the lost starts of this run at this step from starts.json into `lost`, and return self; there are none
        if the file is unreadable or for another step or digest. Drop the newest if stop.json shows that it ended in an
        orderly way.
        """
        record = read_object_or_empty(self.folder / FAILED_STARTS)
        if (record.get("step"), record.get("of")) == (self.step, self.digest):
            lost = record.get("lost")
            self.lost = [dict(entry) for entry in lost if isinstance(entry, dict)] if isinstance(lost, list) else []
        if self.lost and not _add_recorded_cause(self.lost[-1], self.folder):
            self.lost.pop()
        return self

    def check_limit(self, config: RunConfig) -> None:
        """Raise NoProgressError if the run was started MAX_LOST or more times at this step and ended each time without
        a new checkpoint. The same message is written to stop.json.
        """
        if len(self.lost) < MAX_LOST:
            return
        self.write()
        causes = Counter(str(entry.get("how") or _NO_CAUSE).rstrip(".") for entry in self.lost)
        lost_by = join_few((f"{cause}{f' ({count} times)' * (count > 1)}" for cause, count in causes.items()), "; ")
        error = NoProgressError(
            f"run.dir={config.run.dir} was started {len(self.lost)} times from "
            f"{f'step {self.step}' if self.step else 'the beginning'}, and lost each time before the "
            f"next checkpoint: {lost_by}. Fix the cause, or save sooner (checkpoint.interval_steps); other settings, "
            f"code or libraries begin a new count, and so does removing {self.folder / FAILED_STARTS}."
        )
        write_stop(self.folder, str(error), error.exit_code, step=self.step)
        raise error

    def write(self) -> None:
        """Write the lost starts to starts.json, or delete the file if there are none. A failed write only causes a
        warning.
        """
        path = self.folder / FAILED_STARTS
        try:
            if self.lost:
                write_json(path, {"step": self.step, "of": self.digest, "lost": self.lost})
            else:
                path.unlink(missing_ok=True)
        except (LmtrainError, OSError) as error:
            warn(f"This start cannot be counted in {FAILED_STARTS}: {error}")

    def add_start(self, env: ProcessEnv) -> None:
        """Add an entry for the start that this process begins (time, host, job, number of processes, the process of
        the command and whether it can restart the run) and write starts.json.
        """
        self.lost.append({
            "began": datetime.now(UTC).isoformat(timespec="seconds"), "host": env.host, "job": env.job_id,
            "processes": env.world_size, "restart": env.num_restarts, "stop_before": stop_stamp(self.folder),
            "command": env.command, "is_launched": env.is_child,
        })  # fmt: skip
        self.write()

    def mark_lost(self, cause: str) -> None:
        """Record in starts.json the cause by which the newest start was lost."""
        self.lost[-1]["how"] = shorten(cause, _MAX_CAUSE_CHARACTERS)
        self.write()

    def discard_newest(self) -> None:
        """Remove the entry of the newest start, which was not lost, and write starts.json."""
        self.lost.pop()
        self.write()

    def clear(self) -> None:
        """Remove all entries, since the run ended, or stopped as requested at the end of a step."""
        self.lost.clear()
        self.write()


def count_start(config: RunConfig, inputs: Inputs, env: ProcessEnv) -> LostStarts | None:
    """Add this start of the run to starts.json, the record of its lost starts, and return the record; None on ranks
    other than 0. A start is lost if it crashes before it saves a checkpoint; unless it does, `counting_start` removes
    the entry again. Raise NoProgressError if MAX_LOST starts at this step were lost already.

    None is also returned if another process holds the lock of the run's folder, because that process counts.
    """
    holder = lock_holder(Path(config.run.dir))
    if env.rank > 0 or (holder is not None and holder[1]):
        return None
    starts = LostStarts.for_run(config, inputs, inputs.resume_from)
    starts.check_limit(config)
    starts.add_start(env)
    return starts


@contextmanager
def counting_start(starts: LostStarts | None) -> Iterator[None]:
    """Run the `with` block as the start that `count_start` added to `starts`. Keep its entry if the block raises an
    error whose exit code lets a launcher restart the run, such as a crash or a lost peer; remove it after any other
    error, and all entries after success.

    Nothing is counted if `starts` is None.
    """
    if starts is None:
        yield
        return
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) and getattr(error, "exit_code", CRASH_CODE) in RESTARTABLE_CODES:
            starts.mark_lost(str(error) if isinstance(error, LmtrainError) else f"{type(error).__name__}: {error}")
        else:
            starts.discard_newest()
        raise
    starts.clear()


def _resume_step(resume_from: Path | None) -> int:
    """Return the step of the checkpoint `resume_from`, or 0 if it is None."""
    if resume_from is None:
        return 0
    step = step_from_name(resume_from.name)
    return load_manifest(resume_from).step if step is None else step


def _identity_digest(config: RunConfig, inputs: Inputs) -> str:
    """Return a hash of the run's settings, data, tokenizer, code and library versions. Starts with different hashes are
    counted apart, because the change may have removed the cause of the loss.
    """
    # because: `step` identifies the checkpoint; checkpoint paths of a launcher's first start may be gone by its last
    identity = [
        with_final_model(config, inputs).to_dict(), inputs.data.sample_identity, inputs.data.content_sha256,
        inputs.tokenizer.fingerprint,
        {key: fact.value for key, fact in program_facts().items()},
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _add_recorded_cause(start: dict[str, Any], folder: Path) -> bool:
    """Add to `start`, an entry of starts.json, the cause of its end from stop.json in the run's `folder`, if the file
    was written after that start. Return False if stop.json shows an orderly end, so that the start was not lost.
    """
    if stop_stamp(folder) in (None, start.get("stop_before")):
        return True  # because: stop.json is missing or belongs to an earlier start
    stop = read_stop_or_empty(folder)
    code = stop.get("exit_code")
    if code == NoProgressError.exit_code or not isinstance(code, int):
        return True
    if code in RESTARTABLE_CODES:
        start["how"] = shorten(str(stop.get("cause")), _MAX_CAUSE_CHARACTERS)
    return code in RESTARTABLE_CODES
