"""Rules that keep a decoder's settings within what another format can say. Torch-free. Called by exports."""

from __future__ import annotations

import dataclasses

from lmtrain.config.settings_base import show
from lmtrain.models.gpt_settings import GPTSettings

# Settings that every format of decoders has a word for, or a rule of its own.
_EVERYWHERE = {
    "num_layers", "width", "num_heads", "num_kv_heads", "head_width", "ffn_width", "vocab_size", "vocab_multiple",
    "seq_len", "num_positions", "norm_eps", "dropout", "init_std", "positions", "norm", "activation", "gated", "bias",
    "tied", "parallel_block", "window", "rotary_base", "z_loss",
}  # fmt: skip


def words_at_their_default(settings: GPTSettings, known: tuple[str, ...] = ()) -> list[tuple[bool, str]]:
    """Return a rule for each setting that changes what a decoder computes and is neither in every format nor among
    `known`: that it has its default. A rule is (whether it holds, the message if it does not).
    """
    keys = [field for field in dataclasses.fields(settings) if field.name not in _EVERYWHERE | {*known}]
    return [
        (getattr(settings, field.name) == field.default,
         f"model.{field.name}={show(getattr(settings, field.name))} would have to be {show(field.default)}")
        for field in keys
    ]  # fmt: skip


def shortest_pattern(letters: str) -> str:
    """Return the shortest text that, repeated and cut to the same length, is `letters`: one letter a layer."""
    lengths = range(1, len(letters) + 1)
    period = next((n for n in lengths if letters[:n] * (len(letters) // n) + letters[: len(letters) % n] == letters), 0)
    return letters[:period]
