"""Convert between Megatron-LM's arguments and our model settings. Torch-free; called by the Megatron import and export.

Sizes are taken from the weights where these show them; the arguments give the rest. A model that lmtrain does not
compute, or that Megatron-LM does not, is refused with everything that stands in the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmtrain.config.settings_base import show
from lmtrain.errors import CheckpointError, SettingsError, shorten, way
from lmtrain.exchange.megatron.convert_decoder_arguments import (
    GetArgument,
    decoder_arguments,
    decoder_rules,
    words_from_arguments,
)
from lmtrain.exchange.settings_rules_for_all_formats import build_imported_settings
from lmtrain.exchange.torch_files.read_pickle_as_data import CallRecord, Global
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings, round_up

DIVISIBLE_BY = 128
_LONGEST_LIST = 1000  # numbers, such as one for each layer
# Arguments that change what is computed, and the values with which (as without the argument) our models compute it.
_REQUIRED_ARGUMENTS: dict[str, tuple[object, ...]] = {
    "apply_residual_connection_post_layernorm": (False,), "num_experts": (None, 0), "multi_latent_attention": (False,),
    "quick_geglu": (False,), "rotary_interleaved": (False,), "mtp_num_layers": (None, 0), "qk_l2_norm": (False,),
    "attention_output_gate": (False,), "softmax_type": ("vanilla",), "use_mup": (False,),
    "glu_linear_offset": (0, 0.0), "softmax_scale": (None,), "activation_func_clamp_value": (None,),
    "experimental_attention_variant": (None,), "enable_mhc_connections": (False,),
    "heterogeneous_layers_config_path": (None,),
}  # fmt: skip
# The same for arguments that a decoder has words for, and an encoder has not.
_REQUIRED_OF_ENCODERS: dict[str, tuple[object, ...]] = {
    "apply_layernorm_1p": (False,), "layernorm_zero_centered_gamma": (False,), "qk_layernorm": (False,),
    "squared_relu": (False,), "swiglu": (False,), "openai_gelu": (False,), "window_size": (None,),
}  # fmt: skip


@dataclass(frozen=True)
class WeightFacts:
    """The facts about a model that its weights themselves show."""

    num_layers: int
    width: int
    ffn_width: int
    num_positions: int | None  # None if no position embedding is learned
    is_encoder: bool
    bias: str  # which linears have biases, as model.bias says: all, none or qkv
    norm_has_bias: bool
    has_output: bool  # whether it has an output matrix besides the embedding
    has_pair: bool  # whether it has a sentence-pair head


def argument_getter(args: CallRecord) -> GetArgument:
    """Return a function (name, default=None) that reads one of Megatron-LM's arguments from `args`, the
    argparse.Namespace as the pickle records it. Its results are numbers, booleans, short texts, None and tuples of up
    to 1,000 of these; any other value becomes a text such as "<dict>".

    because: what a pickle nests may take forever to compare or to write into a message
    """

    def get(name: str, default: Any = None) -> Any:
        value = args.get(name, default)
        if isinstance(value, (tuple, list)) and not isinstance(value, Global) and len(value) <= _LONGEST_LIST:
            return tuple(map(_plain_value, value))
        return _plain_value(value)

    return get


def _plain_value(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return shorten(value) if isinstance(value, str) else f"<{type(value).__name__}>"


def settings_from_arguments(
    argument: GetArgument, facts: WeightFacts, vocab_size: int, overrides: Mapping[str, object], where: object, *,
    has_arguments: bool = True,
) -> ModelSettings:  # fmt: skip
    """Return lmtrain's settings of a Megatron-LM model. `argument` reads an argument by its name; `has_arguments` is
    False for an old checkpoint that stores none. `facts` are read from its weights, `overrides` are settings that the
    user gives, `where` is the folder, for messages. Raise CheckpointError for a model that lmtrain does not compute or
    that is not fully described, and SettingsError for an override without an effect.
    """
    problems = [
        f"--{name.replace('_', '-')} {shorten(show(value))} would have to be {show(allowed[0])}"
        for name, allowed in (_REQUIRED_ARGUMENTS | (_REQUIRED_OF_ENCODERS if facts.is_encoder else {})).items()
        if (value := argument(name, allowed[0])) not in allowed
    ]
    states_positions = argument("use_rotary_position_embeddings", False) or argument("position_embedding_type")
    problems += _positions_problems(argument, facts) if states_positions else []
    values: dict[str, Any] = {
        "num_layers": facts.num_layers, "width": facts.width, "num_heads": argument("num_attention_heads"),
        "ffn_width": facts.ffn_width, "vocab_size": vocab_size, "dropout": argument("hidden_dropout", 0.0),
        "seq_len": facts.num_positions or argument("max_position_embeddings") or argument("seq_length"),
        "norm_eps": argument("layernorm_epsilon") or argument("norm_epsilon") or 1e-5,
        "init_std": argument("init_method_std", 0.02),
    }  # fmt: skip
    # because: the fused kernel of bias and gelu, its default, computes gelu by tanh
    by_tanh = (argument("bias_gelu_fusion", True) and facts.bias == "all") or argument("openai_gelu", False)
    if facts.is_encoder:
        values |= {"kind": "bert", "norm_order": "pre", "pair_head": facts.has_pair}
        # because: its head computes the exact gelu even where the fused kernel of its blocks does not
        values |= {"activation": "gelu_tanh" if argument("bias_gelu_fusion") else "gelu", "head_activation": "gelu"}
    else:
        rotary = facts.num_positions is None
        if facts.bias == "none" and argument("add_qkv_bias", False):
            problems.append("--add-qkv-bias true would have to be false, as its weights have no such biases")
        norm = "layernorm" if str(argument("normalization", "LayerNorm")) == "LayerNorm" else "rmsnorm"
        gated, is_squared = bool(argument("swiglu", False)), argument("squared_relu", False)
        gelu = "gelu_tanh" if by_tanh else "gelu"
        values |= {
            "kind": "gpt", "head_width": argument("kv_channels"), "positions": "rotary" if rotary else "learned",
            "num_kv_heads": argument("num_query_groups") if argument("group_query_attention", False) else None,
            "bias": facts.bias, "norm": "layernorm" if facts.norm_has_bias else norm,
            "norm_bias": True if facts.norm_has_bias and facts.bias != "all" else None,
            "activation": "silu" if gated else "relu2" if is_squared else gelu, "gated": gated,
            "tied": not argument("untie_embeddings_and_output_weights", False)
            and (has_arguments or not facts.has_output),
        }  # fmt: skip
        positions = _kind_of_positions(argument) if states_positions else "rope" if rotary else "learned_absolute"
        values |= words_from_arguments(
            argument, facts.num_layers, problems, positions=str(positions), norm=str(values["norm"])
        )
    hidden, attention = values["dropout"], argument("attention_dropout", values["dropout"])
    if hidden != attention and "dropout" not in overrides:
        problems.append(
            f"--attention-dropout {show(attention)} would have to be --hidden-dropout {show(hidden)}, as lmtrain has "
            "one dropout for both; choose it with --set dropout=SHARE"
        )
    if problems:
        raise CheckpointError(
            f"{where} holds a model that lmtrain does not compute: {'; '.join(problems)}. "
            "Choose a model with such arguments: an import must compute exactly the same."
        )
    values |= overrides
    if values["num_heads"] is None:
        raise CheckpointError(
            f"{where} does not state the number of heads; files of 2019 never do. Give it: --set num_heads=N."
        )
    if facts.num_positions is None and not states_positions and "positions" not in overrides:
        raise CheckpointError(
            f"{where} does not state its kind of positions, and its weights have no table of them. If its positions "
            f"are rotary, use {way('--set', 'positions=rotary')}. Otherwise choose another checkpoint."
        )
    if facts.is_encoder and argument("bias_gelu_fusion") is None and "activation" not in overrides:
        raise CheckpointError(
            f"{where} does not state its kind of gelu; files before --bias-gelu-fusion never do. "
            f"Use {way('--set', 'activation=gelu')} or {way('--set', 'activation=gelu_tanh')}."
        )
    settings = build_imported_settings(values, where, "Check the file, or --set.")
    unused = [f"--set {problem.text()}" for problem in settings.unused() if problem.key in overrides]
    if unused:
        raise SettingsError(unused)
    return settings


def _positions_problems(argument: GetArgument, facts: WeightFacts) -> list[str]:
    """Return a list of one message if --position-embedding-type does not fit the weights, otherwise []. A model with a
    learned table of positions, and any encoder, must have learned_absolute; another must have rope or none.
    """
    kind, has_table = _kind_of_positions(argument), facts.num_positions is not None
    allowed = ("learned_absolute",) if has_table or facts.is_encoder else ("rope", "none")
    if kind in allowed:
        return []
    table = "a table of positions" if has_table else "no table of positions"
    return [
        f"--position-embedding-type {show(kind)} would have to be {' or '.join(allowed)}, as its weights have {table}"
    ]


def _kind_of_positions(argument: GetArgument) -> Any:
    # because: Megatron-LM lets the older flag win over the newer choice
    return "rope" if argument("use_rotary_position_embeddings", False) else argument("position_embedding_type")


def padded_rows(vocab_size: int, tp: int) -> int:
    return round_up(vocab_size, DIVISIBLE_BY * tp)


def megatron_arguments(settings: ModelSettings, tp: int, pp: int, dtype: str) -> dict[str, Any]:
    """Return the arguments, name -> value, to store in an exported checkpoint for Megatron-LM to read: those of a model
    with these settings at `tp` x `pp` ranks, with weights of the type `dtype` (fp32, bf16 or fp16). Raise
    CheckpointError if Megatron-LM does not compute the model, or not at this tp and pp.
    """
    assert isinstance(settings, (GPTSettings, BertSettings))
    _check_exportable(settings, tp, pp)
    shape, causal = settings.shape, settings.shape.causal
    gpt = settings if isinstance(settings, GPTSettings) else None
    arguments = {
        "num_layers": shape.num_layers, "hidden_size": shape.width, "ffn_hidden_size": shape.ffn_width,
        "num_attention_heads": shape.num_heads, "kv_channels": shape.head_width,
        "group_query_attention": shape.num_kv_heads < shape.num_heads, "num_query_groups": shape.num_kv_heads,
        "seq_length": shape.seq_len, "max_position_embeddings": settings.position_rows,
        "position_embedding_type": "learned_absolute", "add_position_embedding": True,
        "use_rotary_position_embeddings": False, "rotary_base": 10000, "rotary_percent": 1.0,
        "rotary_interleaved": False, "add_bias_linear": True, "add_qkv_bias": True, "swiglu": False,
        "squared_relu": False, "bias_gelu_fusion": settings.activation == "gelu_tanh", "normalization": "LayerNorm",
        "apply_layernorm_1p": False, "layernorm_epsilon": settings.norm_eps, "norm_epsilon": settings.norm_eps,
        "qk_layernorm": False, "untie_embeddings_and_output_weights": gpt is not None and not gpt.tied,
        "window_size": None,
        "apply_query_key_layer_scaling": False, "hidden_dropout": settings.dropout,
        "attention_dropout": settings.dropout, "init_method_std": settings.init_std, "num_experts": None,
        "vocab_size": shape.vocab_size, "padded_vocab_size": padded_rows(shape.vocab_size, tp),
        "make_vocab_size_divisible_by": DIVISIBLE_BY, "bert_binary_head": not causal,
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": None, "expert_model_parallel_size": 1, "ckpt_format": "torch",
        "bf16": dtype == "bf16", "fp16": dtype == "fp16", "tokenizer_type": "HuggingFaceTokenizer",
    }  # fmt: skip
    return arguments if gpt is None else arguments | decoder_arguments(gpt)


def _check_exportable(settings: GPTSettings | BertSettings, tp: int, pp: int) -> None:
    shape = settings.shape
    if isinstance(settings, BertSettings):
        rules = [
            (settings.norm_order != "post", "model.norm_order=post would have to be pre"),
            # because: without its second head its BERT has no segments either
            (settings.pair_head, "model.pair_head=false would have to be true"),
            (settings.head_activation == "gelu", "model.head_activation=gelu_tanh would have to be gelu"),
        ]
    else:
        rules = decoder_rules(settings)
    rules += [
        (value % count == 0, f"{axis}={count} does not divide model.{name}={value}")
        for axis, count, name, value in (
            ("tp", tp, "num_kv_heads", shape.num_kv_heads),
            ("tp", tp, "ffn_width", shape.ffn_width),
            ("pp", pp, "num_layers", shape.num_layers),
        )
    ]
    problems = [text for holds, text in rules if not holds]
    if problems:
        raise CheckpointError(
            f"Megatron-LM cannot compute this model at this tp and pp: {'; '.join(problems)}. Choose a tp and pp that "
            "divide it, or another model."
        )
