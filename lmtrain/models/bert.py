"""The encoder (BERT): embedding of tokens, positions and segments, bidirectional blocks, and two heads.

Built by parallel from BertSettings; independent of processes and layout. Blocks and naming are GPT's. `norm_order=post`
is the original BERT: a norm after the embedding and after every residual sum. `pre` is Megatron-LM's: norms before
attention and MLP and a norm at the end, so that the residual stream is not normalized and deeper models keep improving.

In a pipeline stage `embedding`, `norm`, `head` or `pair` may be None, and `forward` takes and returns hidden states.
"""

from __future__ import annotations

from torch import Tensor, nn

from lmtrain.errors import SettingsError, way
from lmtrain.models.bert_settings import NUM_SEGMENTS, BertSettings
from lmtrain.models.block_stack import Stack
from lmtrain.models.initial_weights import apply_ties
from lmtrain.models.layers.attention import Attention, DotProduct
from lmtrain.models.layers.block import MLP, Block, PostNormBlock
from lmtrain.models.layers.norms import build_norm
from lmtrain.models.layers.output_heads import MaskedHead, PairHead
from lmtrain.models.layers.token_and_position_embedding import Embedding


def build(settings: BertSettings) -> Bert:
    """Build the whole BERT model on torch's default device, with weights that are still to be initialized. Raise
    SettingsError if `settings` has no vocabulary size.
    """
    if settings.vocab_size is None:
        way_out = f"Set {way('model.vocab_size=30522')}."
        raise SettingsError([f"model.vocab_size=null needs a tokenizer, and there is none. {way_out}"])
    return Bert(settings)


class Bert(Stack):
    """The encoder, with a masked-token head and, if `pair_head` is set, a sentence-pair head."""

    parts_after_blocks = ("norm", "head", "pair")
    separates_documents = False  # because: the pair head reads only the first token of a row

    settings: BertSettings
    pair: nn.Module | None

    def __init__(self, settings: BertSettings) -> None:
        s, post = settings, settings.norm_order == "post"
        super().__init__(
            Embedding(
                s.padded_vocab_size,
                s.width,
                num_positions=s.position_rows,
                dropout=s.dropout,
                num_segments=NUM_SEGMENTS,
                norm=_build_norm(s) if post else None,
            ),
            {str(layer): _build_block(s) for layer in range(s.num_layers)},
            None if post else _build_norm(s),
            MaskedHead(_build_norm(s), s.width, s.vocab_size or 0, s.padded_vocab_size, s.head_activation),
            causal=False,
        )
        self.pair = PairHead(s.width) if s.pair_head else None
        self.settings = settings
        apply_ties(self)

    def pair_logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return [B, 2] logits: class 0 if the second segment follows the first, class 1 if not."""
        return hidden_BTD if self.pair is None else self.pair(hidden_BTD)


def _build_block(s: BertSettings) -> Block:
    attention = Attention(
        s.width, s.num_heads, s.num_heads, s.width // s.num_heads, qkv_bias=True, out_bias=True,
        core=DotProduct(s.dropout, causal=False), dropout=s.dropout,
    )  # fmt: skip
    mlp = MLP(s.width, s.ffn, s.activation, bias=True, dropout=s.dropout)
    kind = PostNormBlock if s.norm_order == "post" else Block
    return kind(attention, mlp, attention_norm=_build_norm(s), mlp_norm=_build_norm(s))


def _build_norm(s: BertSettings) -> nn.Module:
    return build_norm("layernorm", s.width, eps=s.norm_eps, bias=True)
