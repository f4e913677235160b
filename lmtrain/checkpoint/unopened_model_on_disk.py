"""A model on disk before its weights are opened: its settings, its facts, and how to open weights and tokenizer.

Called by `exchange.find_model`, evaluation and the Python interface, for which a checkpoint and another program's
folder are the same. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.checkpoint.find_and_prune import resolve_checkpoint
from lmtrain.checkpoint.read_merge_record import merge_record
from lmtrain.checkpoint.read_verified_contents import Contents, checked_model
from lmtrain.checkpoint.view_with_ema_as_weights import WeightSet
from lmtrain.errors import CheckpointError
from lmtrain.layout import Piece
from lmtrain.models.model_settings import ModelSettings
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.vocabulary_files import END_ID_FILES, end_ids

# The prefix of the names under which a checkpoint keeps the small files of the Hugging Face folder that it came from.
ORIGINAL_PREFIX = "huggingface."


class Weights(Protocol):
    @property
    def settings(self) -> ModelSettings: ...

    def load_into(self, pieces: list[Piece]) -> None:
        """Fill the pieces' blocks, rounded to each block's dtype."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model on disk that can be loaded: its settings, and functions that open its weights and its tokenizer."""

    path: Path
    settings: ModelSettings
    facts: dict[str, Any]  # printed under every result
    open: Callable[[], Weights]
    tokenizer: Callable[[], Tokenizer]


@dataclass(frozen=True)
class CheckpointWeights:
    path: Path
    settings: ModelSettings
    weights: WeightSet

    def load_into(self, pieces: list[Piece]) -> None:
        # because: the reader imports torch, and an impossible layout is refused before that
        from lmtrain.checkpoint.tensor_reader import CheckpointReader

        CheckpointReader(self.path, self.weights).load_into(pieces, allow_rounding=True)


def checkpoint_source(path: Path, weights: WeightSet = "model") -> ModelSource:
    """Return the model in a checkpoint as a ModelSource. `path` is the checkpoint, or a run or checkpoints folder,
    whose latest checkpoint is taken. With `weights` "ema" the model has the average of the weights; raise
    CheckpointError if the checkpoint holds none.
    """
    folder = resolve_checkpoint(path)
    contents = Contents(folder, weights=weights)
    manifest = contents.manifest
    missing = [key for key in ("model", "seq_len", "step") if key not in manifest.state]
    if missing:
        raise CheckpointError(
            f"{folder} does not state its {', '.join(missing)}. Give a checkpoint that a run has written."
        )
    settings = checked_model(contents)  # because: stated sizes are checked before anything is built of them
    for key, expected in (("seq_len", settings.shape.seq_len), ("step", manifest.step)):
        if manifest.state[key] != expected:
            raise CheckpointError(
                f"{folder / MANIFEST} contradicts itself: its state.{key} is {str(manifest.state[key])[:100]}, but "
                f"its other entries say {expected}. Restore it from a copy."
            )
    facts = {"checkpoint": str(folder), "step": manifest.step} | contents.describe_weights()
    if (merge := merge_record(manifest.state, folder / MANIFEST)) is not None:
        facts["merged"] = merge.summary
    return ModelSource(
        path=folder,
        settings=settings,
        facts=facts,
        open=lambda: CheckpointWeights(folder, settings, weights),
        tokenizer=lambda: _read_tokenizer(contents),
    )


def _read_tokenizer(contents: Contents) -> Tokenizer:
    """Return the tokenizer of a checkpoint. For an imported model it also knows the token ids that end a generated
    text, from the files that came with the original model.
    """
    names = [name for name in END_ID_FILES if ORIGINAL_PREFIX + name in contents.manifest.files]
    files = {name: contents.read_file(ORIGINAL_PREFIX + name) for name in names}
    return Tokenizer.from_bytes(contents.read_file("tokenizer.json")).with_end_ids(end_ids(files))


def check_causal(source: ModelSource) -> None:
    """Raise CheckpointError unless the model `source` is causal, that is, predicts the next token from the tokens
    before it.
    """
    if not source.settings.shape.causal:
        raise CheckpointError(
            f"{source.path} is a {source.settings.kind} model, which predicts masked tokens and cannot continue a "
            "text. Give a causal model."
        )
