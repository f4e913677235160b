"""Checks that a model can do what is asked of it: continue a text, or be scored by a task. Torch-free.

Called by the command line before a model is loaded, and by the runner of a task.
"""

from __future__ import annotations

from lmtrain.checkpoint.model_source import ModelSource
from lmtrain.errors import CheckpointError, UsageError
from lmtrain.eval.task import Task, all_tasks


def check_causal(source: ModelSource) -> None:
    """Raise CheckpointError unless the model `source` is causal, that is, predicts the next token from the tokens
    before it.
    """
    if not source.settings.shape.causal:
        raise CheckpointError(
            f"{source.path} is a {source.settings.kind} model, which predicts masked tokens and cannot continue a "
            "text. Give a causal model."
        )


def check_kind(task: Task, *, causal: bool, pairs: bool) -> None:
    """Raise UsageError unless `task` fits the model. `causal`: the model predicts the next token, not masked tokens.
    `pairs`: it can tell whether one segment follows another.
    """
    if task.causal == causal and pairs >= task.pairs:
        return
    fitting = [name for name, other in all_tasks().items() if other.causal == causal and pairs >= other.pairs]
    if task.causal and not causal:
        problem = "scores the next token, but this model sees the tokens on both sides, and so the answer"
    elif causal:
        problem = "scores masked tokens, but this model predicts the next token"
    else:
        problem = "asks whether one segment follows another, but this model has no head for pairs"
    raise UsageError(f"--task={task.id} {problem}. Give another model, or one of its tasks: {', '.join(fitting)}.")
