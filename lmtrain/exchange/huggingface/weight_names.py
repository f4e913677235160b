"""The names of Hugging Face's tensors that hold each of our weights. Torch-free; called by export and import alike.

Our weights are fused and [out, in]; Hugging Face's may come in parts (query, key, value; gate, up) and, in GPT-2, as
[in, out].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lmtrain.models.model_settings import ModelSettings, Shape, unpadded_shapes


@dataclass(frozen=True)
class WeightMapping:
    """A weight of ours and the Hugging Face tensors that hold it: several that are its rows one below the other, or a
    single tensor, which may be transposed.
    """

    name: str
    shape: Shape  # of our weight, without rows of padding
    hf_tensors: tuple[tuple[str, int], ...]  # (name, number of our rows) of each
    transposed: bool  # whether Hugging Face stores it as [in, out]

    def hf_shape(self, rows: int) -> Shape:
        return self.shape[::-1] if self.transposed else (rows, *self.shape[1:])


@dataclass(frozen=True)
class FamilyNames:
    """The names of a family's weights in Hugging Face's files."""

    blocks: str  # the prefix before a block's number
    block_parts: dict[str, tuple[str, ...]]  # our name of a part of a block -> Hugging Face's names
    other_parts: dict[str, tuple[str, ...]]  # the same for parts outside of blocks
    transposed: tuple[str, ...] = ()  # our names of the matrices that are stored as [in, out]


GPT2 = FamilyNames(
    "transformer.h.",
    {
        "attention_norm": ("ln_1",), "attention.qkv": ("attn.c_attn",), "attention.out": ("attn.c_proj",),
        "mlp_norm": ("ln_2",), "mlp.up": ("mlp.c_fc",), "mlp.down": ("mlp.c_proj",),
    },
    {
        "embedding.token": ("transformer.wte",), "embedding.position": ("transformer.wpe",),
        "norm": ("transformer.ln_f",), "head": ("lm_head",),
    },
    ("attention.qkv", "attention.out", "mlp.up", "mlp.down"),
)  # fmt: skip
LLAMA = FamilyNames(
    "model.layers.",
    {
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.out": ("self_attn.o_proj",), "mlp_norm": ("post_attention_layernorm",),
        "mlp.up": ("mlp.gate_proj", "mlp.up_proj"), "mlp.down": ("mlp.down_proj",),
    },
    {"embedding.token": ("model.embed_tokens",), "norm": ("model.norm",), "head": ("lm_head",)},
)  # fmt: skip
BERT = FamilyNames(
    "bert.encoder.layer.",
    {
        "attention_norm": ("attention.output.LayerNorm",),
        "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "attention.out": ("attention.output.dense",), "mlp_norm": ("output.LayerNorm",),
        "mlp.up": ("intermediate.dense",), "mlp.down": ("output.dense",),
    },
    {
        "embedding.token": ("bert.embeddings.word_embeddings",),
        "embedding.position": ("bert.embeddings.position_embeddings",),
        "embedding.segment": ("bert.embeddings.token_type_embeddings",),
        "embedding.norm": ("bert.embeddings.LayerNorm",), "norm": ("bert.encoder.ln",),
        "head.dense": ("cls.predictions.transform.dense",), "head.norm": ("cls.predictions.transform.LayerNorm",),
        "head.decoder": ("cls.predictions",), "pair.pooler": ("bert.pooler.dense",),
        "pair.scores": ("cls.seq_relationship",),
    },
)  # fmt: skip
# Megatron's BERT has its norms before attention and MLP, the original BERT behind them.
MEGATRON_BERT = FamilyNames(
    BERT.blocks, BERT.block_parts | {"attention_norm": ("attention.ln",), "mlp_norm": ("ln",)}, BERT.other_parts
)
NAMES = {"gpt2": GPT2, "llama": LLAMA, "mistral": LLAMA, "bert": BERT, "megatron-bert": MEGATRON_BERT}


def weight_mappings(settings: ModelSettings, family: str) -> Iterator[WeightMapping]:
    names, cuts = NAMES[family], settings.cuts()
    for name, shape in unpadded_shapes(settings).items():
        part, _, leaf = name.rpartition(".")
        transposed = False
        if part.startswith("blocks."):
            _, layer, inner = part.split(".", 2)
            hf_names = [f"{names.blocks}{layer}.{hf_part}.{leaf}" for hf_part in names.block_parts[inner]]
            transposed = inner in names.transposed and len(shape) == 2
        else:
            hf_names = [f"{hf_part}.{leaf}" for hf_part in names.other_parts[part]]
        rows = cuts[name].sections if len(hf_names) > 1 else (shape[0],)
        yield WeightMapping(name, shape, tuple(zip(hf_names, rows, strict=True)), transposed)
