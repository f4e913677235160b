"""Names and row orders of Megatron-LM's weights, in all the layouts it has had, and which of our weights each is.

Called by the Megatron import and export. The names of one weight:

    GPT-2 345M (2019)   language_model.transformer.layers.0.attention.query_key_value.weight
    later               language_model.encoder.layers.0.self_attention.query_key_value.weight
    core                decoder.layers.0.self_attention.linear_qkv.weight          (BERT: encoder.layers...)

Its rows, on each tensor-parallel rank:

    checkpoint version 0    [3, heads, head width]                all queries, then all keys, then all values
    version 1               [heads, head width, 3]
    version 2 and later     [groups, queries a group + 2, head width]     each group: its queries, its key, its value
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_LAYER_NAME = re.compile(r"layers\.(?:(0|[1-9][0-9]{0,5})\.)?(.+)")  # without a number: all layers, stacked
_WRAPPERS = re.compile(r"(?:(?:module|model|language_model|decoder|encoder|transformer)\.)*")
_LAYER_PARTS = {
    "input_layernorm.": "attention_norm.",
    "self_attention.linear_qkv.layer_norm_": "attention_norm.",
    "attention.query_key_value.": "attention.qkv.",
    "self_attention.query_key_value.": "attention.qkv.",
    "self_attention.linear_qkv.": "attention.qkv.",
    "self_attention.q_layernorm.": "attention.q_norm.",
    "self_attention.k_layernorm.": "attention.k_norm.",
    "attention.dense.": "attention.out.",
    "self_attention.dense.": "attention.out.",
    "self_attention.linear_proj.": "attention.out.",
    "post_attention_layernorm.": "mlp_norm.",
    "pre_mlp_layernorm.": "mlp_norm.",
    "mlp.linear_fc1.layer_norm_": "mlp_norm.",
    "mlp.dense_h_to_4h.": "mlp.up.",
    "mlp.linear_fc1.": "mlp.up.",
    "mlp.dense_4h_to_h.": "mlp.down.",
    "mlp.linear_fc2.": "mlp.down.",
}
_OTHER_PARTS = {
    "embedding.word_embeddings.": "embedding.token.",
    "embedding.position_embeddings.": "embedding.position.",
    "embedding.tokentype_embeddings.": "embedding.segment.",
    "final_layernorm.": "norm.",
    "output_layer.weight": "head.weight",
    "output_layer.bias": "head.decoder.bias",
    "lm_head.bias": "head.decoder.bias",
    "lm_head.dense.": "head.dense.",
    "lm_head.layernorm.": "head.norm.",
    "lm_head.layer_norm.": "head.norm.",
    "pooler.dense.": "pair.pooler.",
    "binary_head.": "pair.scores.",
}
_CORE_LAYER_PARTS = {
    "attention_norm.": "input_layernorm.", "attention.qkv.": "self_attention.linear_qkv.",
    "attention.out.": "self_attention.linear_proj.", "mlp_norm.": "pre_mlp_layernorm.",
    "mlp.up.": "mlp.linear_fc1.", "mlp.down.": "mlp.linear_fc2.", "attention.q_norm.": "self_attention.q_layernorm.",
    "attention.k_norm.": "self_attention.k_layernorm.",
}  # fmt: skip
_ENGINE_LAYER_PARTS = {
    "attention_norm.": "self_attention.linear_qkv.layer_norm_", "mlp_norm.": "mlp.linear_fc1.layer_norm_"
}  # fmt: skip
_CORE_OTHER_PARTS = {
    "embedding.token.weight": "embedding.word_embeddings.weight",
    "embedding.position.weight": "embedding.position_embeddings.weight",
    "embedding.segment.weight": "embedding.tokentype_embeddings.weight",
    "head.weight": "output_layer.weight", "head.decoder.bias": "output_layer.bias",
    "head.dense.weight": "lm_head.dense.weight", "head.dense.bias": "lm_head.dense.bias",
    "head.norm.weight": "lm_head.layer_norm.weight", "head.norm.bias": "lm_head.layer_norm.bias",
    "pair.pooler.weight": "pooler.dense.weight", "pair.pooler.bias": "pooler.dense.bias",
    "pair.scores.weight": "binary_head.weight", "pair.scores.bias": "binary_head.bias",
}  # fmt: skip
_UNUSED = re.compile(r".*_extra_state.*|(?:.*\.)?word_embeddings_for_head\.weight|.*inv_freq")
_HALVES = {"weight_w": 0, "weight_v": 1, "bias_w": 0, "bias_v": 1}  # newer torch_dist folders cut a gated input in two
LAYER_PLACEHOLDER = "*"  # stands for a layer's number in names of stacked tensors


def lmtrain_name(name: str) -> tuple[str, int | None] | None:
    """Return (lmtrain's name of the Megatron-LM tensor `name`, half). The half is 0 or 1 for a tensor that is only the
    gate or only the up projection of that weight, otherwise None. Return None alone for a tensor that is no weight;
    raise KeyError for a weight that lmtrain's models do not have.
    """
    if _UNUSED.fullmatch(name):
        return None
    rest = name[_WRAPPERS.match(name).end() :]  # type: ignore[union-attr]  # it matches nothing too
    layer = _LAYER_NAME.fullmatch(rest)
    inner = layer[2] if layer else rest
    for megatron_part, lmtrain_part in (_LAYER_PARTS if layer else _OTHER_PARTS).items():
        if inner.startswith(megatron_part):
            leaf = inner[len(megatron_part) :]
            half = _HALVES.get(leaf)
            leaf = leaf if half is None else leaf[:-2]
            if leaf not in ("weight", "bias", ""):
                break
            prefix = f"blocks.{LAYER_PLACEHOLDER if layer[1] is None else layer[1]}." if layer else ""
            return prefix + lmtrain_part + leaf, half
    raise KeyError(name)


def megatron_core_name(name: str, first_layer: int, *, causal: bool, engine: bool) -> str:
    """Return Megatron Core's name of the lmtrain weight `name` on the pipeline stage whose first layer is the model's
    layer `first_layer`, which the stage numbers 0. `causal` is True for a GPT and False for a BERT; `engine` chooses
    the names with Transformer Engine.
    """
    stack = "decoder" if causal else "encoder"
    if name.startswith("norm."):
        return f"{stack}.final_{name.replace('norm.', 'layernorm.', 1)}"
    if not name.startswith("blocks."):
        return _CORE_OTHER_PARTS[name]
    _, layer, inner = name.split(".", 2)
    parts = _CORE_LAYER_PARTS | _ENGINE_LAYER_PARTS if engine else _CORE_LAYER_PARTS
    lmtrain_part = next(part for part in parts if inner.startswith(part))
    return f"{stack}.layers.{int(layer) - first_layer}.{parts[lmtrain_part]}{inner[len(lmtrain_part) :]}"


def split_qkv(rows: Tensor, version: float, queries_per_group: int, head_width: int) -> tuple[Tensor, ...]:
    """Split a tensor-parallel rank's rows of a fused weight into (queries, keys, values). `version` is Megatron-LM's
    checkpoint_version, which decides the order of the rows; `queries_per_group` query heads share a key head; a head
    has `head_width` rows.
    """
    rest = rows.shape[1:]
    if version < 1:
        return tuple(rows.chunk(3))
    if version < 2:
        return tuple(part.reshape(-1, *rest) for part in rows.view(-1, head_width, 3, *rest).unbind(2))
    groups = rows.view(-1, queries_per_group + 2, head_width, *rest)
    q, k, v = groups[:, :queries_per_group], groups[:, queries_per_group], groups[:, queries_per_group + 1]
    return q.reshape(-1, *rest), k.reshape(-1, *rest), v.reshape(-1, *rest)


def fuse_qkv(sections: Sequence[Tensor], queries_per_group: int, head_width: int) -> Tensor:
    """Return the rows of a fused weight in the order of Megatron-LM's newest checkpoint_version, from `sections`: the
    rows of queries, keys and values. `queries_per_group` query heads share a key head; a head has `head_width` rows.
    """
    import torch  # because: a folder is looked at without it

    rest = sections[0].shape[1:]
    groups = [x.view(-1, n, head_width, *rest) for x, n in zip(sections, (queries_per_group, 1, 1), strict=True)]
    return torch.cat(groups, 1).reshape(-1, *rest)
