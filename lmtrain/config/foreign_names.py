"""What other tools call the settings of lmtrain, and what is said of those that it lacks or needs no setting for.

Used by name_suggestions for an unknown key, and by the command line for an unknown option.
"""

from __future__ import annotations

# our key -> its names in Megatron-LM, Hugging Face's Trainer, DeepSpeed and nanoGPT; a key without a dot is a group
FOREIGN_NAMES = {
    "optim.lr": "base_lr learning_rate max_lr peak_lr",
    "optim.clip_norm": "clip_grad max_grad_norm gradient_clip_val grad_clip gradient_clipping max_norm",
    "optim.eps": "adam_eps adam_epsilon epsilon",
    "optim.betas": "adam_beta1 adam_beta2 beta1 beta2 adam_betas betas adamw_betas optimizer_betas",
    "optim.momentum": "muon_momentum",
    "optim.weight_decay": "adam_weight_decay weight_decay_rate wd",
    "optim": "optimizer optimizer_type optimizer_name",
    "schedule": "lr_decay_type lr_scheduler_name lr_decay_style lr_scheduler_type lr_scheduler scheduler lr_schedule "
    "decay_type",
    "schedule.decay": "lr_wsd_decay_style",
    "schedule.warmup_steps": "lr_warmup warmup_step lr_warmup_iters warmup_iters warmup num_warmup_steps "
    "lr_warmup_steps",
    "train.micro_batch": "per_gpu_train_batch_size per_device_batch_size per_gpu_batch_size batch_size_per_device "
    "micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu microbatch local_batch_size "
    "device_batch_size mbs device_train_microbatch_size",
    "train.global_batch": "global_batch_size batch_size train_batch_size total_batch_size batch gbs "
    "global_train_batch_size",
    "train.steps": "n_steps num_iterations num_train_iters training_steps total_iters train_iters max_steps max_iters "
    "iterations iters num_steps total_steps num_train_steps train_steps",
    "train.tokens": "total_tokens token_budget train_tokens max_tokens num_tokens",
    "train.rampup": "rampup_batch_size batch_size_rampup",
    "train.valid_interval_steps": "eval_interval eval_steps val_check_interval eval_every "
    "evaluation_interval val_interval validation_freq",
    "train.valid_samples": "eval_iters eval_samples max_eval_samples",
    "model": "model_name model_type model_name_or_path arch architecture model_size model_preset",
    "model.width": "hidden_size d_model n_embd dim hidden_dim embed_dim",
    "model.num_layers": "n_layer n_layers num_hidden_layers layers depth",
    "model.num_heads": "num_attention_heads n_head n_heads heads",
    "model.num_kv_heads": "num_kv_head n_query_groups num_key_value_heads num_query_groups n_kv_heads",
    "model.ffn_width": "ffn_hidden_size intermediate_size d_ff n_inner",
    "model.seq_len": "seq_length max_seq_len max_seq_length max_position_embeddings sequence_length context_length "
    "block_size n_ctx n_positions max_sequence_length cutoff_len sequence_len tokens_per_sample",
    "model.dropout": "hidden_dropout resid_pdrop dropout_rate",
    "model.rotary_base": "rope_theta rope_base rotary_emb_base global_rope_theta",
    "model.local_rotary_base": "rope_local_base_freq local_rope_theta rope_local_theta",
    "model.rotary_share": "rotary_pct partial_rotary_factor rotary_percent rotary_percentage",
    "model.rotary_scaling": "rope_scaling rope_type rope_scaling_type",
    "model.rotary_factor": "rotary_scaling_factor rope_scaling_factor rope_factor yarn_rotary_scaling_factor",
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
    "model.z_loss": "z_loss_coefficient z_loss_weight z_loss_multiplier z_loss_coeff",
    "parallel.tp": "model_parallel_size tensor_model_parallel_size tensor_parallel_size tp_size tensor_parallel_degree",
    "parallel.pp": "pipe_parallel_size pipeline_model_parallel_size pipeline_parallel_size pp_size "
    "pipeline_parallel_degree",
    "parallel.vp": "virtual_pipeline_model_parallel_size vp_size",
    "parallel.dp_shard": "data_parallel_size dp dp_size fsdp data_parallel_shard_degree",
    "parallel.zero": "zero_stage",
    "recompute": "recompute_granularity gradient_checkpointing activation_checkpointing checkpoint_activations",
    "precision": "autocast_precision mixed_precision dtype torch_dtype",
    "checkpoint.interval_steps": "persistent_save_interval checkpoint_every save_every_n_steps checkpoint_factor "
    "save_interval save_steps save_every save_freq checkpoint_interval ckpt_interval",
    "checkpoint.keep_last": "keep_latest_k most_recent_k save_total_limit max_checkpoints keep_last_n_checkpoints "
    "keep_last_n max_to_keep keep_checkpoint_max num_checkpoints_to_keep",
    "checkpoint.resume": "load resume_from_checkpoint resume_from restore resume_checkpoint_path load_path",
    "checkpoint.init_from": "initial_load_path pretrained_checkpoint finetune_from init_checkpoint "
    "initial_checkpoint_dir",
    "checkpoint.ema.decay": "ema_decay ema_beta ema_rate ema_decay_rate",
    "checkpoint.ema.every_steps": "update_every_n_steps apply_ema_every_n_steps ema_every_n_steps ema_update_interval",
    "checkpoint.ema.from_step": "start_step ema_start_step ema_start",
    "observe.log_interval_steps": "steps_per_print log_steps log_interval logging_steps log_every log_freq "
    "log_every_n_steps iteration_step_info_interval metrics_collect_interval",
    "data.path": "train_data_paths data_paths dataset_folder data_dir data_path data_prefix train_data_path dataset "
    "dataset_path train_data",
    "data.text": "train_file text_file text_path input_file",
    "data.valid_path": "valid_data_paths val_dataset eval_dataset validation_data_path valid_data_path val_data_path "
    "eval_data",
    "data.tokenizer": "tokenizer tokenizer_name_or_path tokenizer_model tokenizer_path tokenizer_name tokenizer_dir",
    "run.dir": "output_dir save out_dir save_dir output run_dir log_dir save_folder checkpoints_path dump_folder",
    "train.seed": "random_seed data_seed",
    "model.norm": "normalization norm_type",
    "model.positions": "position_embedding_type",
    "model.activation": "hidden_act activation_function",
    "model.head_width": "kv_channels head_dim",
    "model.init_std": "init_method_std initializer_range",
    "model.norm_eps": "rms_norm_epsilon layernorm_epsilon norm_epsilon rms_norm_eps layer_norm_epsilon layer_norm_eps",
    "model.window": "sliding_window_width window_size sliding_window",
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
    "checkpoint.keep_every_steps": "save_retain_interval",
    "observe.wandb_entity": "wandb_team",
    "model.vocab_size": "padded_vocab_size n_vocab",
    "run.time_limit": "max_time",
    "schedule.min_ratio": "alpha_f min_lr_ratio min_lr_factor",
    "compute.compile": "compile_model use_torch_compile torch_compile",
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
            "tokenizer_type vocab_file merge_file",
        "A text to validate on is made a dataset of first: type `lmtrain preprocess FILE --tokenizer "
        "RUN/tokenizer.json --output PREFIX`, and then data.valid_path=PREFIX.":
            "valid_text val_text eval_text valid_file val_file validation_file eval_file",
        "The schedule ends where the run does, with train.steps; stages.NAME.steps=N gives a part of it one of its "
        "own.":
            "lr_decay_iters lr_decay_samples lr_decay_steps decay_steps decay_iters lr_decay_starting_step t_max "
            "lr_decay_fraction",
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
        "eval.tasks takes a list of tasks with their data: lmtrain eval --list shows them.": "eval_tasks",
        "Validation takes the batches of training.": "eval_global_batch_size eval_micro_batch_size",
        "recompute=full computes every block again.": "recompute_method recompute_num_layers",
        "A run's folder always holds a checkpoint to go on from.": "enable_checkpoint checkpoint.enable",
        "--nproc-per-node gives the processes of a node; lmtrain is started once on each node.":
            "num_nodes nnodes master_addr master_port node_rank rdzv_backend rdzv_endpoint",
        "The device decides it.": "distributed_backend backend ddp_backend local_rank",
        "Gradient sums and messages overlap with the computation automatically.":
            "overlap_grad_reduce overlap_param_gather tp_comm_overlap no_gradient_accumulation_fusion ddp_impl",
        "There are no callbacks here. lmtrain.metrics(RUN) reads in Python what a run has measured so far; a "
        "file STOP in run.dir or run.time_limit ends a run.": "callbacks callback hooks hook",
        "`--plugin PACKAGE` makes the models, optimizers, schedules and tasks of a package known.": "plugins plugin",
        "observe.profile_steps=[FIRST,LAST] writes torch's profile of these steps.": "profiler",
        "There is no early stopping here; a file STOP in run.dir ends a run.":
            "early_stopping early_stopping_patience patience early_stop",
        "There is no offloading to the host here; parallel.zero and recompute save memory.":
            "cpu_offload activation_offload offload_optimizer offload_param optimizer_cpu_offload fsdp_cpu_offload "
            "offload cpu_offloading offload_activations",
        "What is measured is in metrics.jsonl of run.dir, and in TensorBoard.":
            "logger loggers log_params_norm log_num_zeros_in_grad log_timers_to_tensorboard log_memory_to_tensorboard "
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
        "checkpoint.keep_best=1 keeps the best checkpoint, by checkpoint.best_by.":
            "metric_for_best_model greater_is_better",
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
            "fp32_residual_connection fp16_lm_cross_entropy apply_query_key_layer_scaling rerun_mode do_train "
            "do_eval no_load_optim no_load_rng use_checkpoint_args always_save_checkpoint "
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
