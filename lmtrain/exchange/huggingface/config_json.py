"""Convert between our model settings and Hugging Face's config.json, between weight names, and write tokenizer files.

Called by export and import alike; torch-free. Nothing is nearly equal: a model that no Hugging Face architecture
computes, or a config.json that asks for what our models lack, is refused with every setting that stands in the way.

Our weights are fused and [out, in]; Hugging Face's may come in parts (query, key, value; gate, up) and, in GPT-2, as
[in, out]. The ids of a text are those of our tokenizer; what is added is what users of transformers expect around it:
an encoder's [CLS] and [SEP], the names of special tokens, the longest text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.config.settings_base import show
from lmtrain.errors import CheckpointError, shorten
from lmtrain.exchange.build_imported_settings import build_imported_settings
from lmtrain.models.bert_settings import NUM_SEGMENTS, BertSettings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings, Shape, unpadded_shapes
from lmtrain.runtime.files.safe_files import parse_json
from lmtrain.tokenizer.base import Tokenizer

Config = dict[str, Any]
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
    "bert": "BertForPreTraining", "megatron-bert": "MegatronBertForPreTraining",
}  # fmt: skip
_GELUS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
_OUR_GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
# The values that transformers takes for keys that a config.json leaves out.
_GPT2 = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "resid_pdrop": 0.1,
    "embd_pdrop": 0.1, "attn_pdrop": 0.1, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False, "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "sliding_window": None,
    "rope_parameters": None, "rope_scaling": None, "rope_theta": 10000.0,
}  # fmt: skip
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
}  # fmt: skip
_BERT = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512, "type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-12,
    "is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
}  # fmt: skip
_MEGATRON_BERT = _BERT | {
    "vocab_size": 29056, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096,
}  # fmt: skip
_LONGEST_VALUE = 1000  # characters
_DEFAULTS: dict[str, Config] = {
    "gpt2": _GPT2, "llama": _LLAMA, "mistral": _MISTRAL, "bert": _BERT, "megatron-bert": _MEGATRON_BERT
}  # fmt: skip

_DROPOUTS = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"), "llama": ("attention_dropout",),
    "mistral": ("attention_dropout",), "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "megatron-bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}  # fmt: skip
# Hugging Face's special tokens and the roles of ours. A decoder's end-of-document token also begins a document.
_DECODER = {"bos_token": "eod", "eos_token": "eod", "unk_token": "unk", "pad_token": "pad"}
_ENCODER = {"cls_token": "cls", "sep_token": "sep", "mask_token": "mask", "unk_token": "unk", "pad_token": "pad"}


def hf_family(settings: ModelSettings) -> str:
    """Return the Hugging Face family (model_type), such as "llama", that computes the same model as these settings.
    Raise CheckpointError with the settings that stand in the way if there is none.
    """
    if isinstance(settings, BertSettings):
        family = "bert" if settings.norm_order == "post" else "megatron-bert"
        head, body = settings.head_activation, settings.activation
        rules = [(head == body, f"model.head_activation={head} would have to be model.activation={body}")]
    else:
        assert isinstance(settings, GPTSettings), "a model of a new kind needs its names here"
        rotary = "mistral" if settings.window is not None else "llama"
        family = "gpt2" if settings.positions == "learned" else rotary
        rules = _gpt2_rules(settings) if family == "gpt2" else _llama_rules(settings)
    problems = [text for holds, text in rules if not holds]
    if problems:
        raise CheckpointError(
            f"No Hugging Face architecture computes this model; the nearest is {family}, and there "
            f"{'; '.join(problems)}. Use the checkpoint with `lmtrain eval` and `lmtrain generate`."
        )
    return family


def _gpt2_rules(s: GPTSettings) -> list[tuple[bool, str]]:
    """Return the conditions under which Hugging Face's GPT-2 computes this model, each as (whether it holds, the
    message if it does not).
    """
    return [
        (s.norm == "layernorm", f"model.norm={s.norm} would have to be layernorm"),
        (s.activation in _GELUS, f"model.activation={s.activation} would have to be gelu or gelu_tanh"),
        (s.bias, "model.bias=false would have to be true"),
        (s.kv_heads == s.num_heads, f"model.num_kv_heads={s.kv_heads} would have to be {s.num_heads}"),
        (s.head * s.num_heads == s.width, f"model.head_width={s.head} would have to be {s.width}/{s.num_heads}"),
        (s.window is None, f"model.window={s.window} would have to be null"),
        (not s.parallel_block, "model.parallel_block=true would have to be false"),
    ]


def _llama_rules(s: GPTSettings) -> list[tuple[bool, str]]:
    return [
        (s.norm == "rmsnorm", f"model.norm={s.norm} would have to be rmsnorm"),
        (s.activation == "swiglu", f"model.activation={s.activation} would have to be swiglu"),
        (not s.parallel_block, "model.parallel_block=true would have to be false"),
        (s.width % s.num_heads == 0, f"model.num_heads={s.num_heads} would have to divide {s.width}"),
        (s.window is None or not s.bias, "model.bias=true would have to be false, or model.window null"),
    ]


def hf_config(settings: ModelSettings, special: Mapping[str, int], dtype: str) -> Config:
    """Return the entries of a config.json for a model. `special` maps the roles of its tokenizer's special tokens, such
    as "eod", to their ids; `dtype` is torch's name for the type of the weights, such as "bfloat16".
    """
    family = hf_family(settings)
    architecture = ARCHITECTURES[family]
    if isinstance(settings, BertSettings):
        config = _bert_config(settings)
        if not settings.pair_head:
            architecture = architecture.replace("ForPreTraining", "ForMaskedLM")
    else:
        assert isinstance(settings, GPTSettings)
        config = _gpt2_config(settings) if family == "gpt2" else _llama_config(settings, family)
        config |= {"bos_token_id": special.get("eod"), "eos_token_id": special.get("eod")}
    config |= {"pad_token_id": special.get("pad")}
    # because: transformers 4 reads the first of the two names of the type, and 5 the second
    return {"architectures": [architecture], "model_type": family} | config | {"torch_dtype": dtype, "dtype": dtype}


def _gpt2_config(s: GPTSettings) -> Config:
    return {
        "vocab_size": s.vocab_size, "n_positions": s.seq_len, "n_embd": s.width, "n_layer": s.num_layers,
        "n_head": s.num_heads, "n_inner": s.ffn, "activation_function": _GELUS[s.activation],
        "layer_norm_epsilon": s.norm_eps, "initializer_range": s.init_std, "resid_pdrop": s.dropout,
        "embd_pdrop": s.dropout, "attn_pdrop": s.dropout, "tie_word_embeddings": s.tied,
    }  # fmt: skip


def _llama_config(s: GPTSettings, family: str) -> Config:
    return {
        "vocab_size": s.vocab_size, "hidden_size": s.width, "intermediate_size": s.ffn,
        "num_hidden_layers": s.num_layers, "num_attention_heads": s.num_heads, "num_key_value_heads": s.kv_heads,
        "head_dim": s.head, "hidden_act": "silu", "max_position_embeddings": s.seq_len, "rms_norm_eps": s.norm_eps,
        # because: theirs would drop attention alone, which is not how this model was trained
        "initializer_range": s.init_std, "attention_dropout": 0.0, "tie_word_embeddings": s.tied,
        # because: transformers 4 reads the base alone, 5 the group
        "rope_theta": s.rotary_base, "rope_parameters": {"rope_type": "default", "rope_theta": s.rotary_base},
        **({"sliding_window": s.window} if family == "mistral" else {"attention_bias": s.bias, "mlp_bias": s.bias}),
    }  # fmt: skip


def _bert_config(s: BertSettings) -> Config:
    return {
        "vocab_size": s.vocab_size, "hidden_size": s.width, "num_hidden_layers": s.num_layers,
        "num_attention_heads": s.num_heads, "intermediate_size": s.ffn, "hidden_act": _GELUS[s.activation],
        "hidden_dropout_prob": s.dropout, "attention_probs_dropout_prob": s.dropout,
        "max_position_embeddings": s.seq_len, "type_vocab_size": NUM_SEGMENTS, "initializer_range": s.init_std,
        "layer_norm_eps": s.norm_eps, "tie_word_embeddings": True,
    }  # fmt: skip


def settings_from_config(
    config: Any, where: object, *, pair_head: bool, dropout: object = None
) -> tuple[str, ModelSettings]:
    """Return the Hugging Face family and lmtrain's settings of the model that `config`, a parsed config.json,
    describes. `where` is its path; `pair_head` tells whether the weights of a BERT have a sentence-pair head;
    `dropout`, if given, overrides config.json. Raise CheckpointError for a model that lmtrain does not compute.
    """
    family = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(family, str) or family not in _DEFAULTS:
        raise CheckpointError(
            f"{where} has model_type {show(None) if family is None else shorten(family)}, which lmtrain cannot import. "
            f"Choose a model of one of these types: {', '.join(_DEFAULTS)}."
        )
    completed = _DEFAULTS[family] | config
    too_long = [key for key in _DEFAULTS[family].keys() & config.keys() if len(str(config[key])) > _LONGEST_VALUE]
    if too_long:
        raise CheckpointError(
            f"{where} has a {min(too_long)} of more than {_LONGEST_VALUE} characters. Get the file again."
        )
    problems: list[str] = []
    convert = {"gpt2": _from_gpt2, "llama": _from_llama, "mistral": _from_llama}.get(family, _from_bert)
    values = convert(completed, problems)
    if values["kind"] == "bert":
        values |= {"norm_order": "post" if family == "bert" else "pre", "pair_head": pair_head}
    values["dropout"] = _dropout(completed, family, problems) if dropout is None else dropout
    if problems:
        raise CheckpointError(
            f"{where} describes a model that lmtrain does not compute: {'; '.join(problems)}. "
            "Choose a model with such settings: an import must compute exactly the same."
        )
    return family, build_imported_settings(values, where, "Check the file.")


def _from_gpt2(c: Config, problems: list[str]) -> Config:
    _require_values(
        c, problems, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    )
    activation = _gelu(c, "activation_function", problems)
    return {
        "kind": "gpt", "num_layers": c["n_layer"], "width": c["n_embd"], "num_heads": c["n_head"],
        "ffn_width": c["n_inner"], "vocab_size": c["vocab_size"], "seq_len": c["n_positions"], "positions": "learned",
        "norm": "layernorm", "norm_eps": c["layer_norm_epsilon"], "activation": activation, "bias": True,
        "tied": c["tie_word_embeddings"], "init_std": c["initializer_range"],
    }  # fmt: skip


def _from_llama(c: Config, problems: list[str]) -> Config:
    _require_values(c, problems, hidden_act="silu", mlp_bias=c["attention_bias"])
    rope = c["rope_parameters"] or c["rope_scaling"] or {}
    if not isinstance(rope, dict):
        problems.append(f"rope_parameters={shorten(rope)} would have to be a group")
        rope = {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"rotary angles of type {shorten(kind)} would have to be default, over the whole head")
    return {
        "kind": "gpt", "num_layers": c["num_hidden_layers"], "width": c["hidden_size"],
        "num_heads": c["num_attention_heads"], "num_kv_heads": c["num_key_value_heads"], "head_width": c["head_dim"],
        "ffn_width": c["intermediate_size"], "vocab_size": c["vocab_size"], "seq_len": c["max_position_embeddings"],
        "positions": "rotary", "rotary_base": rope.get("rope_theta", c["rope_theta"]), "norm": "rmsnorm",
        "norm_eps": c["rms_norm_eps"], "activation": "swiglu", "bias": c["attention_bias"],
        "tied": c["tie_word_embeddings"], "window": c["sliding_window"],
        "init_std": c["initializer_range"],
    }  # fmt: skip


def _from_bert(c: Config, problems: list[str]) -> Config:
    activation = _gelu(c, "hidden_act", problems)
    _require_values(
        c, problems, type_vocab_size=NUM_SEGMENTS, is_decoder=False, add_cross_attention=False,
        position_embedding_type="absolute", tie_word_embeddings=True,
    )  # fmt: skip
    return {
        "kind": "bert", "num_layers": c["num_hidden_layers"], "width": c["hidden_size"],
        "num_heads": c["num_attention_heads"], "ffn_width": c["intermediate_size"], "vocab_size": c["vocab_size"],
        "seq_len": c["max_position_embeddings"], "norm_eps": c["layer_norm_eps"],
        "activation": activation, "head_activation": activation,
        "init_std": c["initializer_range"],
    }  # fmt: skip


def _dropout(c: Config, family: str, problems: list[str]) -> Any:
    """Return the dropout probability in the config.json `c` of a model of the Hugging Face family `family`. Add a
    message to `problems` if it has several that differ, or only one for attention: lmtrain has one for attention,
    embeddings and residuals together.
    """
    shares = {key: c[key] for key in _DROPOUTS[family]}
    first, *others = shares.values()
    shares_text = ", ".join(f"{key}={show(share)}" for key, share in shares.items())
    way_out = "as lmtrain has one share for embeddings, attention and residuals: choose it with --set dropout=SHARE"
    if any(share != first for share in others):
        problems.append(f"{shares_text} would have to be equal, {way_out}")
    if not others and first != 0:
        problems.append(f"{shares_text}, which is for attention alone, would have to be 0, {way_out}")
    return first


def _gelu(config: Config, key: str, problems: list[str]) -> str:
    word = str(config[key])
    if word not in _OUR_GELUS:
        problems.append(f"{key}={word} would have to be {', '.join(_OUR_GELUS)}")
    return _OUR_GELUS.get(word, "gelu")


def _require_values(config: Config, problems: list[str], **required: object) -> None:
    problems += [f"{k}={show(config[k])} would have to be {show(v)}" for k, v in required.items() if config[k] != v]


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


def tokenizer_files(data: bytes, seq_len: int, *, causal: bool) -> dict[str, bytes]:
    tokenizer = Tokenizer.from_bytes(data)
    special = {
        hf_role: tokenizer.piece(tokenizer.special[role])
        for hf_role, role in (_DECODER if causal else _ENCODER).items()
        if role in tokenizer.special
    }
    config = {
        # because: their classes by model build tokenizers by rules of their own; this one takes tokenizer.json as is
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_len,
        "model_input_names": ["input_ids", *([] if causal else ["token_type_ids"]), "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **special,
    }
    tree = parse_json(data, Path("tokenizer.json"))
    if not causal and {"cls_token", "sep_token"} <= special.keys() and tree.get("post_processor") is None:
        cls, sep = ([special[f"{role}_token"], tokenizer.special[role]] for role in ("cls", "sep"))
        # [CLS] text [SEP], or [CLS] first [SEP] second [SEP]
        tree["post_processor"] = {"type": "BertProcessing", "sep": sep, "cls": cls}
        data = json.dumps(tree, ensure_ascii=False, indent=1).encode()
    return {
        "tokenizer.json": data,
        "tokenizer_config.json": json_bytes(config),
        "special_tokens_map.json": json_bytes(special),
    }


def json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


# ---- names of weights ------------------------------------------------------------------------------------------------


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
