"""Options of other tools whose values lmtrain says in other words: tables for translate_foreign_flags.

Names that only stand for another key are in config/foreign_names.py (FOREIGN_NAMES), and so are sentences about
settings that lmtrain lacks (UNSUPPORTED_SETTINGS). Names are in snake case; a dotted one counts before its last part.
"""

from __future__ import annotations

from lmtrain.config.settings_file import FILE_NAMES

FALSE, TRUE = ("false", "0", "no", "none", "off"), ("true", "1", "yes", "on")
PROCESS_COUNT_NAMES = ("num_processes", "num_gpus", "gpus", "devices", "n_gpus", "nproc_per_node", "ngpu", "nproc")
# an option that is on -> overrides; the first replaces an earlier value, the others are defaults of the option
SWITCHES = {
    "swiglu": "model.activation=silu model.gated=true", "squared_relu": "model.activation=relu2",
    "disable_bias_linear": "model.bias=none", "add_qkv_bias": "model.bias=all",
    "openai_gelu": "model.activation=gelu_tanh", "reset_attention_mask": "data.document_mask=true",
    "no_bias": "model.bias=none", "rmsnorm": "model.norm=rmsnorm", "use_rmsnorm": "model.norm=rmsnorm",
    "rope": "model.positions=rotary", "use_rope": "model.positions=rotary", "rotary": "model.positions=rotary",
    "no_tie_embeddings": "model.tied=false", "untie_embeddings": "model.tied=false",
    "untie_embeddings_and_output_weights": "model.tied=false",
    "use_rotary_position_embeddings": "model.positions=rotary",
    "qk_layernorm": "model.qk_norm=head", "use_qk_norm": "model.qk_norm=head",
    "apply_layernorm_1p": "model.norm_weight=from_zero", "use_parallel_residual": "model.parallel_block=two_norms",
    "use_rope_scaling": "model.rotary_scaling=llama3 model.rotary_factor=8 model.rotary_original_len=8192",
    "use_distributed_optimizer": "parallel.zero=1", "recompute_activations": "recompute=attention",
    "gradient_checkpointing": "recompute=full", "checkpoint_activations": "recompute=full",
    "use_cpu": "compute.device=cpu", "no_cuda": "compute.device=cpu", "cpu": "compute.device=cpu",
    "wandb": "observe.wandb=online", "wandb_log": "observe.wandb=online", "use_wandb": "observe.wandb=online",
    "enable_wandb": "observe.wandb=online", "enable_tensorboard": "observe.tensorboard=true",
    "compile": "compute.compile=true", "compile.enable": "compute.compile=true", "tf32": "compute.tf32=true",
    "deterministic": "compute.deterministic=true",
}  # fmt: skip
# an option that is off where it is on here
OFF_SWITCHES = {
    "decay_lr": "schedule=constant", "compile": "compute.compile=false", "compile.enable": "compute.compile=false",
    "torch_compile": "compute.compile=false", "tie_embeddings": "model.tied=false",
    "tie_word_embeddings": "model.tied=false", "enable_tensorboard": "observe.tensorboard=false",
    "use_distributed_optimizer": "parallel.zero=0", "sequence_parallel": "parallel.sequence_parallel=false",
    "swiglu": "model.gated=false", "bias": "model.bias=none",
}  # fmt: skip
# option -> value -> overrides
VALUES = {
    "position_embedding_type": {
        "yarn": "model.positions=rotary model.rotary_scaling=yarn",
        "none": "model.positions=rotary model.layer_pattern=F",
    },
    "device": {"mps": "compute.device=cpu"},
    "report_to": {
        "wandb": "observe.wandb=online", "all": "observe.wandb=online", "tensorboard": "observe.tensorboard=true",
        "wandb tensorboard": "observe.wandb=online", "tensorboard wandb": "observe.wandb=online",
    },
    "logger_name": {"wandb": "observe.wandb=online", "tensorboard": "observe.tensorboard=true"},
    "lr_scheduler_type": {
        "constant_with_warmup": "schedule=constant", "cosine_with_min_lr": "schedule=cosine",
        "warmup_stable_decay": "schedule=wsd", "polynomial": "schedule=linear",
    },
    "optim": dict.fromkeys(("adam", "adamw_hf", "adamw_torch_fused", "adamw_apex_fused"), "optim=adamw"),
    "precision": {
        "bf16-true": "precision=bf16", "bf16-mixed": "precision=bf16", "16-true": "precision=fp16",
        "32-true": "precision=fp32", "fp16-mixed": "precision=fp16",
    },
    "activation_checkpoint.mode": {"none": "recompute=none", "full": "recompute=full",
                                   "selective": "recompute=attention"},
}  # fmt: skip
_SINKS = "Metrics are written to a file of run.dir, to TensorBoard and, with observe.wandb=online, to Weights & Biases."
# option -> value -> why it is left out; "" is any other value
VALUE_NOTES = {
    "init_from": {
        "resume": "A run resumes from its own run.dir by itself.",
        "scratch": "A run whose run.dir is new begins from scratch.",
        "": "checkpoint.init_from=FOLDER begins with the weights of a downloaded model.",
    },
    "resume": {
        "auto": "A run resumes from its own run.dir by itself.",
        "true": "A run resumes from its own run.dir by itself.",
        "false": "A run whose run.dir is new begins from scratch.",
    },
    "resume_from_checkpoint": {"true": "A run resumes from its own run.dir by itself."},
    "data_parallel_shard_degree": {"-1": "parallel.dp_shard=N gives the number of processes that share the weights."},
    "fsdp": dict.fromkeys(
        ("full_shard", "full_shard auto_wrap", "shard_grad_op", "hybrid_shard", "true"),
        "parallel.dp_shard=N shares the work among N processes, and parallel.zero says what else they share.",
    ),
    "report_to": {"none": "Weights & Biases is off here as well.", "": _SINKS},
    "logger_name": {"": _SINKS},
    "data": {"": "The data are named by data.path=PREFIX of a dataset, or data.text=FILE to make one of a text."},
}  # fmt: skip
# options in another unit: the setting, and the number or the setting to multiply with or to divide by
CONVERSIONS = {
    "min_lr": ("schedule.min_ratio", "/", "optim.lr"), "warmup_ratio": ("schedule.warmup_steps", "x", "train.steps"),
    "lr_warmup_fraction": ("schedule.warmup_steps", "x", "train.steps"),
    "warmup_fraction": ("schedule.warmup_steps", "x", "train.steps"),
    "train_samples": ("train.steps", "/", "train.global_batch"),
    "lr_warmup_samples": ("schedule.warmup_steps", "/", "train.global_batch"),
    "eval_iters": ("train.valid_samples", "x", "train.global_batch"),
    "eval.max_iters": ("train.valid_samples", "x", "train.micro_batch"),
    "min_decay_lr": ("schedule.min_ratio", "/", "optim.lr"),
    **dict.fromkeys(
        ("batch_accumulation_per_replica", "accumulate_grad_batches", "grad_accum_steps", "gradient_accumulation",
         "accumulation_steps", "grad_acc", "gradient_accumulation_iters"),
        ("train.global_batch", "x", "train.micro_batch"),
    ),
    "gradient_accumulation_steps": ("train.global_batch", "x", "train.micro_batch"),
    "distributed_timeout_minutes": ("parallel.timeout_s", "x", "60"),
    "exit_duration_in_mins": ("run.time_limit", "x", "60"),
}  # fmt: skip
BETAS = {"adam_beta1": 0, "adam_beta2": 1, "beta1": 0, "beta2": 1}
BOTH_BETAS = ("adam_betas", "betas", "adamw_betas", "optimizer_betas")
LOAD_STEPS = ("ckpt_step", "load_step", "load_iteration", "checkpoint_step", "resume_step")  # with a run to load
EPOCHS = ("num_train_epochs", "epochs", "num_epochs", "max_epochs", "n_epochs", "train_epochs")
POSITION_COUNTS = ("max_position_embeddings", "n_positions")  # of learned positions; may differ from the sequence's
VIRTUAL_STAGES = ("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size", "vp_size")
LAYERS_PER_STAGE = ("num_layers_per_virtual_pipeline_stage", "num_layers_per_virtual_stage")
MICRO_BATCHES = (
    "micro_batch_size", "per_device_train_batch_size", "train_micro_batch_size_per_gpu", "local_batch_size",
    "device_batch_size", "mbs",
)  # fmt: skip
# dotted options whose last part alone would say something else
PATHS = {
    "optimizer.name": "optim", "checkpoint.interval": "checkpoint.interval_steps", "checkpoint.folder": "run.dir",
    "eval.interval": "train.valid_interval_steps", "validation.freq": "train.valid_interval_steps",
    "lr_scheduler.min_lr_factor": "schedule.min_ratio", "lr_scheduler.decay_ratio": "schedule.decay_fraction",
    "training.mixed_precision_param": "precision", "checkpoint.keep_latest_k": "checkpoint.keep_last",
    "comm.train_timeout_seconds": "parallel.timeout_s", "training.seed": "train.seed", "debug.seed": "train.seed",
    "lr_scheduler.decay_type": "schedule.decay",
}  # fmt: skip
# what is another verb's work -> what to type
OTHER_VERBS = dict.fromkeys(
    ("eval_only", "skip_train", "do_eval_only", "test_only"),
    "A run trains. Start `lmtrain eval CHECKPOINT --task TASK` to measure a checkpoint instead.",
) | dict.fromkeys(
    FILE_NAMES.split(),
    "Settings are read from a .yaml file that is one of the words. Write those of this file as KEY: VALUE in one.",
)
# of these keys another tool's 0 is null here
ZERO_IS_NULL = ("optim.clip_norm",)
# options whose value may have commas by itself
LISTS = (*BOTH_BETAS, "split", "window_size", "report_to", "rampup_batch_size", "layer_types", "fsdp")
