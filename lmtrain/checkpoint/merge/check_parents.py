"""Checks before a merge: the order of the checkpoints, and what they must have in common. Torch-free.

Called by the merge command, before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lmtrain.checkpoint.disk.checkpoint_format import DTYPES, MANIFEST
from lmtrain.checkpoint.read_merge_record import merge_record
from lmtrain.checkpoint.read_verified_contents import Contents, checked_model
from lmtrain.checkpoint.view_with_ema_as_weights import MODEL_PREFIX
from lmtrain.config.settings_base import show
from lmtrain.errors import CheckpointError, UsageError, join_few, way
from lmtrain.models.model_settings import ModelSettings, differing_keys, with_explicit_sizes
from lmtrain.runfolder.file_names import CHECKPOINTS
from lmtrain.runfolder.lineage import file_sha256, parse_lineage

_TRAINING_KEYS = ("dropout", "z_loss", "seq_len", "num_positions")  # they do not change the first weights of a model


def sort_parents(checkpoints: Sequence[Contents]) -> list[Contents]:
    """Return the checkpoints sorted by the number of samples that their runs had read, then by step, the smallest
    first; equal ones keep their order. Raise UsageError if a checkpoint is given twice.
    """
    by_identity: dict[str, Contents] = {}
    for contents in checkpoints:
        resharded = contents.manifest.state.get("resharded")
        original = resharded.get("from") if isinstance(resharded, dict) else None
        for identity in {contents.identity, str(original or contents.identity)}:
            if (other := by_identity.setdefault(identity, contents)) is not contents:
                raise UsageError(
                    f"{contents.path} is the checkpoint {other.path} once more, or a copy of it. Give each checkpoint "
                    "once."
                )
    return sorted(checkpoints, key=lambda c: (_number(c.manifest.state.get("samples")), c.manifest.step))


def check_parents(parents: Sequence[Contents], *, force: bool) -> None:
    """Check that the checkpoints `parents` can be averaged. Raise CheckpointError, which lists all problems, unless
    they hold fp32 weights of the same model and tokenizer. Without `force` also raise it if they have no common
    ancestor.
    """
    newest = parents[-1]
    model = checked_model(newest)
    problems = [*_type_problems(newest)]
    for parent in parents[:-1]:
        problems += _type_problems(parent)
        problems += _differences(parent, newest, checked_model(parent), model)
    if problems:
        raise CheckpointError(
            f"The checkpoints cannot be merged: {join_few(problems, '; ')}. Merge checkpoints of one model that were "
            "trained with one tokenizer; settings that only training reads, such as model.dropout, may differ."
        )
    ancestors = _ancestors(newest, model)
    for parent in () if force else parents[:-1]:
        if not ancestors & _ancestors(parent, checked_model(parent)):
            raise CheckpointError(
                f"{parent.path} and {newest.path} have no common ancestor: they are of different runs, and neither "
                "run, nor a checkpoint that one of them began from, nor the seed of their first weights is the same. "
                "The mean of weights that were trained apart from the beginning is no model. Merge checkpoints of one "
                f"run or of its branches, or add {way('--force')} if you know that they descend from the same weights."
            )


def _type_problems(contents: Contents) -> Iterator[str]:
    """Yield a message that names the weights of a checkpoint that are stored in another type than fp32; nothing if
    there are none.
    """
    names = {name: t.dtype for name, t in contents.manifest.tensors.items() if name.startswith(MODEL_PREFIX)}
    others = [f"{name} as {DTYPES[dtype]}" for name, dtype in names.items() if dtype != "F32"]
    if others:
        yield f"{contents.path} holds {join_few(others)}, and weights are merged in float32"


def _differences(
    parent: Contents, newest: Contents, model: ModelSettings, newest_model: ModelSettings
) -> Iterator[str]:
    """Yield a message for each model setting that changes what the model computes and differs between the checkpoints
    `parent` and `newest`, and one if their tokenizers differ.
    """
    values, newest_values = with_explicit_sizes(model), with_explicit_sizes(newest_model)
    for key in dict.fromkeys(differing_keys(model, newest_model) + differing_keys(newest_model, model)):
        yield (
            f"model.{key} is {show(values.get(key))} in {parent.path} and {show(newest_values.get(key))} in "
            f"{newest.path}"
        )
    prints = [_fingerprint(contents) for contents in (parent, newest)]
    if prints[0] != prints[1]:
        yield (
            f"the tokenizer of {parent.path} has the fingerprint {str(prints[0])[:12]} and that of {newest.path} "
            f"{str(prints[1])[:12]}"
        )


def _fingerprint(contents: Contents) -> Any:
    """Return the fingerprint of a checkpoint's tokenizer, or None if its state has none."""
    tokenizer = contents.manifest.state.get("tokenizer")
    return tokenizer.get("fingerprint") if isinstance(tokenizer, dict) else None


def _ancestors(contents: Contents, model: ModelSettings) -> set[tuple[str, ...]]:
    """Return identifiers of all runs, checkpoints and initial weights from which a checkpoint descends, each a tuple
    such as ("run", path). Two checkpoints have a common ancestor if their sets share an identifier.

    A run is identified by its folder, and by run.dir and the seed for copies outside of it, such as resharded ones. A
    run that began from no other has first weights that are a function of its seed and its model's settings.
    """
    path, state = contents.path.resolve(), contents.manifest.state
    settings, seed = state.get("settings"), state.get("seed")
    lineage = parse_lineage(state.get("lineage"), path / MANIFEST)
    found: set[tuple[str, ...]] = {("manifest", file_sha256(path / MANIFEST))}
    found |= {("manifest", parent.manifest_sha256) for parent in lineage}
    found |= {("run", parent.path) for parent in lineage}
    if path.parent.name == CHECKPOINTS:
        found.add(("run", str(path.parent.parent)))
    record = merge_record(state, path / MANIFEST)
    for merged in record.parents if record else ():
        found |= {("manifest", merged.manifest_sha256), ("run", merged.run)}
    if isinstance(settings, dict):
        init_from = _setting(settings, "checkpoint", "init_from")
        if init_from is not None:
            found.add(("init_from", str(init_from)))
        if (folder := _setting(settings, "run", "dir")) is not None:
            found.add(("run.dir", str(folder), str(seed)))
        if not lineage and init_from is None:
            values = {key: v for key, v in with_explicit_sizes(model).items() if key not in _TRAINING_KEYS}
            found.add(("first weights", str(seed), json.dumps(values, sort_keys=True, default=str)))
    return found


def _setting(settings: dict[str, Any], group: str, key: str) -> Any:
    """Return the setting `group.key` of a run's settings, or None if it is not there."""
    values = settings.get(group)
    return values.get(key) if isinstance(values, dict) else None


def _number(value: Any) -> int:
    """Return a count of a checkpoint's state, 0 if it has none, as that of an imported model."""
    return value if isinstance(value, int) else 0
