"""Mistakes in lmtrain/parallel, and in the average of the weights: wrong groups, sums, noise, ties, stage borders."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="norm_counts_copied_keys_for_each_rank",
        file="lmtrain/parallel/weights/reduce_and_clip_gradients.py",
        function="gradient_norm",
        old="append(gradient[: place.counted_rows])",
        new="append(gradient)",
        breaks="Keys and values of which ranks hold copies count once for each copy, so the norm is too large and "
        "gradients are clipped too hard.",
        only_for="tensor parallelism over more ranks than heads of keys and values",
    ),
    Mutant(
        name="lamb_counts_copied_keys_for_each_rank",
        file="lmtrain/parallel/weights/gather_weights_for_optimizer.py",
        function="ShardedTensors.counted",
        old="shard[: self.placements[name].counted_rows]",
        new="shard",
        breaks="LAMB scales the step of queries, keys and values to norms in which copies count several times.",
        only_for="LAMB with tensor parallelism over more ranks than heads of keys and values",
    ),
    Mutant(
        name="muon_takes_copied_keys_several_times",
        file="lmtrain/parallel/weights/gather_weights_for_optimizer.py",
        function="ShardedTensors.gather_sections",
        old="torch.cat(parts[::num_sharing])",
        new="torch.cat(parts[: len(parts) // num_sharing])",
        breaks="Muon orthogonalises the first heads of keys and values several times and the last ones never.",
        only_for="Muon with tensor parallelism over more ranks than heads of keys and values, of which there are two",
    ),
    Mutant(
        name="norm_counts_tied_copy_twice",
        file="lmtrain/parallel/weights/reduce_and_clip_gradients.py",
        function="gradient_norm",
        old="if not is_copy(name, place := placements[name]):",
        new="if not is_copy(placements[name].name, place := placements[name]):",
        breaks="The gradient norm counts the embedding's gradient once for each stage that holds a copy of it, "
        "so the logged norm is too large and gradients are clipped too hard.",
        only_for="pipelines of models whose head is tied to the embedding",
    ),
    Mutant(
        name="clip_compares_scaled_norm",
        file="lmtrain/parallel/weights/reduce_and_clip_gradients.py",
        function="clip_factor",
        old="(clip_norm / (norm / loss_scale + 1e-6))",
        new="(clip_norm / (norm + 1e-6))",
        breaks="The norm of scaled gradients is held against clip_norm, so nearly every step is clipped by about the "
        "loss scale and gradients become thousands of times too small.",
        only_for="fp16 with clipping, whose loss scale is not 1",
    ),
    Mutant(
        name="loss_scale_forgets_its_good_steps",
        file="lmtrain/parallel/weights/master_weights.py",
        function="LossScale.load",
        old='int(state["good_steps"])',
        new="0",
        breaks="A resumed run counts steps without overflow from 0 again, so the loss scale doubles at another step "
        "than in a run that was never stopped, and the two are no longer the same bit for bit.",
        only_for="fp16 runs that are resumed between two doublings of the scale",
    ),
    Mutant(
        name="dropout_noise_shared_by_copies",
        file="lmtrain/parallel/blocks/dropout_random_numbers.py",
        function="DropoutSeeds.seed_forward",
        old="microbatch * self.dp.size + self.dp.index",
        new="microbatch + self.dp.index",
        breaks="The second microbatch of one copy and the first of the next drop the same activations, and a layout "
        "with copies draws other masks than one process with all the microbatches.",
        only_for="dropout with data-parallel copies and several microbatches a step",
    ),
    Mutant(
        name="recompute_draws_for_the_newest_microbatch",
        file="lmtrain/parallel/blocks/dropout_random_numbers.py",
        function="DropoutSeeds.contexts",
        old="return nullcontext(), self.use_microbatch(self.current)",
        new="return nullcontext(), nullcontext()",
        breaks="What backward computes again drops other attention scores than forward did, those of the microbatch "
        "that was entered last, and gradients are wrong without a word.",
        only_for="recompute and dropout with tp > 1, sequence_parallel=false and a pipeline with several in flight",
    ),
    Mutant(
        name="recompute_keeps_no_generator_with_sequence_cut",
        file="lmtrain/parallel/blocks/recompute_and_compile.py",
        function="_checkpoint_options",
        old='{"preserve_rng_state": dropout_seeds.uses_dropout}',
        new='{"preserve_rng_state": dropout_seeds.uses_dropout and not dropout_seeds.varies_by_rank}',
        breaks="Backward computes activations again with other dropout masks than forward had, so gradients belong to "
        "a function that nobody evaluated.",
        only_for="recompute with dropout where the sequence is cut over tp",
    ),
    Mutant(
        name="recomputed_blocks_count_from_the_stage",
        file="lmtrain/parallel/blocks/recompute_and_compile.py",
        function="apply_recompute",
        old="for number, block in model.blocks.items() if settings.is_for(int(number))]",
        new="for number, block in enumerate(model.blocks.values()) if settings.is_for(number)]",
        breaks="recompute.blocks=4 recomputes the first four blocks of every stage and not of the model, so steps take "
        "longer than planned and the memory is another one.",
        only_for="pipelines with recompute.blocks set",
    ),
    Mutant(
        name="tied_sums_end_with_the_first_step",
        file="lmtrain/parallel/weights/reduce_and_clip_gradients.py",
        function="TiedSums.wait",
        old="self.in_flight.clear()",
        new="self.complete.clear()",
        breaks="From the second step on gradients of the embedding and of its copy in the head are no longer summed, "
        "and the two weights drift apart.",
        only_for="pipelines of models whose head is tied to the embedding, from their second step on",
    ),
    Mutant(
        name="copy_of_a_tied_weight_is_drawn_by_its_own_name",
        file="lmtrain/parallel/initialize_and_save_shards.py",
        function="draw_initial_values",
        old="draw_parameter(placements[n].name, placements[n].global_shape, starts[n], seed)",
        new="draw_parameter(n, placements[n].global_shape, starts[n], seed)",
        breaks="The head's copy of a tied weight starts with other numbers than the embedding, and as both move alike "
        "they are never equal, while the checkpoint holds one of them.",
        only_for="pipelines of models whose head is tied to the embedding, in runs that start from first weights",
    ),
    Mutant(
        name="folded_tie_is_summed_on_one_side",
        file="lmtrain/parallel/weights/reduce_and_clip_gradients.py",
        function="sum_tied_gradients",
        old="second.copy_(first.add_(second))",
        new="first.add_(second)",
        breaks="The head's copy of a tied weight is updated by its own gradient alone, so it drifts away from the "
        "embedding while the checkpoint holds the embedding only.",
        only_for="zb_v, and whatever else has the first and the last stage on one rank, with a tied head",
    ),
    Mutant(
        name="row_bias_gets_the_whole_sequence_on_every_rank",
        file="lmtrain/parallel/tp_linears_and_collectives.py",
        function="_RowLinear.backward",
        old="""\
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        _wait(gathering, ctx.axis, parts)
        whole = _merge_sequence(parts, ctx.axis) if ctx.sequence_parallel else grad
