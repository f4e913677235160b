"""Which of our weights is which of Hugging Face's, family by family. Torch-free; read by export and import alike.

Ours are fused and [out, in]; theirs may come in parts (query, key, value; gate, up) and, in GPT-2, as [in, out].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lmtrain.models.model_settings import ModelSettings, Shape, true_weights


@dataclass(frozen=True)
class Match:
    """One of our weights: their tensors under each other, or one tensor turned on its side."""

    name: str
    shape: Shape  # of ours, true rows only
    theirs: tuple[tuple[str, int], ...]  # names, and how many of our rows each has
    turned: bool

    def their_shape(self, rows: int) -> Shape:
        return self.shape[::-1] if self.turned else (rows, *self.shape[1:])


@dataclass(frozen=True)
class Names:
    """How a family calls the parts of a model."""

    blocks: str  # what stands before a block's number
    inside: dict[str, tuple[str, ...]]
    outside: dict[str, tuple[str, ...]]
    turned: tuple[str, ...] = ()  # matrices stored [in, out]


GPT2 = Names(
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
LLAMA = Names(
    "model.layers.",
    {
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.out": ("self_attn.o_proj",), "mlp_norm": ("post_attention_layernorm",),
        "mlp.up": ("mlp.gate_proj", "mlp.up_proj"), "mlp.down": ("mlp.down_proj",),
    },
    {"embedding.token": ("model.embed_tokens",), "norm": ("model.norm",), "head": ("lm_head",)},
)  # fmt: skip
BERT = Names(
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
# Megatron's BERT is BERT with its norms before what they were behind.
MEGATRON_BERT = Names(
    BERT.blocks, BERT.inside | {"attention_norm": ("attention.ln",), "mlp_norm": ("ln",)}, BERT.outside
)
NAMES = {"gpt2": GPT2, "llama": LLAMA, "mistral": LLAMA, "bert": BERT, "megatron-bert": MEGATRON_BERT}


def matches(settings: ModelSettings, family: str) -> Iterator[Match]:
    names, cuts = NAMES[family], settings.cuts()
    for name, shape in true_weights(settings).items():
        part, _, leaf = name.rpartition(".")
        turned = False
        if part.startswith("blocks."):
            _, layer, inner = part.split(".", 2)
            found = [f"{names.blocks}{layer}.{theirs}.{leaf}" for theirs in names.inside[inner]]
            turned = inner in names.turned and len(shape) == 2
        else:
            found = [f"{theirs}.{leaf}" for theirs in names.outside[part]]
        rows = cuts[name].sections if len(found) > 1 else (shape[0],)
        yield Match(name, shape, tuple(zip(found, rows, strict=True)), turned)
