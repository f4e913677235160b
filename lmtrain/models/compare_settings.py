"""Compare two models' settings: those that change what a model with the same weights computes. Torch-free.

Called for the weights that a run begins with, for checkpoints that are merged, and to compare runs.
"""

from __future__ import annotations

from typing import Any

from lmtrain.models.model_settings import ModelSettings

POSITIONS = "embedding.position.weight"  # a table of learned positions
_IGNORED_KEYS = ("dropout", "init_std", "vocab_multiple", "z_loss")  # they change no weight's shape and no output
# sizes for which null means a default that other models state explicitly
_SIZES_WITH_DEFAULTS = ("num_kv_heads", "head_width", "ffn_width")


def differing_keys(model: ModelSettings, other: ModelSettings) -> list[str]:
    """Return the keys of `other`, without those that have no effect in it, whose values differ in `model` and change
    the model's outputs; settings that only training reads, such as dropout, may differ.
    """
    values, other_values = with_explicit_sizes(model), with_explicit_sizes(other)
    ignored = {*_IGNORED_KEYS, *(problem.key for problem in other.unused())}
    if POSITIONS not in other.weights():
        ignored |= {"seq_len", "num_positions"}  # because: rotary positions have no table that limits the length
    elif "num_positions" in other_values:
        ignored.add("seq_len")  # because: a table of as many rows serves every length up to theirs
    return [key for key in other_values if key not in ignored and values.get(key) != other_values[key]]


def with_explicit_sizes(model: ModelSettings) -> dict[str, Any]:
    """Return the model's settings as plain data; sizes given as null, such as num_kv_heads, are replaced by the number
    they stand for. num_positions stays null in a model without a table of positions.
    """
    values, shape, table = model.to_dict(), model.shape, model.weights().get(POSITIONS)
    explicit = {key: getattr(shape, key) for key in _SIZES_WITH_DEFAULTS if key in values}
    return values | explicit | ({"num_positions": table[0]} if "num_positions" in values and table else {})
