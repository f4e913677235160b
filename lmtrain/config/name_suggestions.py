"""Suggestions for misspelled setting names, across all groups and from the names that other tools use.

Called by build for an unknown key and by the command line for an unknown option. The answers are text to type.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, Union, get_args, get_origin

from lmtrain.config.settings_base import Choice, Settings, kinds
from lmtrain.errors import leave_out, spelling_hint, way

# our key -> its names in Megatron-LM, Hugging Face's Trainer, DeepSpeed and nanoGPT; a key without a dot is a group
FOREIGN_NAMES = {
    "optim.lr": "learning_rate max_lr peak_lr",
    "optim.clip_norm": "clip_grad max_grad_norm gradient_clip_val grad_clip gradient_clipping max_norm",
    "optim.eps": "adam_eps adam_epsilon epsilon",
    "optim.betas": "adam_beta1 adam_beta2 beta1 beta2 adam_betas betas adamw_betas optimizer_betas",
    "optim.weight_decay": "wd",
    "optim": "optimizer optimizer_type optimizer_name",
    "schedule": "lr_decay_style lr_scheduler_type lr_scheduler scheduler lr_schedule decay_type",
    "schedule.decay": "lr_wsd_decay_style",
    "schedule.warmup_steps": "lr_warmup_iters warmup_iters warmup num_warmup_steps lr_warmup_steps",
    "train.micro_batch": "micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu microbatch "
    "local_batch_size device_batch_size mbs device_train_microbatch_size",
    "train.global_batch": "global_batch_size batch_size train_batch_size total_batch_size batch gbs "
    "global_train_batch_size",
    "train.steps": "train_iters max_steps max_iters iterations iters num_steps total_steps num_train_steps train_steps",
    "train.tokens": "train_tokens max_tokens num_tokens",
    "train.rampup": "rampup_batch_size batch_size_rampup",
    "train.valid_interval_steps": "eval_interval eval_steps val_check_interval eval_every "
    "evaluation_interval val_interval validation_freq",
    "train.valid_samples": "eval_iters eval_samples",
    "model": "model_name model_type model_name_or_path arch architecture model_size model_preset",
    "model.width": "hidden_size d_model n_embd dim hidden_dim embed_dim",
    "model.num_layers": "n_layer n_layers num_hidden_layers layers depth",
    "model.num_heads": "num_attention_heads n_head n_heads heads",
    "model.num_kv_heads": "num_key_value_heads num_query_groups n_kv_heads",
    "model.ffn_width": "ffn_hidden_size intermediate_size d_ff n_inner",
    "model.seq_len": "seq_length max_seq_len max_seq_length max_position_embeddings sequence_length context_length "
    "block_size n_ctx n_positions max_sequence_length",
    "model.dropout": "hidden_dropout resid_pdrop dropout_rate",
    "model.rotary_base": "rope_theta rope_base rotary_emb_base global_rope_theta",
    "model.local_rotary_base": "rope_local_base_freq local_rope_theta rope_local_theta",
    "model.rotary_share": "rotary_pct partial_rotary_factor rotary_percent rotary_percentage",
    "model.rotary_scaling": "rope_scaling rope_type rope_scaling_type",
    "model.rotary_factor": "rope_scaling_factor rope_factor yarn_rotary_scaling_factor",
    "model.rotary_original_len": "original_max_position_embeddings yarn_original_max_position_embeddings",
    "model.rotary_low_factor": "low_freq_factor",
    "model.rotary_high_factor": "high_freq_factor",
    "model.rotary_beta_fast": "beta_fast yarn_beta_fast",
    "model.rotary_beta_slow": "beta_slow yarn_beta_slow",
    "model.rotary_short_factors": "short_factor",
    "model.rotary_long_factors": "long_factor",
    "model.gated": "gated_mlp gated_linear_unit glu",
    "model.head_bias": "lm_head_bias",
    "model.embedding_scale": "embedding_multiplier scale_emb",
    "model.attention_scale": "attention_multiplier softmax_scale attn_scale",
    "model.residual_scale": "residual_multiplier",
    "model.attention_cap": "attn_logit_softcapping attention_logit_cap attn_softcap",
    "model.logit_cap": "final_logit_softcapping logits_soft_cap output_logit_soft_cap logit_softcap",
    "model.z_loss": "z_loss_weight z_loss_multiplier z_loss_coeff",
    "parallel.tp": "tensor_model_parallel_size tensor_parallel_size tp_size tensor_parallel_degree",
    "parallel.pp": "pipeline_model_parallel_size pipeline_parallel_size pp_size pipeline_parallel_degree",
    "parallel.vp": "virtual_pipeline_model_parallel_size vp_size",
    "parallel.dp_shard": "data_parallel_size dp dp_size fsdp data_parallel_shard_degree",
    "parallel.zero": "zero_stage",
    "recompute": "recompute_granularity gradient_checkpointing activation_checkpointing checkpoint_activations",
    "precision": "mixed_precision dtype torch_dtype",
    "checkpoint.interval_steps": "save_interval save_steps save_every save_freq checkpoint_interval ckpt_interval",
    "checkpoint.keep_last": "save_total_limit max_checkpoints keep_last_n_checkpoints keep_last_n max_to_keep "
    "keep_checkpoint_max num_checkpoints_to_keep",
    "checkpoint.resume": "load resume_from_checkpoint resume_from restore resume_checkpoint_path load_path",
    "checkpoint.init_from": "pretrained_checkpoint finetune_from init_checkpoint initial_checkpoint_dir",
    "checkpoint.ema.decay": "ema_decay ema_beta ema_rate ema_decay_rate",
    "checkpoint.ema.every_steps": "update_every_n_steps apply_ema_every_n_steps ema_every_n_steps ema_update_interval",
    "checkpoint.ema.from_step": "start_step ema_start_step ema_start",
    "observe.log_interval_steps": "log_interval logging_steps log_every log_freq log_every_n_steps "
    "iteration_step_info_interval metrics_collect_interval",
    "data.path": "data_path data_prefix train_data_path dataset dataset_path train_data",
    "data.text": "train_file text_file text_path input_file",
    "data.valid_path": "valid_data_path val_data_path eval_data",
    "data.tokenizer": "tokenizer_model tokenizer_path tokenizer_name tokenizer_dir",
    "run.dir": "output_dir save out_dir save_dir output run_dir log_dir save_folder checkpoints_path dump_folder",
    "train.seed": "random_seed data_seed",
    "model.norm": "normalization norm_type",
    "model.positions": "position_embedding_type",
    "model.activation": "hidden_act activation_function",
    "model.head_width": "kv_channels head_dim",
    "model.init_std": "init_method_std initializer_range",
    "model.norm_eps": "layernorm_epsilon norm_epsilon rms_norm_eps layer_norm_epsilon layer_norm_eps",
    "model.window": "window_size sliding_window",
    "model.tied": "tie_word_embeddings tie_embeddings",
    "model.vocab_multiple": "make_vocab_size_divisible_by",
    "parallel.dp_replicate": "data_parallel_replicate_degree",
    "parallel.schedule": "pipeline_parallel_schedule pp_schedule pp_engine",
    "parallel.timeout_s": "ddp_timeout",
    "observe.wandb": "report_to wandb_log use_wandb wandb_mode logger_name",
    "observe.wandb_name": "wandb_exp_name wandb_run_name run_name",
    "data.index_dir": "data_cache_path",
    "precision.initial_scale": "initial_loss_scale",
    "precision.growth_interval_steps": "loss_scale_window",
    "precision.min_scale": "min_loss_scale",
    "compute.deterministic": "deterministic_mode full_determinism",
    "compute.threads": "num_threads",
    "compute.device": "accelerator device_type",
    "compute.compile": "torch_compile",
}
# settings of other tools that lmtrain lacks or handles automatically -> the sentence to show
UNSUPPORTED_SETTINGS = {
    name: said
    for said, names in {
        "There is no context parallelism here; parallel.tp and parallel.sequence_parallel=true share a long sequence.":
            "cp context_parallel_size context_parallel_degree",
        "The number of nodes follows from parallel.* and the ranks of a node: `lmtrain slurm render --gpus-per-node N` "
        "writes the job, and without Slurm each node starts `lmtrain pretrain --nproc-per-node N`.":
            "nodes nnodes num_nodes n_nodes",
        "There is no mixture of experts here.":
            "num_experts num_local_experts num_moe_experts moe_router_topk expert_model_parallel_size "
            "expert_parallel_size expert_parallel_degree ep",
        "There is no float8 here; precision=bf16 is the fastest.": "fp8 fp8_format float8 enable_fp8_linear",
        "A run counts steps or tokens: train.steps, or train.tokens. --dry-run shows how many steps an epoch has.":
            "num_train_epochs epochs num_epochs n_epochs train_epochs",
        "The tokenizer is stored with the dataset; `lmtrain preprocess --tokenizer` chooses it. For data.text and for "
        "datasets of other tools, use data.tokenizer=PATH.":
            "tokenizer_type vocab_file merge_file tokenizer",
        "A text to validate on is made a dataset of first: type `lmtrain preprocess FILE --tokenizer "
        "RUN/tokenizer.json --output PREFIX`, and then data.valid_path=PREFIX.":
            "valid_text val_text eval_text valid_file val_file validation_file eval_file",
        "The schedule ends where the run does, with train.steps.":
            "lr_decay_iters lr_decay_samples lr_wsd_decay_iters",
        "The kernels are chosen for the machine.":
            "use_flash_attn flash_attn use_flash_attn_v2 attn_implementation attention_backend transformer_impl "
            "use_mcore_models use_legacy_models fused use_fused_rmsnorm masked_softmax_fusion no_masked_softmax_fusion "
            "bias_gelu_fusion no_bias_gelu_fusion attention_softmax_in_fp32 cross_entropy_loss_fusion",
        "A run stops at run.time_limit, after a stage with stop_after=true, or when a file STOP is made in run.dir.":
            "exit_interval exit_signal_handler",
        "Settings are read from a .yaml file that is one of the words; write those of other files as KEY=VALUE.":
            "config_file yaml_cfg args_file config config_path cfg",
        "model.dropout is the same in all parts of a block.": "attention_dropout attn_pdrop embd_pdrop",
        "Validation takes the batches of train.micro_batch.": "per_device_eval_batch_size eval_batch_size",
        "model.num_kv_heads says it.": "group_query_attention",
        "recompute=full computes every block again.": "recompute_method recompute_num_layers",
        "A run's folder always holds a checkpoint to go on from.": "enable_checkpoint checkpoint.enable",
        "--nproc-per-node gives the processes of a node; lmtrain is started once on each node.":
            "num_nodes nnodes master_addr master_port node_rank rdzv_backend rdzv_endpoint",
        "The device decides it.": "distributed_backend backend ddp_backend local_rank",
        "Gradient sums and messages overlap with the computation automatically.":
            "overlap_grad_reduce overlap_param_gather tp_comm_overlap no_gradient_accumulation_fusion ddp_impl",
        "There is no early stopping here; a file STOP in run.dir ends a run.":
            "early_stopping early_stopping_patience patience early_stop",
        "There is no offloading to the host here; parallel.zero and recompute save memory.":
            "cpu_offload activation_offload offload_optimizer offload_param optimizer_cpu_offload fsdp_cpu_offload "
            "offload cpu_offloading offload_activations",
        "What is measured is in metrics.jsonl of run.dir, and in TensorBoard.":
            "log_params_norm log_num_zeros_in_grad log_timers_to_tensorboard log_memory_to_tensorboard "
            "log_validation_ppl_to_tensorboard log_world_size_to_tensorboard log_loss_scale_to_tensorboard "
            "log_learning_rate_to_tensorboard log_batch_size_to_tensorboard tensorboard_log_interval "
            "tensorboard_queue_size timing_log_level timing_log_option",
        "All output is kept in run.dir.":
            "logging_dir tensorboard_dir logging_first_step log_throughput log_on_each_node",
        "Saving, validating and logging count steps: checkpoint.interval_steps, train.valid_interval_steps, "
        "observe.log_interval_steps.": "save_strategy eval_strategy evaluation_strategy logging_strategy",
        "Checkpoints are written while training goes on.": "async_save async_mode async_checkpoint",
        "There is no label smoothing here.": "label_smoothing label_smoothing_factor",
        "There is no option for a part of a dataset here; `lmtrain data split` cuts one off.": "max_train_samples",
        "precision.initial_scale is the first scale of the loss, which then adapts.": "loss_scale",
        "model.ffn_width is the width itself, mlp_ratio x model.width.": "mlp_ratio mlp_expansion_ratio",
        "checkpoint.keep_best=true keeps the best checkpoint, by checkpoint.best_by.":
            "load_best_model_at_end metric_for_best_model greater_is_better",
        "lmtrain has no such switch; leave it out.":
            "eval_accumulation_steps log_level logging_nan_inf_filter save_safetensors save_only_model jit_mode_eval "
            "use_ipex half_precision_backend dataloader_drop_last dataloader_pin_memory dataloader_prefetch_factor "
            "disable_tqdm ignore_data_skip group_by_length ddp_find_unused_parameters ddp_bucket_cap_mb "
            "torch_compile_backend preprocessing_num_workers keep_linebreaks streaming low_cpu_mem_usage "
            "trust_remote_code initial_validation final_validation enable_profiling fsdp_reshard_after_forward "
            "enable_async_tensor_parallel export_dtype init_timeout_seconds save_overwrite tp_mode hysteresis "
            "accumulate_allreduce_grads_in_fp32 accumulate_grad_in_fp32 use_cpu_initialization mmap_warmup "
            "distribute_saved_activations no_async_tensor_model_parallel_allreduce check_for_nan_in_loss_and_grad "
            "exit_on_missing_checkpoint override_opt_param_scheduler use_checkpoint_opt_param_scheduler log_straggler "
            "fp32_residual_connection fp16_lm_cross_entropy apply_query_key_layer_scaling rerun_mode do_train do_eval no_load_optim no_load_rng use_checkpoint_args always_save_checkpoint "
            "no_save_optim no_save_rng use_mmap no_mmap_bin_files manual_gc manual_gc_interval ckpt_format "
            "empty_unused_memory_level no_check_for_nan_in_loss_and_grad no_create_attention_mask_in_dataloader "
            "calculate_per_token_loss use_dist_ckpt auto_detect_ckpt_format "
            "remove_unused_columns num_workers dataloader_num_workers dataloader_type dataset_impl",
        "A run resumes where its run.dir stopped; another run.dir starts a new run.": "overwrite_output_dir",
        "checkpoint.ema.decay=0.999 keeps an average of the weights, which validation and evaluations measure as well.":
            "use_ema ema_enable enable_ema model_averaging eval_ema evaluate_ema_weights_instead "
            "validate_original_weights",
        "checkpoint.ema.decay is the share of the average that stays at an update: 0.5 ** (1 / steps) for a half-life "
        "of so many steps.": "half_life_fraction ema_half_life half_life_steps",
        "parallel.zero decides what is sharded.": "deepspeed ds_config fsdp_config",
        "model.layer_pattern says it with a letter for each layer: w reads a window, f all tokens, W and F the same "
        "without rotary angles; the letters repeat.": "layer_types sliding_window_pattern no_rope_layers "
            "no_rope_layer_interval global_attn_every_n_layers max_window_layers use_sliding_window",
        "model.logit_scale is a factor of the logits: 1 / logits_scaling.": "logits_scaling",
        "model.attention_scale is the factor of the scores: 1 / sqrt(query_pre_attn_scalar).": "query_pre_attn_scalar",
        "model.bias says which linears add a vector: all, none, qkv or mlp.":
            "attention_bias qkv_bias mlp_bias use_bias add_bias_linear",
        "model.norm_order says where a block has norms: pre, branch, sandwich or post.":
            "use_post_norm use_sandwich_norm apply_residual_connection_post_layernorm do_layer_norm_before",
    }.items()
    for name in names.split()
}  # fmt: skip
_KEY_BY_FOREIGN_NAME = {name: key for key, names in FOREIGN_NAMES.items() for name in names.split()}
_VALUE_BY_FOREIGN_VALUE = {
    "bert": "bert_base", "adamw_torch": "adamw", "swish": "silu", "gelu_new": "gelu_tanh", "wandb": "online",
    "gpu": "cuda", "nvidia": "cuda", "half": "fp16", "float16": "fp16", "16": "fp16", "16-mixed": "fp16",
    "bfloat16": "bf16", "float32": "fp32", "float": "fp32", "32": "fp32", "rope": "rotary", "absolute": "learned",
    "1F1B": "1f1b", "zero_bubble": "zb_h1", "selective": "attention", "linear_decay": "linear", "noop": "none",
    "transformers": "hf", "huggingface": "hf", "safetensors": "hf", "mcore": "megatron", "gpu:0": "cuda",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SettingNames:
    """The names to suggest for a misspelled setting: all keys of the settings class `root`, and the choices of its
    groups.
    """

    root: type[Settings]
    groups: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    typed: Mapping[str, str] = dataclasses.field(default_factory=dict)  # key -> value as typed on the command line

    def suggest_overrides(self, path: str, value: str) -> list[str]:
        """Return up to three overrides `key=value` that the user may have meant by the unknown key `path` with the
        value `value`; [] if none is close.
        """
        parent, _, name = path.rpartition(".")
        word = name.lower().replace("-", "_")
        known_keys = types_by_key(self.root)
        if parent in self.groups and value in self.groups[parent]:
            return [f"{parent}={value}"]
        if word in self.groups and not parent:
            return [self._suggested_choice(word, value)]
        without_repeats = ".".join(part for part, _ in groupby(path.split(".")))  # files may repeat their group's name
        if without_repeats in known_keys:
            return [self._suggested_override(without_repeats, value)]
        below = [key for key in known_keys if key.endswith(f".{path}")] if parent else []  # the key without its group
        matches = below or [key for key in known_keys if key.rpartition(".")[2] == word]
        if len(matches) > 3:
            matches = [key for key in matches if key.startswith(f"{parent}.")] or matches[:3]
        # because: a user who types `train.batch_size` does not mean the batch size of evaluations
        if word in _KEY_BY_FOREIGN_NAME and not (parent and any(key.startswith(f"{parent}.") for key in matches)):
            matches = [_KEY_BY_FOREIGN_NAME[word]]
        if not matches:
            siblings = [key for key in known_keys if key.rpartition(".")[0] == parent]
            matches = [key for key in siblings if key.rpartition(".")[2] in _closest_names(name, siblings, 0.6)][:1]
        if not matches:
            matches = difflib.get_close_matches(path, known_keys, n=1, cutoff=0.8)
        if not matches:
            last_parts = _closest_names(word, known_keys, 0.75)
            matches = [key for key in known_keys if key.rpartition(".")[2] in last_parts][:3]
        return [self._suggested_override(key, value) for key in matches]

    def refusal(self, path: str, value: str, known_keys: typing.Iterable[str]) -> str:
        """Return the whole error message that the dotted key `path` is not a setting, with a suggestion what to type
        instead. `value` is the text typed for it, `known_keys` are the valid keys of its group.
        """
        if (stage := self._split_stage_key(path)) is None:
            return f"{path}={value} is not a setting. {self.way_out(path, value, known_keys)}"
        prefix, key = stage
        group, names = key.partition(".")[0], list(known_keys)
        if group not in names and (key in types_by_key(self.root) or key in self.groups):
            whole = way(f"{key}={value}", instead_of=path)
            return f"{path}={value} cannot differ between the stages of a run. Set {whole} for the whole run."
        if "." not in key and (closest := _closest_names(key, names, 0.6)):
            near = way(f"{prefix}.{closest[0]}={value}", instead_of=path)
            return f"{path}={value} is not a setting. Did you mean {near}?"
        words = [word for word in self.suggest_overrides(key, value) if word.partition(".")[0] in names]
        ways = [way(f"{prefix}.{word}", instead_of=path) for word in words]
        way_out = f"Did you mean {' or '.join(ways)}?" if ways else ""
        return f"{path}={value} is not a setting. {way_out or spelling_hint(key, names)}"

    def _split_stage_key(self, path: str) -> tuple[str, str] | None:
        """Split a key such as "stages.decay.optim.lr" into ("stages.decay", "optim.lr"). Return None for keys that are
        not within a training stage.
        """
        field, _, rest = path.partition(".")
        name, _, key = rest.partition(".")
        hint = typing.get_type_hints(self.root).get(field)
        return (f"{field}.{name}", key) if key and get_origin(hint) is dict else None

    def way_out(self, path: str, value: str, known_keys: typing.Iterable[str]) -> str:
        """Return a sentence, the end of an error message, that tells the user what to type in place of the unknown key
        `path`. `value` is the text typed for it, `known_keys` are the valid keys of its group.
        """
        if sentence := UNSUPPORTED_SETTINGS.get(path.rpartition(".")[2].lower().replace("-", "_")):
            return sentence
        if path in types_by_key(self.root):  # the key belongs to another kind of its group
            group = path.partition(".")[0]
            others = f"`lmtrain config explain {path}` lists those that have it."
            return f"{leave_out(path)}, or choose another {group}; {others}"
        words = self.suggest_overrides(path, value)
        ways = [way(word, instead_of=path) for word in words]
        return f"Did you mean {' or '.join(ways)}?" if ways else spelling_hint(path.rpartition(".")[2], known_keys)

    def _suggested_override(self, key: str, value: str) -> str:
        """Return the override `key=value` to suggest to the user. If the key accepts only certain values, an invalid
        `value` is replaced by the nearest of them.
        """
        if "." not in key:
            return self._suggested_choice(key, value)
        options = union_members(types_by_key(self.root).get(key))
        if float in options and value.endswith("%") and (share := number_meant(value)):
            return f"{key}={share}"
        choices = [str(choice) for option in options if get_origin(option) is Literal for choice in get_args(option)]
        return f"{key}={closest_value(value, choices) or value if choices else value}"

    def _suggested_choice(self, group: str, value: str) -> str:
        """Return the override `group=choice` to suggest, with the nearest existing choice, or `group=NAME` if none is
        close.
        """
        choices = self.groups.get(group, ())
        return f"{group}={value if value in choices else closest_value(value, choices) or 'NAME'}"


def number_meant(value: object) -> str | None:
    """Return the number that a user probably meant by a text that is none: `10%` -> "0.1", `3/4` -> "0.75", `1e-3x` ->
    "1e-3". Return None if the text does not begin with a number, or if a unit such as k follows, which multiplies it.
    """
    pattern = r"(-?\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*(?:(%)|/\s*([1-9]\d*)|(?![kmbt]$)[a-z_]*)"
    number = re.fullmatch(pattern, str(value).lower())
    if number is None:
        return None
    divisor = 100 if number[2] else int(number[3] or 1)
    return number[1] if divisor == 1 else f"{float(number[1]) / divisor:g}"


def closest_value(value: str, known_values: typing.Iterable[str]) -> str | None:
    """Return the entry of `known_values` that the user probably meant by `value`: the same word, lmtrain's word for
    another tool's value, or the nearest spelling. Return None if none is close.

    Of a name on Hugging Face's hub, such as Qwen/Qwen3-0.6B, the part after the owner counts.
    """
    known_values = list(known_values)
    for word in (value, value.lower()):
        if (translated := _VALUE_BY_FOREIGN_VALUE.get(word, word)) in known_values:
            return translated
    extensions = [known_value for known_value in known_values if known_value.startswith(f"{value}_")]
    prefixes = [
        known_value
        for known_value in known_values
        if value and (value.startswith(known_value) or known_value.startswith(value))
    ]
    spellings = (value, value.rpartition("/")[2].lower())
    similar = (
        word for text in spellings for word in difflib.get_close_matches(text, known_values, n=1, cutoff=0.6)
        if word != "none" or difflib.SequenceMatcher(None, text, word).ratio() > 0.7  # because: it turns something off
    )  # fmt: skip
    return next(iter([*extensions, *similar, *prefixes]), None)


def suggest_value(value: str, known_values: typing.Iterable[str], mark: Callable[[str], str] = str) -> str:
    """Return a sentence that tells the user what to type in place of an unknown `value`: "Did you mean X?" if
    `closest_value` finds an X in `known_values`, else a list of all known values. `mark` marks X as a way out.
    """
    known_values = list(known_values)
    closest = closest_value(value, known_values)
    return f"Did you mean {mark(closest)}?" if closest else spelling_hint(value, known_values, mark)


def _closest_names(name: str, keys: typing.Iterable[str], cutoff: float) -> list[str]:
    """Return, as a list of at most one, the last part of a dotted key in `keys` that is spelled most like `name`.
    `cutoff` (0 to 1) is the least similarity.
    """
    return difflib.get_close_matches(name, {key.rpartition(".")[2] for key in keys}, n=1, cutoff=cutoff)


def types_by_key(root: type[Settings]) -> dict[str, Any]:
    """Return dotted key -> type hint for every setting below the class `root`; of a choice, the settings of all its
    kinds.
    """
    return dict(_iter_key_types(root, ""))


def _iter_key_types(cls: type[Settings], path: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, type hint) for every single setting of the class `cls` and of the settings classes nested in
    it, of all kinds if there is a choice. `path` is the dotted key of `cls` within the config, "" for the whole config.
    """
    for kind_class in kinds(cls).values() if issubclass(cls, Choice) and not cls.kind else [cls]:
        hints = typing.get_type_hints(kind_class)
        for field in dataclasses.fields(kind_class):
            key, hint = f"{path}.{field.name}" if path else field.name, hints[field.name]
            nested = [
                option for option in union_members(hint) if isinstance(option, type) and issubclass(option, Settings)
            ]
            for option in nested:
                yield from _iter_key_types(option, key)
            if not nested:
                yield key, hint


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union type; for any other type, the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
