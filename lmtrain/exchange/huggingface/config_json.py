"""Convert between our model settings and Hugging Face's config.json.

Called by export and import alike; torch-free. Nothing is nearly equal: a model that no Hugging Face architecture
computes, or a config.json that asks for what our models lack, is refused with every setting that stands in the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtrain.config.settings_base import show
from lmtrain.errors import CheckpointError, shorten
from lmtrain.exchange.build_imported_settings import build_imported_settings
from lmtrain.exchange.decoder_words import words_at_their_default
from lmtrain.exchange.huggingface.config_keys import ignored_reason, uncomputed_keys, uncomputed_problem
from lmtrain.models.bert_settings import NUM_SEGMENTS, BertSettings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings

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
    "add_cross_attention": False, "tie_word_embeddings": True, "is_causal": True,
}  # fmt: skip
# Second names of GPT-2's keys; transformers takes the value of the second name if both are given.
_GPT2_ALIASES = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}  # fmt: skip
_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "sliding_window": None,
    "rope_parameters": None, "rope_scaling": None, "rope_theta": None, "partial_rotary_factor": None, "is_causal": True,
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
_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_DEFAULT_BASE = 10000.0  # of rotary angles
# because: transformers 4.57 reports a wrong tokenizer for a vocabulary above 100,000 beside a config.json without a
# version, or with one before 5; our files hold what both 4 and 5 read
_FORMAT_VERSION = "5.0.0"


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
            f"No Hugging Face architecture computes this model. The nearest is {family}, for which "
            f"{'; '.join(problems)}. Use the checkpoint with `lmtrain eval` and `lmtrain generate`."
        )
    return family


def _gpt2_rules(s: GPTSettings) -> list[tuple[bool, str]]:
    """Return the conditions under which Hugging Face's GPT-2 computes this model, each as (whether it holds, the
    message if it does not).
    """
    return [
        (s.norm == "layernorm", f"model.norm={s.norm} would have to be layernorm"),
        (s.activation in _GELUS and not s.gated, f"{_activation(s)} would have to be gelu or gelu_tanh, without gates"),
        (s.bias == "all", f"model.bias={s.bias} would have to be all"),
        (s.kv_heads == s.num_heads, f"model.num_kv_heads={s.kv_heads} would have to be {s.num_heads}"),
        (s.head * s.num_heads == s.width, f"model.head_width={s.head} would have to be {s.width}/{s.num_heads}"),
        (s.window is None, f"model.window={s.window} would have to be null"),
        (s.parallel_block == "no", f"model.parallel_block={s.parallel_block} would have to be no"),
        *words_at_their_default(s),
    ]


def _activation(s: GPTSettings) -> str:
    return f"model.activation={s.activation}" + (" with model.gated=true" if s.gated else "")


def _llama_rules(s: GPTSettings) -> list[tuple[bool, str]]:
    return [
        (s.norm == "rmsnorm", f"model.norm={s.norm} would have to be rmsnorm"),
        (s.activation == "silu" and s.gated, f"{_activation(s)} would have to be silu with model.gated=true"),
        (s.parallel_block == "no", f"model.parallel_block={s.parallel_block} would have to be no"),
        (s.width % s.num_heads == 0, f"model.num_heads={s.num_heads} would have to divide {s.width}"),
        (s.bias in (("none",) if s.window is not None else ("none", "all")),
         f"model.bias={s.bias} would have to be none{'' if s.window is not None else ' or all'}"),
        *words_at_their_default(s),
    ]


def hf_config(settings: ModelSettings, special: Mapping[str, int], dtype: str) -> Config:
    """Return the entries of a config.json for a model. `special` maps the roles of its tokenizer's special tokens, such
    as "eod" and "bos", to their ids; `dtype` is torch's name for the type of the weights, such as "bfloat16".
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
        config |= begin_and_end_ids(special)
    config |= {"pad_token_id": special.get("pad")}
    # because: transformers 4 reads the first of the two names of the type, and 5 the second
    types = {"torch_dtype": dtype, "dtype": dtype, "transformers_version": _FORMAT_VERSION}
    return {"architectures": [architecture], "model_type": family} | config | types


