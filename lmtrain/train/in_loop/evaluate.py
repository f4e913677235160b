"""Evaluations while a run trains: rows of metrics from whatever the roof hands in, since training knows no task.

Called by the loop, on every process. A stop that is heard amid an evaluation ends it there, so that a checkpoint can be
saved in the time that a scheduler leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from lmtrain.observe.measure import phases
from lmtrain.parallel.model import ParallelModel
from lmtrain.train.in_loop.requests import CutOff, Requests
from lmtrain.train.record.records import record, report_measures
from lmtrain.train.run import Run


class Evaluation(Protocol):
    def __call__(
        self, model: ParallelModel, before_each: Callable[[], None], doing: Callable[[str], None]
    ) -> Iterator[dict[str, Any]]:
        """A row for each task: its `name`, its `measures`, which of them is the `headline`, and what they are of.

        `before_each` is called before every verb of the model, on all processes alike; what it raises ends it all.
        """


def evaluate(run: Run, evaluation: Evaluation, requests: Requests) -> bool:
    """Whether it came to its end, on every process the same."""
    try:
        with phases.within("evaluation"), _uncompiled(run.model.compiled):
            for found in evaluation(run.model, requests.look, run.view.doing):
                row = record(run, "eval", found)
                run.view.evaluated(row)
                report_measures(run, row)
    except CutOff:
        return False
    return True


def _uncompiled(compiles: bool) -> AbstractContextManager[Any]:
    """Blocks that are compiled for a step's shape would be compiled again for every length of a text."""
    return torch.compiler.set_stance("force_eager") if compiles else nullcontext()
