"""A model on disk as an object to evaluate: its settings and facts, before its weights are opened. Torch-free.

Called by the command line and by load. Later code does not distinguish a checkpoint from another program's folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.checkpoint.find_and_prune import resolve_checkpoint
from lmtrain.checkpoint.read_verified_contents import Contents, checked_model
from lmtrain.errors import CheckpointError, UsageError
from lmtrain.eval.task import Task, all_tasks
from lmtrain.layout import Piece
from lmtrain.models.model_settings import ModelSettings
from lmtrain.tokenizer.base import Tokenizer


class Weights(Protocol):
    @property
    def settings(self) -> ModelSettings: ...

    def load_into(self, pieces: list[Piece]) -> None:
        """Fill the pieces' blocks, rounded to each block's dtype."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model on disk that can be evaluated: its settings, and functions that open its weights and its tokenizer."""

    path: Path
    settings: ModelSettings
    facts: dict[str, Any]  # printed under every result
    open: Callable[[], Weights]
    tokenizer: Callable[[], Tokenizer]


@dataclass(frozen=True)
class CheckpointWeights:
    path: Path
    settings: ModelSettings

    def load_into(self, pieces: list[Piece]) -> None:
        # because: the reader imports torch, and an impossible layout is refused before that
        from lmtrain.checkpoint.tensor_reader import CheckpointReader

        CheckpointReader(self.path).load_into(pieces, allow_rounding=True)


def checkpoint_source(path: Path) -> ModelSource:
    """Return the model in a checkpoint as a ModelSource. `path` is the checkpoint, or a run or checkpoints folder,
    whose latest checkpoint is taken.
    """
    folder = resolve_checkpoint(path)
    contents = Contents(folder)
    manifest = contents.manifest
    missing = [key for key in ("model", "seq_len", "step") if key not in manifest.state]
    if missing:
        raise CheckpointError(
            f"{folder} does not say its {', '.join(missing)}. Give a checkpoint that a run has written."
        )
    settings = checked_model(contents)  # because: stated sizes are checked before anything is built of them
    for key, expected in (("seq_len", settings.shape.seq_len), ("step", manifest.step)):
        if manifest.state[key] != expected:
            raise CheckpointError(
                f"{folder / MANIFEST} contradicts itself: its state.{key} is {str(manifest.state[key])[:100]} but "
                f"its other entries say {expected}. Restore it from a copy."
            )
    return ModelSource(
        path=folder,
        settings=settings,
        facts={"checkpoint": str(folder), "step": manifest.step},
        open=lambda: CheckpointWeights(folder, settings),
        tokenizer=lambda: Tokenizer.from_bytes(contents.read_file("tokenizer.json")),
    )


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