def begin_and_end_ids(special: Mapping[str, int]) -> dict[str, int | None]:
    """Return the bos_token_id and eos_token_id of a decoder, from the ids of its tokenizer's special tokens by role. An
    end-of-document token also begins a document if no other token does.
    """
    end = special.get("eod")
    return {"bos_token_id": special.get("bos", end), "eos_token_id": end}


def restored_config(settings: ModelSettings, original: Config, special: Mapping[str, int], dtype: str) -> Config:
    """Return the entries of a config.json for a model whose weights came from a Hugging Face folder with the
    config.json `original`. Its entries are kept, except for settings that have changed since; keys are added so that
    transformers 4 and 5 both read it. `special` and `dtype` are those of `hf_config`.
    """
    now = hf_config(settings, special, dtype)
    family, original = now["model_type"], _with_first_names(original)
    if original.get("model_type") != family:
        ids = {key: value for key, value in original.items() if key.endswith("_token_id")}
        return now | ids
    pair_head = isinstance(settings, BertSettings) and settings.pair_head
    kept_dropouts = True
    try:
        _, before = settings_from_config(original, "config.json", pair_head=pair_head)
    except CheckpointError:  # because: several dropouts, of which the import chose one
        kept_dropouts = False
        _, before = settings_from_config(
            original, "config.json", pair_head=pair_head, dropout=settings.to_dict()["dropout"]
        )
    then = hf_config(before, special, dtype)
    changed = {key: value for key, value in now.items() if key not in then or then[key] != value}
    if not kept_dropouts:
        changed |= {key: now[key] for key in _DROPOUTS[family]}
    always = ("architectures", "rope_theta", "rope_parameters", "torch_dtype", "dtype")
    version = {"transformers_version": now["transformers_version"]}
    return version | original | changed | {key: now[key] for key in always if key in now}


def _with_first_names(config: Config) -> Config:
    """Return a config.json's entries with GPT-2's keys by their first names only."""
    if config.get("model_type") != "gpt2":
        return config
    second = {first: config[alias] for alias, first in _GPT2_ALIASES.items() if alias in config}
    return {key: value for key, value in config.items() if key not in _GPT2_ALIASES} | second


def _gpt2_config(s: GPTSettings) -> Config:
    return {
        "vocab_size": s.vocab_size, "n_positions": s.position_rows, "n_embd": s.width, "n_layer": s.num_layers,
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
        **({"sliding_window": s.window} if family == "mistral"
           else dict.fromkeys(("attention_bias", "mlp_bias"), s.bias == "all")),
    }  # fmt: skip


def _bert_config(s: BertSettings) -> Config:
    return {
        "vocab_size": s.vocab_size, "hidden_size": s.width, "num_hidden_layers": s.num_layers,
        "num_attention_heads": s.num_heads, "intermediate_size": s.ffn, "hidden_act": _GELUS[s.activation],
        "hidden_dropout_prob": s.dropout, "attention_probs_dropout_prob": s.dropout,
        "max_position_embeddings": s.position_rows, "type_vocab_size": NUM_SEGMENTS, "initializer_range": s.init_std,
        "layer_norm_eps": s.norm_eps, "tie_word_embeddings": True,
    }  # fmt: skip


def ignored_keys(config: Config) -> dict[str, str]:
    """Return the keys of a config.json that decide no setting of lmtrain's model, each with the reason."""
    family, config = config["model_type"], _with_first_names(config)
    read = _DEFAULTS[family].keys() | {"model_type"} | ({"layer_types"} if family == "mistral" else set())
    if family == "llama" and config.get("sliding_window") is not None:
        read -= {"sliding_window"}
    if config.get("rope_scaling"):
        read -= {"rope_parameters"}
    return {key: ignored_reason(key) for key in sorted(config.keys() - read)}


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
    config = _with_first_names(config)
    completed = _DEFAULTS[family] | config
    uncomputed = uncomputed_keys(config)
    used = (_DEFAULTS[family].keys() & config.keys()) | uncomputed.keys()
    too_long = [key for key in used if len(str(config[key])) > _LONGEST_VALUE]
    if too_long:
        raise CheckpointError(
            f"{where} gives {min(too_long)} a value of more than {_LONGEST_VALUE} characters. Get the file again."
        )
    problems = [uncomputed_problem(key, value) for key, value in uncomputed.items()]
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
        c, problems, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False,
        is_causal=True,
    )  # fmt: skip
    activation = _gelu(c, "activation_function", problems)
    return {
        "kind": "gpt", "num_layers": c["n_layer"], "width": c["n_embd"], "num_heads": c["n_head"],
        "ffn_width": c["n_inner"], "vocab_size": c["vocab_size"], "seq_len": c["n_positions"], "positions": "learned",
        "norm": "layernorm", "norm_eps": c["layer_norm_epsilon"], "activation": activation, "bias": "all",
        "tied": c["tie_word_embeddings"], "init_std": c["initializer_range"],
    }  # fmt: skip