""",
        new="""\
        _wait(gathering, ctx.axis, parts)
        whole = _merge_sequence(parts, ctx.axis) if ctx.sequence_parallel else grad
        grad_bias = whole.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
""",
        breaks="Biases of the second linears get tp times their gradient, since each rank sums the whole sequence and "
        "the ranks' sums are added up once more after backward.",
        only_for="sequence parallelism in models with biases",
    ),
    Mutant(
        name="pair_head_learns_from_every_cut",
        file="lmtrain/parallel/tp_linears_and_collectives.py",
        function="_BroadcastFromFirst.backward",
        old="return grads[0] if ctx.is_first else torch.zeros_like(grads[0]), None",
        new="return grads[0], None",
        breaks="The pair head's gradient also comes from the first tokens of the other ranks' cuts of the sequence, "
        "which have nothing to do with the answer.",
        only_for="BERT with pairs where the sequence is cut over tp",
    ),
    Mutant(
        name="padding_of_a_cut_vocabulary_begins_too_late",
        file="lmtrain/parallel/tensor_parallel.py",
        function="VocabHead._padded_bias",
        old="self.vocab_size - self.axis.index * self.weight.shape[0]",
        new="self.vocab_size - self.axis.index * self.vocab_size // self.axis.size",
        breaks="Some rows that pad the vocabulary score like tokens, so the loss is too high and padding gets "
        "gradients.",
        only_for="tp > 1 with a vocabulary that is padded",
    ),
    Mutant(
        name="ranks_write_the_losses_of_samples_in_one_place",
        file="lmtrain/parallel/parallel_model.py",
        function="ParallelModel._with_sample_sums",
        old="first, end = dp.index * num_samples, dp.size * num_samples",
        new="first, end = 0, dp.size * num_samples",
        breaks="The losses of all ranks' samples are added up as if they were the first rank's, so each source gets a "
        "part of the others' losses.",
        only_for="blends with several data-parallel ranks; the loss of the step is right",
    ),
    Mutant(
        name="dropout_stays_off_after_an_evaluation",
        file="lmtrain/parallel/parallel_model.py",
        function="ParallelModel.forward_backward",
        old="""\
        self.set_training_mode(True)
        self.tied_sums.wait()""",
        new="        self.tied_sums.wait()",
        breaks="After the first evaluation on tasks the model stays in evaluation mode, so the rest of the run trains "
        "without dropout.",
        only_for="runs with dropout that evaluate on tasks while they train",
    ),
    Mutant(
        name="muon_cuts_fused_rows_as_one_matrix",
        file="lmtrain/parallel/weights/gather_weights_for_optimizer.py",
        function="ShardedTensors.local_shard",
        old="                part = torch.cat([\n"
        "                    torch.split(section, rows)[tp.index // num_sharing]\n"
        "                    for section, (rows, num_sharing) in zip(sections, held, strict=True)\n"
        "                ])",
        new="                part = torch.cat(sections).chunk(tp.size)[tp.index]",
        breaks="Queries, keys and values, or gate and up, of a rank are moved by rows of the update that belong to "
        "another section or another rank.",
        only_for="Muon with tensor parallelism: the fused query-key-value matrix and SwiGLU's",
    ),
    Mutant(
        name="whole_copies_train_apart",
        file="lmtrain/parallel/build_parallel_model.py",
        function="build_parallel",
        old="shards = (mesh.dp if training else mesh.dp_shard).size > 1 or always_shard",
        new="shards = mesh.dp_shard.size > 1 or always_shard",
        breaks="Copies of the model never sum their gradients: each trains on its own samples and the checkpoint is a "
        "mixture of them.",
        only_for="dp_replicate > 1 with dp_shard=1",
    ),
    Mutant(
        name="histograms_of_the_first_stages_alone",
        file="lmtrain/train/record/metrics_writer.py",
        function="build_histograms",
        old="all_reduce(tensor, model.mesh.world, op,",
        new="all_reduce(tensor, model.mesh.plane, op,",
        breaks="Histograms of weights and gradients of all stages but the writing rank's own are missing.",
        only_for="pipelines",
    ),
    Mutant(
        name="gradients_are_reduced_in_half_precision",
        file="lmtrain/parallel/weights/fsdp_sharding.py",
        function="apply_data_parallel",
        old="MixedPrecisionPolicy(work_dtype, torch.float32, cast_forward_inputs=False)",
        new="MixedPrecisionPolicy(work_dtype, work_dtype, cast_forward_inputs=False)",
        breaks="Gradients are added up over microbatches and over copies in bf16 or fp16 and lose what is small.",
        only_for="half precision with data parallelism",
    ),
    Mutant(
        name="stages_agree_on_the_first_message_alone",
        file="lmtrain/parallel/pipeline/stage_to_stage_messages.py",
        function="Inbox._check_header",
        old="if sent_header != self.header:",
        new="if sent_header.shape != self.header.shape:",
        breaks="Stages that have been given different batches are not refused with a LayoutError but wait for ever, or "
        "read messages of another size.",
        only_for="stages that disagree about the number, the later shapes or the dtype of messages",
    ),
    Mutant(
        name="refused_batches_are_put_to_the_wrong_rank",
        file="lmtrain/parallel/pipeline/stage_to_stage_messages.py",
        function="Inbox._check_header",
        old="{sent_header}{others}, and rank {dist.get_rank()} expects {self.header}.",
        new="{self.header}{others}, and rank {dist.get_rank()} expects {sent_header}.",
        breaks="The message on stages with different batches says of each rank what the other one has.",
        only_for="stages that disagree about a batch",
    ),
    Mutant(
        name="pipeline_forgets_the_loss_scale",
        file="lmtrain/parallel/pipeline/execute_schedule.py",
        function="Pipeline.train",
        old="in_flight[key] = StageTensors(hidden, _scaled_loss(out, loss_scale))",
        new="in_flight[key] = StageTensors(hidden, out.sum())",
        breaks="The loss is not multiplied by its scale but gradients are divided by it, so they and their norm are "
        "65,536 times too small.",
        only_for="fp16 in a pipeline",
    ),
    Mutant(
        name="rank_with_the_greatest_checksum_goes_on",
        file="lmtrain/runtime/processes/succeed_on_all_ranks_or_none.py",
        function="all_equal",
        old="all(each == number for",
        new="all(each <= number for",
        breaks="Of ranks that are to score different texts the one with the greatest checksum does not stop: it waits "
        "for the others, which have raised RanksDifferError, until the time-out.",
        only_for="ranks that differ, on the one with the greatest checksum",
    ),
    Mutant(
        name="a_norm_over_all_heads_takes_a_ranks_mean",
        file="lmtrain/parallel/tensor_parallel.py",
        function="SplitWholeNorm.forward",
        old="sum_of_parts_and_gradients(exact_BTN.square().sum(-1, keepdim=True), self.axis)",
        new="exact_BTN.square().sum(-1, keepdim=True) * self.axis.size",
        breaks="Each rank divides its queries by their own size: the model is another at every tp.",
        only_for="model.qk_norm=whole with tensor parallelism",
    ),
    Mutant(
        name="a_norm_over_all_heads_is_alone_in_backward",
        file="lmtrain/parallel/tp_linears_and_collectives.py",
        function="_SumOfPartsAndGradients.backward",
        old="return _output_with_bias(all_reduce(grads[0].clone(), ctx.axis)), None",
        new="return grads[0], None",
        breaks="The first loss is right and gradients are not: what a rank's queries do to the norm of others is lost.",
        only_for="model.qk_norm=whole with tensor parallelism",
    ),
    Mutant(
        name="a_heads_bias_is_lost_with_its_padding",
        file="lmtrain/parallel/tensor_parallel.py",
        function="VocabHead._padded_bias",
        old="padded_bias(self.weight, self.bias, self",
        new="padded_bias(self.weight, None, self",
        breaks="The bias of a head whose vocabulary is split is neither added nor trained.",
        only_for="heads with a bias and tensor parallelism",
    ),
    Mutant(
        name="the_average_keeps_what_it_should_give_up",
        file="lmtrain/train/exponential_weight_average.py",
        function="update",
        old="1 - self.settings.decay",
        new="self.settings.decay",
        breaks="With a decay of 0.999 the average is, but for a thousandth, the weights of the last step.",
        only_for="runs with checkpoint.ema",
    ),
    Mutant(
        name="the_average_begins_at_zero",
        file="lmtrain/train/exponential_weight_average.py",
        function="begin",
        old="average.copy_(self.weights.master[name])",
        new="average.zero_()",
        breaks="For thousands of steps the average is far smaller than the weights, and predicts nothing.",
        only_for="runs with checkpoint.ema",
    ),
    Mutant(
        name="the_average_stays_in_place_of_the_weights",
        file="lmtrain/train/exponential_weight_average.py",
        function="in_place_of_weights",
        old=(
            "            for name in exchanged:\n"
            "                self._exchange(name)\n"
            "            self.weights.publish()\n"
        ),
        new="            self.weights.publish()\n",
        breaks="Training goes on from the average after each validation, and averages the weights before it.",
        only_for="runs with checkpoint.ema that validate",
    ),
    Mutant(
        name="half_precision_computes_with_the_weights_while_the_average_is_measured",
        file="lmtrain/train/exponential_weight_average.py",
        function="in_place_of_weights",
        old="            self.weights.publish()\n            yield\n",
        new="            yield\n",
        breaks="The measures of the average are those of the weights, whose half-precision copies stay.",
        only_for="runs with checkpoint.ema in bf16 or fp16",
    ),
    Mutant(
        name="the_steps_of_an_average_count_from_its_beginning",
        file="lmtrain/train/exponential_weight_average.py",
        function="update",
        old="step % self.settings.every_steps == 0",
        new="(step - self.since_step) % self.settings.every_steps == 0",
        breaks="An average that begins at a step of its own is updated at other steps than the settings say.",
        only_for="runs with checkpoint.ema.every_steps above 1 and a from_step that is no multiple of it",
    ),
]
