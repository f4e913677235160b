"""What the words of a decoder are to other formats: rules that keep them within what a format can say, and patterns of
layers. Torch-free. Called by both exchanges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lmtrain.config.settings_base import show
from lmtrain.models.gpt_settings import GPTSettings

# Settings that are sizes, or that change nothing in a finished model.
_SIZES = {
    "num_layers", "width", "num_heads", "num_kv_heads", "head_width", "ffn_width", "vocab_size", "vocab_multiple",
    "seq_len", "num_positions", "norm_eps", "dropout", "init_std", "z_loss",
}  # fmt: skip


def word_rules(s: GPTSettings, free: Sequence[str] = (), **required: object) -> list[tuple[bool, str]]:
    """Return a rule for each setting that changes what a decoder computes and is not in `free`: that it has the value
    in `required`, one of them if that is a tuple, or else its default. A rule is (whether it holds, the message if it
    does not).
    """
    rules = []
    for field in dataclasses.fields(s):
        if field.name in _SIZES or field.name in free:
            continue
        value, wanted = getattr(s, field.name), required.get(field.name, field.default)
        if field.name == "norm_bias":
            value, wanted = s.has_norm_bias, required.get("norm_bias", s.norm == "layernorm")
        choices = wanted if isinstance(wanted, tuple) else (wanted,)
        rules.append((
            value in choices,
            f"model.{field.name}={show(value)} would have to be {' or '.join(map(show, choices))}",
        ))  # fmt: skip
    return rules


def shortest_pattern(letters: str) -> str:
    """Return the shortest text that, repeated and cut to the same length, is `letters`: one letter a layer."""
    num = len(letters)
    lengths = range(1, num + 1)
    return next((letters[:n] for n in lengths if (letters[:n] * (num // n + 1))[:num] == letters), "")