def _from_llama(c: Config, problems: list[str]) -> Config:
    is_mistral = c["model_type"] == "mistral"
    # because: transformers' Mistral has no biases, whatever its config.json says, and its LLaMA no window
    attention_bias = False if is_mistral else c["attention_bias"]
    window = _mistral_window(c, problems) if is_mistral else None
    _require_values(
        c, problems, hidden_act="silu", attention_bias=attention_bias, mlp_bias=attention_bias, is_causal=True
    )
    return {
        "kind": "gpt", "num_layers": c["num_hidden_layers"], "width": c["hidden_size"],
        "num_heads": c["num_attention_heads"], "num_kv_heads": c["num_key_value_heads"], "head_width": c["head_dim"],
        "ffn_width": c["intermediate_size"], "vocab_size": c["vocab_size"], "seq_len": c["max_position_embeddings"],
        "positions": "rotary", "rotary_base": _rotary_base(c, problems), "norm": "rmsnorm",
        "norm_eps": c["rms_norm_eps"], "activation": "silu", "gated": True, "bias": "all" if attention_bias else "none",
        "tied": c["tie_word_embeddings"], "window": window, "init_std": c["initializer_range"],
    }  # fmt: skip


def _mistral_window(c: Config, problems: list[str]) -> Any:
    """Return the window of the Mistral with the config.json `c`, None for none. Add a message to `problems` if its
    layers differ: transformers loads a Mistral with `layer_types` as a Ministral, which may have a window in some.
    """
    kinds = c.get("layer_types")
    if kinds is None:
        return c["sliding_window"]
    kind = kinds[0] if isinstance(kinds, list) and kinds else None
    if kind not in ("sliding_attention", "full_attention") or kinds.count(kind) < len(kinds):
        problems.append("layer_types would have to be the same for all layers, sliding_attention or full_attention")
    return c["sliding_window"] if kind == "sliding_attention" else None


def _rotary_base(c: Config, problems: list[str]) -> Any:
    """Return the base of the rotary angles in the config.json `c`. Add a message to `problems` for angles that lmtrain
    does not compute, and for types or bases of which transformers 4 takes the one and 5 the other.
    """
    # because: transformers 5 takes rope_parameters only if there is no rope_scaling, and 4 never takes it
    key = "rope_scaling" if c["rope_scaling"] else "rope_parameters"
    rope = c[key] or {}
    if not isinstance(rope, dict):
        problems.append(f"{key}={show(rope)} would have to be a group")
        rope = {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("type", kind) != kind:
        problems.append(f"{key} has rope_type={shorten(kind)} and type={shorten(rope['type'])}, which must be equal")
    shares = (rope.get("partial_rotary_factor"), c["partial_rotary_factor"])
    if kind != "default" or any(share not in (None, 1.0) for share in shares):
        problems.append(f"rotary angles of type {shorten(kind)} would have to be default, over the whole head")
    elif unknown := sorted(rope.keys() - set(_ROPE_KEYS)):
        problems.append(f"{key} has {shorten(unknown[0])}, which default angles lack")
    base_outside = c["rope_theta"]
    if base_outside is None and key == "rope_scaling":
        base_outside = _DEFAULT_BASE  # because: transformers 4 takes no base from rope_scaling
    bases = [base for base in (rope.get("rope_theta"), base_outside) if base is not None]
    if len(bases) == 2 and bases[0] != bases[1]:
        problems.append(f"rope_theta={show(base_outside)} would have to be {show(bases[0])}, as in {key}")
    return bases[0] if bases else _DEFAULT_BASE


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
