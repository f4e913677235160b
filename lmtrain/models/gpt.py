"""The decoder: embedding, blocks, norm, head. Built by parallel from GPTSettings; knows no process and no layout.

Cut for a pipeline, `embedding`, `norm` or `head` is None and `forward` takes and returns hidden states instead.
"""

from __future__ import annotations

import math

from torch import nn

from lmtrain.errors import SettingsError
from lmtrain.models.gpt_settings import GPTSettings, cut_of
from lmtrain.models.init import apply_ties
from lmtrain.models.layers.attention import Attention
from lmtrain.models.layers.block import Block
from lmtrain.models.layers.embedding import Embedding
from lmtrain.models.layers.heads import Head
from lmtrain.models.layers.mlp import MLP
from lmtrain.models.layers.norm import build_norm
from lmtrain.models.stack import Stack
from lmtrain.spec import Cuts, Start


def build(settings: GPTSettings) -> GPT:
    if settings.vocab_size is None:
        raise SettingsError(["model.vocab_size=null is known only with a tokenizer. Set model.vocab_size=50257."])
    return GPT(settings)


class GPT(Stack):
    settings: GPTSettings

    def __init__(self, settings: GPTSettings) -> None:
        s, vocab_size = settings, settings.vocab_size or 0
        super().__init__(
            Embedding(
                s.padded_vocab_size,
                s.width,
                seq_len=s.seq_len if s.positions == "learned" else None,
                dropout=s.dropout,
            ),
            {str(layer): _block(s) for layer in range(s.num_layers)},
            _norm(s),
            Head(s.width, vocab_size, s.padded_vocab_size),
            causal=True,
            window=s.window,
            rotary_width=s.head if s.positions == "rotary" else None,
            rotary_base=s.rotary_base,
        )
        self.settings = settings
        apply_ties(self)

    def cuts(self) -> Cuts:
        return {name: cut_of(name, self.shape) for name, _ in self.named_parameters(remove_duplicate=False)}

    def starts(self) -> dict[str, Start]:
        """GPT-2's scheme: one deviation for all, smaller where 2L branches add up in the residual stream."""
        return {name: _start(name, self.settings) for name, _ in self.named_parameters(remove_duplicate=False)}


def _block(s: GPTSettings) -> Block:
    attention = Attention(s.width, s.num_heads, s.kv_heads, s.head, bias=s.bias, dropout=s.dropout, causal=True)
    mlp = MLP(s.width, s.ffn, s.activation, bias=s.bias, dropout=s.dropout)
    return Block(_norm(s), attention, None if s.parallel_block else _norm(s), mlp)


def _norm(s: GPTSettings) -> nn.Module:
    return build_norm(s.norm, s.width, eps=s.norm_eps, bias=s.bias)


def _start(name: str, s: GPTSettings) -> Start:
    match name.split(".")[-2:]:
        case [_, "bias"]:
            return Start()
        case ["norm" | "attention_norm" | "mlp_norm", _]:
            return Start(mean=1.0)
        case ["out" | "down", _]:
            return Start(std=s.init_std / math.sqrt(2 * s.num_layers))
        case ["token" | "head", _]:
            return Start(std=s.init_std, num_rows=s.vocab_size)
    return Start(std=s.init_std)
