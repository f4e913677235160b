"""Whose weights a new run begins from, if the user names a checkpoint for them, and whether they are of its model.

Called by preflight, before torch is imported; set-up then reads them. The optimizer, the step and the data's order are
the new run's own: only weights come along, at any layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmtrain.checkpoint.contents import Contents
from lmtrain.checkpoint.described import checked_model
from lmtrain.checkpoint.store import resolve
from lmtrain.config.base import show
from lmtrain.errors import SettingsError
from lmtrain.models.model_settings import ModelSettings
from lmtrain.tokenizer.base import Tokenizer
from lmtrain.train.config import RunConfig

_FREE = ("dropout", "init_std", "vocab_multiple")  # these change no weight's shape and no answer of the model
_EFFECTIVE = ("num_kv_heads", "head_width", "ffn_width")  # null is a default that others write out


def find_first_weights(config: RunConfig, model: ModelSettings, tokenizer: Tokenizer) -> Path | None:
    """The checkpoint that `checkpoint.init_from` means, or a refusal with all that differs."""
    if config.checkpoint.init_from is None:
        return None
    path = resolve(Path(config.checkpoint.init_from))
    contents = Contents(path)
    theirs = checked_model(contents)
    _check_tokenizer(path, contents.manifest.state, tokenizer)
    _check_model(path, model, theirs)
    return path


def _check_tokenizer(path: Path, state: dict[str, Any], tokenizer: Tokenizer) -> None:
    told = state.get("tokenizer")
    fingerprint = told.get("fingerprint") if isinstance(told, dict) else None
    if fingerprint != tokenizer.fingerprint:
        theirs, ours = str(fingerprint)[:12], tokenizer.fingerprint[:12]
        raise SettingsError([
            f"checkpoint.init_from={path} knows the ids of the tokenizer {theirs} and the data has those of {ours}. "
            f"Preprocess the text with --tokenizer {path / 'tokenizer.json'}."
        ])  # fmt: skip


def _check_model(path: Path, ours: ModelSettings, theirs: ModelSettings) -> None:
    mine, other = _meaning(ours), _meaning(theirs)
    positions = "embedding.position.weight" in theirs.weights()
    free = _FREE if positions else (*_FREE, "seq_len")  # because: angles go on where a table ends
    unread = {problem.key for problem in theirs.unused()}
    wrong = [key for key in other if key not in {*free, *unread} and mine.get(key) != other[key]]
    if wrong:
        found = ", ".join(f"model.{key} is {show(mine.get(key))}, there {show(other[key])}" for key in wrong)
        way_out = "Choose a model of that kind." if "kind" in wrong else _way_out(wrong, other)
        raise SettingsError([f"checkpoint.init_from={path} is of another model: {found}. {way_out}"])


def _way_out(wrong: list[str], other: dict[str, Any]) -> str:
    return f"Add {' '.join(f'model.{key}={show(other[key])}' for key in wrong)}."


def _meaning(model: ModelSettings) -> dict[str, Any]:
    """Settings with defaults written out."""
    values, shape = model.to_dict(), model.shape
    return values | {key: getattr(shape, key) for key in _EFFECTIVE if key in values}
