"""Loss, tokens and epochs by source, for a run that trains on a blend of several datasets.

Called by the loop after each step and by the writer of its rows, on every process: all of them get the same numbers.
"""

from __future__ import annotations

import math
from typing import Any

from lmtrain.batch import StepBatches
from lmtrain.data.data_settings import REST
from lmtrain.data.sources import shown_sources
from lmtrain.train.run_state import Run
from lmtrain.train.step import StepResult


def count_sources(run: Run, batches: StepBatches, result: StepResult) -> None:
    """Add a finished step to the run's progress: the tokens of each source, and the losses of the samples and the
    number of their labels since the last row.
    """
    parts, progress = run.inputs.data.parts, run.progress
    for part in () if batches.by_source else parts:  # because: a single dataset has all tokens
        progress.source_tokens[part.key] = progress.source_tokens.get(part.key, 0) + batches.num_tokens
    for counts in batches.by_source:
        part = parts[counts.number]
        progress.source_tokens[part.key] = progress.source_tokens.get(part.key, 0) + counts.tokens
        loss, labels = progress.source_losses.get(part.name, (0.0, 0))
        loss += math.fsum(result.sample_losses[row] for row in counts.rows_S.tolist())
        progress.source_losses[part.name] = (loss, labels + counts.labels)


def take_source_values(run: Run) -> dict[str, Any]:
    """Return the entry `sources` of a "step" row, with the loss, tokens and epochs of each source that is shown, and
    begin the sums of the losses anew; {} for a single dataset. A source without a label since the last row has no
    loss.
    """
    parts, progress = run.inputs.data.parts, run.progress
    if len(parts) < 2:
        return {}
    values: dict[str, dict[str, Any]] = {}
    for name, indices in shown_sources(parts).items():
        group = [parts[index] for index in indices]
        sums = [progress.source_losses.get(part.name, (0.0, 0)) for part in group]
        labels = sum(count for _, count in sums)
        contents = {part.key: part.num_tokens for part in group}  # because: datasets of equal content have one count
        tokens = sum(progress.source_tokens.get(key, 0) for key in contents)
        values[name] = {"loss": math.fsum(loss for loss, _ in sums) / labels} if labels else {}
        values[name] |= {"tokens": tokens, "epochs": tokens / max(sum(contents.values()), 1)}
        values[name] |= {"labels": labels} | ({"sources": len(group)} if name == REST else {})
    progress.source_losses = {}
    return {"sources": values}
