"""The decoder (GPT): embedding, blocks, norm, head.

Built by parallel from GPTSettings; independent of processes and layout. In a pipeline stage `embedding`, `norm` or
`head` may be None, and `forward` takes and returns hidden states.
"""

from __future__ import annotations

from torch import Tensor, nn

from lmtrain.errors import SettingsError, way
from lmtrain.models.block_stack import Stack
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.initial_weights import apply_ties
from lmtrain.models.layers.attention import Attention, DotProduct
from lmtrain.models.layers.block import MLP, Block, ParallelBlock, PostNormBlock
from lmtrain.models.layers.norms import HeadNorm, WholeNorm, build_norm
from lmtrain.models.layers.output_heads import Head, cap_logits
from lmtrain.models.layers.token_and_position_embedding import Embedding


def build(settings: GPTSettings) -> GPT:
    """Build the whole GPT model on torch's default device, with weights that are still to be initialized. Raise
    SettingsError if `settings` has no vocabulary size.
    """
    if settings.vocab_size is None:
        way_out = f"Set {way('model.vocab_size=50257')}."
        raise SettingsError([f"model.vocab_size=null needs a tokenizer, and there is none. {way_out}"])
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
                scale=s.embedding_scale,
            ),
            {str(layer): _build_block(s) for layer in range(s.num_layers)},
            None if s.norm_order == "post" else _build_norm(s),
            Head(s.width, vocab_size, s.padded_vocab_size, bias=s.head_bias),
            causal=True,
        )
        self.settings = settings
        apply_ties(self)

    def finish_logits(self, logits: Tensor) -> Tensor:
        s = self.settings
        logits = logits if s.logit_scale == 1.0 else logits * s.logit_scale
        return logits if s.logit_cap is None else cap_logits(logits, s.logit_cap)


def _build_block(s: GPTSettings) -> Block:
    core = DotProduct(s.dropout, causal=True, scale=s.attention_scale, cap=s.attention_cap)
    q_norm, k_norm = (_build_qk_norm(s, num_heads) for num_heads in (s.num_heads, s.kv_heads))
    attention = Attention(
        s.width, s.num_heads, s.kv_heads, s.head, qkv_bias=s.bias in ("all", "qkv"), out_bias=s.bias == "all",
        core=core, dropout=s.dropout, q_norm=q_norm, k_norm=k_norm,
    )  # fmt: skip
    mlp = MLP(s.width, s.ffn, s.activation, gated=s.gated, bias=s.bias in ("all", "mlp"), dropout=s.dropout)
    norms = {name: _build_norm(s) for name in s.block_norms}
    kind = ParallelBlock if s.parallel_block != "no" else PostNormBlock if s.norm_order == "post" else Block
    return kind(attention, mlp, residual_scale=s.residual_scale, **norms)


def _build_norm(s: GPTSettings) -> nn.Module:
    return build_norm(s.norm, s.width, eps=s.norm_eps, bias=s.has_norm_bias, weight=s.norm_weight)


def _build_qk_norm(s: GPTSettings, num_heads: int) -> nn.Module | None:
    if s.qk_norm == "none":
        return None
    if s.qk_norm == "head":
        return HeadNorm(s.head, eps=s.norm_eps, weight=s.norm_weight)
    return WholeNorm(num_heads * s.head, eps=s.norm_eps, weight=s.norm_weight)
