"""`lmtrain.metrics` and what it returns: the numbers of a run as arrays, a value for each recorded step. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.api.check_arguments import checked
from lmtrain.errors import MissingInputError, UsageError, spelling_hint
from lmtrain.observe.history.read_metrics_columns import Record, read_record
from lmtrain.runfolder.file_names import METRICS
from lmtrain.runfolder.folder_reader import not_a_run
from lmtrain.runfolder.tensorboard_metric_names import row_measures

if TYPE_CHECKING:
    import pandas


@checked
def metrics(run: str | os.PathLike[str]) -> Metrics:
    """Read what a run has recorded: its steps, validations and evaluations. `run` is the folder of a run, which may
    still be running. Raise MissingInputError if the folder is not that of a run.

    As in a report, steps that a restart has done again count once, as they were done last.
    """
    path = Path(run) / METRICS
    if not path.is_file():
        hint = "Give the folder of a run, which was its run.dir."
        raise MissingInputError(not_a_run(Path(run), f"{path} does not exist", hint))
    return Metrics(Path(run), read_record(path))


class Metrics(Mapping[str, NDArray[Any]]):
    """The numbers of a run by name. All arrays have the same length, an entry for each recorded step in order; an entry
    is NaN where a step has no such number.

    `step` holds the steps, as integers. Names of steps' numbers are those of metrics.jsonl, such as `loss`, `lr` and
    `tokens_per_s`, and on a blend `loss/train/NAME`, `tokens/NAME` and `epochs/NAME` of each dataset; `seconds` is the
    time spent in training. Validations are `loss/valid` and `valid/ppl`, of an average of the weights `loss/ema` and
    `ema/ppl`, evaluations `eval/NAME/MEASURE` and `eval/NAME/ema/MEASURE`.
    """

    def __init__(self, run: Path, record: Record) -> None:
        """Join the rows of a record; `lmtrain.metrics` calls this."""
        measured = [
            (row["step"], row_measures(row)) for event in ("valid", "eval") for row in record.rows.get(event, [])
        ]
        steps = np.union1d(record.steps, [step for step, _ in measured])
        self._run, self._problems = run, list(record.problems)
        self._arrays: dict[str, NDArray[Any]] = {"step": steps.astype(np.int64)}
        step_rows = np.searchsorted(steps, record.steps)
        for name, values in record.columns.items():
            if name != "step":
                self._column(name)[step_rows] = values
        for step, measures in measured:
            for name, value in measures.items():
                self._column(name)[np.searchsorted(steps, step)] = value

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return self._run

    def _column(self, name: str) -> NDArray[np.float64]:
        """Return the array of `name`, which is all NaN at first."""
        return self._arrays.setdefault(name, np.full(len(self._arrays["step"]), np.nan))

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return the array of a name. Raise KeyError, with the nearest name, if the run has recorded no such number."""
        if name not in self._arrays:
            raise KeyError(f"{self._run} has recorded no {name}. {spelling_hint(str(name), self._arrays)}")
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._arrays)

    @property
    def problems(self) -> list[str]:
        """A sentence for each part of metrics.jsonl that is damaged and was left out."""
        return self._problems

    def to_pandas(self) -> pandas.DataFrame:
        """Return the numbers as a DataFrame with a row for each step and a column for each name. Raise UsageError if
        pandas is not installed.
        """
        try:
            import pandas  # because: optional
        except ImportError as error:
            raise UsageError(
                "to_pandas() needs pandas, which is not installed. Type `pip install pandas`, or use the arrays."
            ) from error
        return pandas.DataFrame(self._arrays)

    def __repr__(self) -> str:
        steps = self["step"]
        until = f" up to step {steps[-1]:,}" if len(steps) else ""
        return f"<lmtrain.Metrics {self._run}: {len(steps):,} steps{until}; {', '.join(self)}>"
