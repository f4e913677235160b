"""What is to be measured more than once with the same words: a task with its file, read and cut once. Torch-free.

Called by `lmtrain pretrain` before a run begins, so that whatever is wrong with a file is told then.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmtrain.errors import DataError
from lmtrain.eval.task import Answers, Asked, Prepared, Task, TextTask, sum_up
from lmtrain.eval.text.texts import TextInput


@dataclass(frozen=True, kw_only=True)
class Planned:
    name: str  # what its measures are called
    task: Task
    data: str  # where its text is from
    prepared: Prepared

    @property
    def measures(self) -> list[str]:
        """The names of what it will measure: those of a model that is sure of every target."""
        asked = [(request.item, request.num_scored) for request in self.prepared.requests]
        item, scored = np.array(asked, np.int64).reshape(-1, 2).T
        columns = self.task.columns(self.prepared, Answers(item, np.zeros(len(asked)), scored, scored))
        return list(self.task.measures(sum_up(columns)))


def prepare(task: Task, source: Path | TextInput, asked: Asked) -> tuple[Prepared, str]:
    """The task's requests, and where they are from; refuses what gives none."""
    if isinstance(source, TextInput):
        assert isinstance(task, TextTask), f"{task.id} reads a file of its own kind"
        prepared, data = task.prepare_texts(source, asked), source.name
    else:
        prepared, data = task.prepare(source, asked), str(source)
    if prepared.num_targets == 0:
        raise DataError(f"{data} has no token to predict. Give a file with text.")
    return prepared, data
