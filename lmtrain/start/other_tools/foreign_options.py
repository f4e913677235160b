"""Options of other tools whose values lmtrain says in other words: tables for translate_foreign_flags.

Names that only stand for another key are in config/foreign_names.py (FOREIGN_NAMES), and so are sentences about
settings that lmtrain lacks (UNSUPPORTED_SETTINGS). Names are in snake case; a dotted one counts before its last part.
"""

from __future__ import annotations

from lmtrain.checkpoint.checkpoint_settings import NEWEST_WORDS, RESUMES_BY_ITSELF
from lmtrain.config.foreign_names import FOREIGN_NAMES
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
    "deterministic": "compute.deterministic=true", "enable_compile": "compute.compile=true",
    "no_weight_tying": "model.tied=false", "use_qk_layernorm": "model.qk_norm=head",
    "gpt_j_residual": "model.parallel_block=two_norms", "recompute": "recompute=full",
    "recompute_layer": "recompute=full", "activation_checkpointing": "recompute=full",
    "fp16.enabled": "precision=fp16", "bf16.enabled": "precision=bf16", "no_evals": "train.valid_interval_steps=0",
    "load_best_model_at_end": "checkpoint.keep_best=1",
    "reset_position_ids": "data.document_mask=true", "eod_mask_loss": "data.document_mask=true",
    "dataloader_inter_document_masking": "data.document_mask=true",
}  # fmt: skip
# an option that is off where it is on here
OFF_SWITCHES = {
    "decay_lr": "schedule=constant", "compile": "compute.compile=false", "compile.enable": "compute.compile=false",
    "torch_compile": "compute.compile=false", "tie_embeddings": "model.tied=false",
    "tie_word_embeddings": "model.tied=false", "enable_tensorboard": "observe.tensorboard=false",
    "use_distributed_optimizer": "parallel.zero=0", "sequence_parallel": "parallel.sequence_parallel=false",
    "swiglu": "model.gated=false", "bias": "model.bias=none", "validation.enable": "train.valid_interval_steps=0",
    "do_eval": "train.valid_interval_steps=0", "use_bias": "model.bias=none", "add_bias_linear": "model.bias=none",
}  # fmt: skip
# option -> value -> overrides
VALUES = {
    "mixed_precision": {"no": "precision=fp32"},
    "eval_strategy": {"no": "train.valid_interval_steps=0"},
    "evaluation_strategy": {"no": "train.valid_interval_steps=0"},
    "save_strategy": {"no": "checkpoint.interval_steps=null"},
    "val_check_interval": {"-1": "train.valid_interval_steps=0"},
    "limit_val_batches": {"0": "train.valid_interval_steps=0"},
    "lr_decay_style": {"inverse-square-root": "schedule=inverse_sqrt", "inverse_square_root": "schedule=inverse_sqrt"},
    "scheduler.type": {"warmuplr": "schedule=constant", "warmupdecaylr": "schedule=linear",
                       "warmupcosinelr": "schedule=cosine"},
    "activation": {"geglu": "model.activation=gelu model.gated=true",
                   "swiglu": "model.activation=silu model.gated=true"},
    "pos_emb": {"rotary": "model.positions=rotary", "learned": "model.positions=learned",
                "none": "model.positions=rotary model.layer_pattern=F"},
    "data_parallel_sharding_strategy": {"no_shard": "parallel.zero=0", "optim": "parallel.zero=1",
                                        "optim_grads": "parallel.zero=2", "optim_grads_params": "parallel.zero=3"},
    "pp_engine": {"1f1b": "parallel.schedule=1f1b", "afab": "parallel.schedule=gpipe"},
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
        "bf16-mixed": "precision=bf16",
        "32-true": "precision=fp32", "fp16-mixed": "precision=fp16",
    },
    "activation_checkpoint.mode": {"none": "recompute=none", "full": "recompute=full",
                                   "selective": "recompute=attention"},
}  # fmt: skip
_SINKS = "Metrics are written to a file of run.dir, to TensorBoard and, with observe.wandb=online, to Weights & Biases."
_RESUME_NOTES = {
    **dict.fromkeys(NEWEST_WORDS, RESUMES_BY_ITSELF),
    **dict.fromkeys(("false", "no", "0"), "A run whose run.dir is new begins from scratch."),
}
# option -> value -> why it is left out; "" is any other value
VALUE_NOTES = {
    "init_from": {
        "resume": RESUMES_BY_ITSELF,
        "scratch": "A run whose run.dir is new begins from scratch.",
        **dict.fromkeys(
            ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
            "checkpoint.init_from=FOLDER begins with the weights of a downloaded model.",
        ),
    },
    **dict.fromkeys([*FOREIGN_NAMES["checkpoint.resume"].split(), "resume"], _RESUME_NOTES),
    "max_steps": {"-1": "-1 sets no number of steps. Give train.steps, or train.tokens."},
    "validation.steps": {"-1": "Validation reads train.valid_samples."},
    "global_batch_size": {"-1": "train.global_batch is the number of samples itself."},
    "load_step": {"-1": "A run resumes from its newest checkpoint by itself."},
    "training.dtype": {"float32": "Weights are kept in float32 beside those of precision=bf16."},
    "pipe_parallel_size": {"0": "It is parallel.pp=1, the default."},
    "devices": {"auto": "--nproc says how many processes are started."},
    "data_parallel_sharding_strategy": {"": "parallel.zero decides what is sharded."},
    "data_parallel_shard_degree": {"-1": "parallel.dp_shard=N gives the number of processes that share the weights."},
    "fsdp": {
        "": "parallel.dp_shard=N shares the work among N processes, and parallel.zero says what else they share.",
    },
    "precision": dict.fromkeys(
        ("bf16-true", "16-true"),
        "Weights are never kept in 16 bits alone; precision=bf16 computes in bf16 beside weights in fp32.",
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
    **dict.fromkeys(
        ("lr_end", "end_lr", "eta_min", "final_lr", "lr_min", "minimum_lr", "min_learning_rate", "decay_min_lr",
         "min_decay_lr"),
        ("schedule.min_ratio", "/", "optim.lr"),
    ),
    **dict.fromkeys(
        ("lr_wsd_decay_iters", "wsd_decay_steps", "scheduler.decay", "num_decay_steps"),
        ("schedule.decay_fraction", "/", "train.steps"),
    ),
    "train_module.scheduler.decay": ("schedule.decay_fraction", "/", "train.steps"),
    "data_loader.global_batch_size": ("train.global_batch", "/", "model.seq_len"),  # because: OLMo counts tokens
    "rank_microbatch_size": ("train.micro_batch", "/", "model.seq_len"),
    "eval_iters": ("train.valid_samples", "x", "train.global_batch"),
    "limit_val_batches": ("train.valid_samples", "x", "train.global_batch"),
    "validation.steps": ("train.valid_samples", "x", "train.global_batch"),
    "eval.max_iters": ("train.valid_samples", "x", "train.micro_batch"),
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
STRATEGIES = {  # what is done at the end of each epoch, if its value is "epoch"
    "save_strategy": "checkpoint.interval_steps", "eval_strategy": "train.valid_interval_steps",
    "evaluation_strategy": "train.valid_interval_steps", "logging_strategy": "observe.log_interval_steps",
}
# what is done so many times in an epoch, or every so many epochs
TIMES_AN_EPOCH = {
    "saves_per_epoch": "checkpoint.interval_steps", "checkpoints_per_epoch": "checkpoint.interval_steps",
    "evals_per_epoch": "train.valid_interval_steps", "logs_per_epoch": "observe.log_interval_steps",
}
EPOCHS_BETWEEN = dict.fromkeys(
    ("save_every_epoch", "save_every_n_epochs", "save_epochs", "every_n_epochs", "save_interval_epochs",
     "checkpoint_every_n_epochs", "save_freq_epochs", "save_epoch", "save_each_epoch", "save_at_epoch_end",
     "save_every_epochs", "save_n_epochs"),
    "checkpoint.interval_steps",
) | dict.fromkeys(
    ("eval_every_epoch", "eval_every_n_epochs", "check_val_every_n_epoch", "validate_every_n_epochs", "eval_epochs",
     "val_every_epoch", "eval_each_epoch", "validate_every_epoch", "val_epochs"),
    "train.valid_interval_steps",
)
POSITION_COUNTS = ("max_position_embeddings", "n_positions")  # of learned positions; may differ from the sequence's
VIRTUAL_STAGES = ("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size", "vp_size")
LAYERS_PER_STAGE = ("num_layers_per_virtual_pipeline_stage", "num_layers_per_virtual_stage")
MICRO_BATCHES = tuple(
    name for name in FOREIGN_NAMES["train.micro_batch"].split() if name != "device_train_microbatch_size"
)  # because: that is typed beside a global batch
# intervals and lengths for which other tools take a share of the run, as in --warmup_steps 0.1
SHARES_OF_STEPS = (
    "schedule.warmup_steps", "train.valid_interval_steps", "checkpoint.interval_steps", "observe.log_interval_steps",
)  # fmt: skip
PROFILE_STEPS = ("profile_step_start", "profile_step_end", "profile_step_stop")  # the last of these is not profiled
DURATION = ("trainer.max_duration.value", "trainer.max_duration.unit")
# shares of the data for validation, in percent or below 1
VALID_SHARES = (
    "validation_split_percentage", "val_split_fraction", "val_fraction", "valid_fraction", "validation_fraction",
    "val_split", "val_size", "val_set_size", "validation_split",
)  # fmt: skip
# dotted options whose last part alone would say something else
PATHS = {
    "optimizer.name": "optim", "checkpoint.interval": "checkpoint.interval_steps", "checkpoint.folder": "run.dir",
    "eval.interval": "train.valid_interval_steps", "validation.freq": "train.valid_interval_steps",
    "lr_scheduler.min_lr_factor": "schedule.min_ratio", "lr_scheduler.decay_ratio": "schedule.decay_fraction",
    "training.mixed_precision_param": "precision", "checkpoint.keep_latest_k": "checkpoint.keep_last",
    "comm.train_timeout_seconds": "parallel.timeout_s", "training.seed": "train.seed", "debug.seed": "train.seed",
    "lr_scheduler.decay_type": "schedule.decay", "optimizer.type": "optim", "zero_optimization.stage": "parallel.zero",
    "optimizer.optimizer_factory.name": "optim", "validation.dataset": "data.valid_path",
    "validation.dataset_path": "data.valid_path", "general.project": "observe.wandb_project",
    "general.run": "observe.wandb_name", "log.project": "observe.wandb_project", "log.run": "observe.wandb_name",
    **{f"trainer.callbacks.wandb.{key}": f"observe.wandb_{key}" for key in ("name", "project", "entity")},
}  # fmt: skip
# what is another verb's work -> what to type
OTHER_VERBS = dict.fromkeys(
    ("eval_only", "skip_train", "do_eval_only", "test_only"),
    "A run trains. Start `lmtrain eval RUN --steps all --task perplexity --data FILE` to measure each checkpoint of a "
    "run instead.",
) | dict.fromkeys(
    FILE_NAMES.split(),
    "Settings are read from a .yaml file that is one of the words. Write those of this file as KEY: VALUE in one.",
)
# what more a setting decides than another tool's option
_CUT = "Documents are cut to samples of model.seq_len tokens by the run itself, and nothing of them is dropped."
MEANS_MORE = {
    "cutoff_len": _CUT, "sequence_len": _CUT,
    "data_seed": "It is train.seed here: one seed decides the first weights, the order of the samples and dropout. "
    "With checkpoint.init_from=FOLDER the weights are the same for all.",
}
# of these keys another tool's 0 is null here
ZERO_IS_NULL = ("optim.clip_norm",)
# options whose value may have commas by itself
LISTS = (*BOTH_BETAS, "split", "window_size", "report_to", "rampup_batch_size", "layer_types", "fsdp")
