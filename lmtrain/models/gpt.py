"""The decoder (GPT): embedding, blocks, norm, head.

Built by parallel from GPTSettings; independent of processes and layout. In a pipeline stage `embedding`, `norm` or
`head` may be None, and `forward` takes and returns hidden states.
"""

from __future__ import annotations

from torch import nn

from lmtrain.errors import SettingsError
from lmtrain.models.block_stack import Stack
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.init import apply_ties
from lmtrain.models.layers.attention import Attention
from lmtrain.models.layers.block import MLP, Block, build_norm
from lmtrain.models.layers.embedding import Embedding
from lmtrain.models.layers.heads import Head


def build(settings: GPTSettings) -> GPT:
    """Build the whole GPT model on torch's default device; raise SettingsError if `settings` has no vocabulary size."""
    if settings.vocab_size is None:
        raise SettingsError(["model.vocab_size=null needs a tokenizer, and there is none. Set model.vocab_size=50257."])
    return GPT(settings)


class GPT(Stack):
    """The decoder."""

    settings: GPTSettings

    def __init__(self, settings: GPTSettings) -> None:
        s, vocab_size = settings, settings.vocab_size or 0
        super().__init__(
            Embedding(
                s.padded_vocab_size,
                s.width,
                num_positions=s.position_rows if s.positions == "learned" else None,
                dropout=s.dropout,
            ),
            {str(layer): _build_block(s) for layer in range(s.num_layers)},
            _build_norm(s),
            Head(s.width, vocab_size, s.padded_vocab_size),
            causal=True,
            window=s.window,
            rotary_width=s.head if s.positions == "rotary" else None,
            rotary_base=s.rotary_base,
        )
        self.settings = settings
        apply_ties(self)


def _build_block(s: GPTSettings) -> Block:
    attention = Attention(s.width, s.num_heads, s.kv_heads, s.head, bias=s.bias, dropout=s.dropout, causal=True)
    mlp = MLP(s.width, s.ffn, s.activation, bias=s.bias, dropout=s.dropout)
    return Block(_build_norm(s), attention, None if s.parallel_block else _build_norm(s), mlp)


def _build_norm(s: GPTSettings) -> nn.Module:
    return build_norm(s.norm, s.width, eps=s.norm_eps, bias=s.bias)
