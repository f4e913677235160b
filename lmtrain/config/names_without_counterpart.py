"""Settings of other tools that lmtrain has nothing like: a sentence for each kind, and their names.

Called for a name that no other table has. Names that have a counterpart, or a reason of their own, are in
foreign_names.py.
"""

from __future__ import annotations

import re

from lmtrain.config.foreign_names import FOREIGN_NAMES, UNSUPPORTED_SETTINGS
from lmtrain.config.ideas_without_counterpart import idea_of

NOTHING_LIKE_IT = "lmtrain has nothing like it."
# sentence -> the beginnings of names, or of whole dotted names if they have a dot
_BEGINNINGS = {
    "There is no mixture of experts here.": "moe_ expert_ deepep",
    "There is no float8 here; precision=bf16 is the fastest.": "fp8_ fp4_ float8_ mxfp8_ te_ quantize.",
    "observe.profile_steps=[FIRST,LAST] writes torch's profile of these steps.":
        "profile profiling. profiler. trainer.callbacks.profiler. pytorch_profiler_ use_pytorch_profiler "
        "use_nsys_profiler",
    "A training run generates no text; `lmtrain generate` does, from a checkpoint.":
        "inference_ generate_ generation. eval.max_new_tokens eval.evaluate_example text_gen_type",
    "There is no reinforcement learning here, nor training on preferences.": "rl_ grpo_ dpo_ kto_ langrl_ reinforce_",
    "There is no multi-token prediction here.": "mtp_",
    "There is no adapter here; all weights are trained.": "lora_ peft_ qlora_ adapter_ soft_prompt_",
    "There are no models with state spaces here.": "mamba_ hybrid_ linear_attention_ linear_conv_ linear_num_",
    "There is no multi-head latent attention here.": "mla_ multi_latent_ q_lora_ kv_lora_ qk_head_dim qk_pos_ v_head_",
    "Models read text alone.": "vision_ img_ image_ dino_ swin_ patch_ num_channels encoder_decoder_ audio_",
    "There is no search in documents here.": "retro_ retriever_ ict_ biencoder_ indexer_",
    "A run that dies starts again with the same command, or by itself with --max-restarts.":
        "inprocess_ ft_ fault_tolerance. adlr_ enable_ft_ calc_ft_ replication",
    "Checkpoints have one format, which every layout reads.":
        "ckpt_ dist_ckpt_ non_persistent_ hub_ use_persistent_ckpt async_ckpt_ fully_parallel_",
    "The kernels are chosen for the machine.": "cuda_graph enable_cuda_graph triton_ use_liger liger_",
    "What is measured is in metrics.jsonl of run.dir, and in TensorBoard.":
        "log_ logging_ logger. one_logger timing_ straggler otel_ comet_ trackio_ tensorboard_ mlflow_ flops_profiler",
    "Weights & Biases gets the project, entity, name and tags of observe.wandb_*.":
        "wandb_ trainer.callbacks.wandb.",
    "Batches are read ahead by data.prefetch_steps, in threads of the run.": "dataloader_ dataloader. data_loader.",
    "Gradient sums and messages overlap with the computation automatically.":
        "ddp_ overlap_ no_overlap_ tp_comm_ nccl_",
    "parallel.dp_shard=N shares the work among N processes, and parallel.zero says what else they share.":
        "fsdp_ use_fsdp use_torch_fsdp use_megatron_fsdp use_custom_fsdp megatron_fsdp_ torch_fsdp zero_ dp_config",
    "The command of Slurm is `lmtrain slurm render`; --max-restarts and run.time_limit do the rest.": "slurm_",
    "There is no offloading to the host here; parallel.zero and recompute save memory.": "offload_ cpu_offload_",
    "There is no fill-in-the-middle here.": "fim_",
    "Widths are scaled by hand; there is no maximal update parametrization.": "mup_ use_mup coord_check",
    "The tokenizer is stored with the dataset; `lmtrain preprocess --tokenizer` chooses it.":
        "tiktoken_ tokenizer_ special_tokens null_tokenizer_ vocab_extra_",
    "The data are named by data.path=PREFIX of a dataset, or data.text=FILE to make one of a text.":
        "hf_dataset dataset_ mock_data",
}  # fmt: skip
_NAMES = """
_attn_implementation ac_config accelerator_config account account_for_embedding_in_pipeline_split
account_for_loss_in_pipeline_split activation_checkpoint.debug activation_checkpoint.early_stop
activation_checkpointing_kwargs align_grad_reduce allow_ambiguous_pad_tokens allow_chopped amp app_tag_run_name
app_tag_run_version apply_wd_to_qk_layernorm async_bookkeeping async_strategy attention_config auto_find_batch_size
autotuning autotuning_run average_tokens_across_devices barrier_with_l1_time base_shapes_file batch_eval_metrics
benchmark_csv_path bert_embedder_type bert_load bert_no_binary_head bf16_full_eval bias_dropout_fusion
block_data_path bookkeeping_soft_timeout bos_token_id cache_dir cache_mla_latents cancel_check_interval cancel_tags
char_level_ppl chat_template check_for_large_grads check_for_nan_in_loss check_for_spiky_loss
check_weight_hash_across_dp_replicas_interval checkpoint checkpoint_in_cpu checkpoint_name checkpoint_num_layers
checkpoint_scale checkpoint_validation_with_forward_pass checkpoints_path_is_shared_file_system classes_fraction
comm.mode comment comms_logger communication_data_type compile.backend compile.components compression_training
config_files config_logger_dir config_name config_overrides consumed_train_samples context_parallel_load_balancer
context_parallel_rotate_method contiguous_checkpointing cp_comm_type cp_config create_all_gather_group
create_seed_checkpoint csv_monitor curriculum_learning curriculum_seqlen custom_args_module custom_config_module
custom_import data_args_path data_efficiency data_impl data_parallel_random_init data_per_class_fraction data_types
dataset_config_name dataset_max_tokens dataset_name dataset_overwrite_cache dataset_processing_num_proc_per_process
dataset_read_path dataset_weights debug decode_only_cuda_graphs decoder_first_pipeline_num_layers
decoder_last_pipeline_num_layers decoder_num_layers decoder_seq_length decoupled_lr decoupled_min_lr
decrease_batch_size_if_needed deepscale deepscale_config deepspeed_activation_checkpointing deepspeed_extra_args
deepspeed_mpi deepspeed_slurm defer_embedding_wgrad_compute determinism_check deterministic_warn_only dim_att
disable_color_printing disable_fake_mode disable_gloo_process_groups disable_jit_fuser disable_loss_parallel
disable_msc disable_straggler_on_startup disable_symmetric_registration disable_tp_comm_bulk_dgrad
disable_tp_comm_bulk_wgrad disable_tp_comm_overlap_ag disable_tp_comm_overlap_rs disable_tp_comm_split_ag
disable_tp_comm_split_rs distrib_optim_fully_reshardable_mem_efficient distributed_timeout_seconds_after_init
do_predict do_test do_valid dump_param_to_param_group_map dump_state dynamic_loss_scale early_step_in_backward
elasticity embedding_path enable_chunked_prefill enable_cpu_offload enable_experimental enable_first_step_checkpoint
enable_full_sharding_in_hsdp enable_jit_checkpoint enable_msc encoder_num_layers encoder_pipeline_model_parallel_size
encoder_seq_length encoder_tensor_model_parallel_size end_weight_decay eos_token_id ep_config ephemeral_cooldown
ephemeral_save_interval error_injection_rate error_injection_type eval_delay eval_do_concat_batches eval_on_start
eval_results_prefix eval_use_gather_object evidence_data_path exclude exclude_from_loading exit_signal
exit_signal_handler_for_dataloader exit_signal_handler_for_training exp_avg_dtype exp_avg_sq_dtype expansion_factor
extra_save_iters fake_process_group ffn_dim filter_warnings fixed_steps flash_decode flight_recorder_dump_on_timeout
flight_recorder_dump_path flight_recorder_extra_dump_on_exec flight_recorder_include_only_active
flight_recorder_include_stack_trace flight_recorder_trace_buffer_size force_multi fp16_full_eval fp32_allreduce
freeze_all_layers full_validation fused_kernels_build_path gc_debug gc_freq general.step git_hash global_num_gpus
gmlp_attn_dim gpt_j_tied gpu_sniff_test_interval grad_reduce_in_bf16 gradient_checkpointing_kwargs
gradient_noise_scale_cpu_offload gradient_noise_scale_n_batches gradient_predivide_factor gtp_expert_remat_nccl_ub
gtp_remat_nccl_ub gtp_remat_reduce_scatter_with_fp32_accumulation hard_stop head_lr_mult head_size
heterogeneous_layers_config_encoded_json heterogeneous_layers_config_path hf_assets_path
hierarchical_context_parallel_sizes high_priority_stream_groups hostfile hybrid_attention_ratio hybrid_layer_pattern
hybrid_mlp_ratio hybrid_override_pattern ignore_fingerprint_mismatch ignore_sanity_checks implementation include
include_for_metrics include_num_input_tokens_seen init_method init_method_xavier_uniform init_model_with_meta_device
initial_load_in_hf initial_load_in_hf_quantized initial_load_model_only is_llama_config is_pipe_parallel
iter_per_epoch iteration iterations_to_skip job.description keep_fp8_transpose_cache
keep_fp8_transpose_cache_when_using_custom_fsdp kitchen_config_file kitchen_recipe_number label_ignore_index
label_names last_save_in_hf last_save_model_only launcher layernorm_fusion lazy_mpu_init learning_rate_scheduler
length_column_name limit_test_batches lion_beta1 lion_beta2 load_key_mapping load_lr_scheduler
load_main_params_from_ckpt load_only load_optim load_optim_state load_optimizer load_rng load_strategy
load_trainer_state log.group log.metadata log_device_memory_used log_energy log_grad_norm log_grad_pct_zeros
log_gradient_noise_scale log_l2_norm_grad_to_tensorboard log_level_replica log_max_attention_logit log_memory_interval
log_model log_optimizer_states log_param_norm log_progress log_runtime_to_tensorboard log_throughput_to_tensorboard
logging_level logits_load_decode_threads logits_load_dir logits_load_ignore_errors logits_load_kd_loss_alpha
logits_load_msc_prefetch_depth logits_load_prefetch_factor logits_save_dir logits_save_dtype logits_save_top_k
logits_save_top_p logits_save_top_p_min_k lr_scheduler_kwargs lr_warmup_init lr_warmup_style lr_wsd_decay_samples
main_grads_dtype main_params_dtype manual_gc_eval mask_factor mask_prob mask_type max_duration max_tokens_to_oom
maximum_tokens memory_budget memory_estimation.enable memory_keys memory_profiling memory_profiling_path
memory_snapshot_path metadata_path microbatch_group_size_per_virtual_pipeline_stage mid_level_dataset_surplus
mixed_precision_reduce mlp_multiple_of model.converters model.init_method model.model_config model_config
model_revision module_fqns_per_model_part modules_to_filter mscale mscale_all_dim multiple_validation_sets
muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec muon_nesterov muon_no_split_qkv muon_num_ns_steps
muon_scalar_optimizer muon_scale_mode muon_tp_mode muon_use_syrk neftune_noise_alpha neg_test_data_paths
neg_test_label_data_paths neg_train_data_paths neg_train_label_data_paths neg_valid_data_paths
neg_valid_label_data_paths no_align_grad_reduce no_align_param_gather no_barrier_with_level_1_timing
no_bias_dropout_fusion no_bias_swiglu_fusion no_checkpoints no_ckpt_fully_parallel_save
no_clone_scatter_output_in_embedding no_data_sharding no_fp8_wgrad no_gradient_reduce_div_fusion no_initialization
no_log_loss_scale_to_tensorboard no_manual_gc_eval no_one_logger no_persist_layer_norm no_pin_cpu_grads
no_pin_cpu_params no_position_embedding no_rope_freq no_rope_fusion no_scatter_gather_tensors_in_pipeline no_ssh_check
no_use_layer_wise_param_layout no_use_tokenizer_model_from_checkpoint_args no_weight_decay_cond_type
no_yarn_correction_range_round_to_int num_classes num_dataset_builder_threads num_distributed_optimizer_instances
num_samples num_speculative_tokens num_unique_layers nvtx_ranges object_storage_cache_path onnx_safe
opt_pos_emb_offset optim_args optim_target_modules optimizer_cuda_graph optimizer_factory optimizer_offload_fraction
outer_dp_sharding_strategy output_bert_embeddings output_layer_init_method output_layer_parallelism output_logit_dtype
override_ckpt_iteration override_lr_scheduler overwrite_cache pack_impl pad_samples_to_global_batch_size pad_token_id
pad_vocab_size parallelism_config param_sharing_style partition_activations per_dataset_sequences_path
per_op_sac_force_recompute_mm_shapes_by_fqns per_split_data_args_path perform_rl_step persistent_workers
phase_transition_iterations pin_memory pipe_partition_method pipeline_model_parallel_comm_backend
pipeline_model_parallel_layout pipeline_model_parallel_split_rank pipeline_parallel_expert_parallel_overlap
pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage
pipeline_parallel_microbatch_size pipeline_parallel_schedule_csv pos_test_data_paths pos_test_label_data_paths
pos_train_data_paths pos_train_label_data_paths pos_valid_data_paths pos_valid_label_data_paths pp_config
pre_train_checkpoint precompute_model_name prediction_loss_only prefetch_factor prescale_gradients preserve_rng_state
pretraining_tp print_after_conversion print_config profile profile_backward project prompt_end push_to_hub
query_in_block_prob quick_geglu rank record_memory_history record_shapes refit_method relative_attention_max_distance
relative_attention_num_buckets restore_callback_states_from_checkpoint result_rejected_tracker_filename return_logits
return_positions reuse_grad_buf_for_mxfp8_param_ag rmsnorm_fusion rope_fusion rope_interleaved rotary_interleaved
rotary_save_freqs_buffer rpe_max_distance rpe_num_buckets run_workload_inspector_server runtime_time_unit
s3_cache_path s3_chunk_size s3_path sample_input_file sample_output_file sample_rate save_activations_interval
save_async save_base_shapes save_config_file save_config_filepath save_dgrads_interval save_final_state
save_for_all_ranks save_initial_state save_iters save_logs save_on_each_node save_optim save_params_interval save_rng
save_tb_folder save_tokenizer_assets save_tokens_per_expert_interval save_traces_file_prefix save_traces_folder
save_wgrads_interval scaled_masked_softmax_fusion scaled_upper_triang_masked_softmax_fusion scalenorm_epsilon
selective_ac_option set_level_for_all_loggers sft sft_tokenizer_prompt_format sgd_momentum sharp_enabled_group
short_seq_prob shuffle_files skip_in_stream skip_memory_metrics sparse_attention sparse_gradients sparsity_config spec
start_eval_at_iter start_weight_decay state_dict_load_opts state_dict_save_opts step_batch_size_schedule steps_to_skip
strict_fsdp_dtensor_load suggested_communication_unit_size synchronize_each_layer target_device_type
te_precision_config_file te_rng_tracker teamspace temperature test_data_path test_data_paths test_data_weights
test_label_data_paths test_mode test_reward_data_paths text_column_name throughput_window_size titles_data_path token
token_size_in_bytes tokenizer_hf_no_include_special_tokens tokenizer_hf_no_use_fast tokenizer_max_length
tokenizer_revision tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_sentencepiece_legacy top_k top_p
torch_adam_is_fused torch_compile_mode torch_empty_cache_steps tp_config tp_linear_async_communication
tp_recompute_allgather trace_buf_size train_data_weights train_impl train_label_data_paths train_module.optim
train_reward_data_paths train_sampling_strategy train_sync_interval trainer.callbacks
trainer.callbacks.checkpointer.enabled trainer.callbacks.checkpointer.priority trainer.callbacks.checkpointer.remove
trainer.callbacks.wandb.enabled trainer.callbacks.wandb.group trainer.callbacks.wandb.notes
trainer.callbacks.wandb.tags trainer.checkpointer use_bias_in_attn_linear use_bias_in_mlp use_bias_in_norms
use_bnb_optimizer use_cache use_checkpoint_lr_scheduler use_comet use_fast_tokenizer use_flashattn_swiglu
use_gigatoken use_gloo_process_groups use_legacy_static_engine use_mp_args_from_checkpoint_args use_nccl_ub
use_old_brrr_dataloader use_one_sent_docs use_precision_aware_optimizer use_ring_exchange_p2p
use_same_sampling_seed_across_dp_ranks use_shared_fs use_sharp use_tokenizer_model_from_checkpoint_args
use_torch_optimizer_for_cpu_offload use_tp_pp_dp_mapping user_script valid_data_weights valid_label_data_paths
valid_reward_data_paths validation.local_batch_size validation.seq_len validation_set_names verify_integrity
visualize_memory_budget_pareto wall_clock_breakdown wandb_group wandb_host wandb_init_all_ranks wandb_save_dir
warmup_min_lr wd_incr_steps weight_by_num_documents weight_decay_exclude_named_params weight_decay_incr_style
weighted_sampler_alpha wgrad_deferral_limit window_attn_skip_freq work_dir world_size
yarn_correction_range_round_to_int z_loss_enabled zero_allgather_bucket_size zero_contiguous_gradients
zero_optimization zero_reduce_bucket_size zero_reduce_scatter
"""
SENTENCES = {
    beginning: sentence for sentence, beginnings in _BEGINNINGS.items() for beginning in beginnings.split()
}
_OF_OWN_SETTINGS = frozenset((
    "profile", "log_", "logging_", "wandb_", "dataset_", "tokenizer_", "tensorboard_", "zero_", "hybrid_", "te_",
    "trainer.callbacks.wandb.", "data_loader.",
))  # because: settings of lmtrain begin so as well, and other names of them may  # fmt: skip
_WITH_COUNTERPART = {name for names in FOREIGN_NAMES.values() for name in names.split()}
NAMES = frozenset(_NAMES.split())
_ENVIRONMENT = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|RANK|LMTRAIN\w*|PYTHONPATH|HOME|PATH|TMPDIR|COLUMNS")


def is_environment_variable(key: str) -> bool:
    """Return whether a key is written as environment variables are, such as NCCL_DEBUG, and is no setting's name in
    capitals.
    """
    return bool(_ENVIRONMENT.fullmatch(key)) and key.lower() not in _WITH_COUNTERPART


def sentence_about_variable(word: str) -> str:
    """Return what to do with the word NAME=VALUE of an environment variable."""
    return f"It is an environment variable, which stands before the command: {word} lmtrain ..."


def sentence_about(path: str) -> str | None:
    """Return why lmtrain lacks another tool's setting, a dotted name in snake case, or that it needs none; None if it
    has a counterpart, or is not known.
    """
    name = path.rpartition(".")[2]
    if sentence := UNSUPPORTED_SETTINGS.get(path) or UNSUPPORTED_SETTINGS.get(name):
        return sentence
    if name in _WITH_COUNTERPART:
        return None
    is_listed = name in NAMES or path in NAMES
    for text in dict.fromkeys((path, name)):
        for beginning, sentence in SENTENCES.items():
            if text.startswith(beginning) and (is_listed or beginning not in _OF_OWN_SETTINGS):
                return sentence
    return (idea_of(path) or NOTHING_LIKE_IT) if is_listed else None
