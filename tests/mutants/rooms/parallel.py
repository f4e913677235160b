"""Mistakes in lmtrain/parallel, and in the average of the weights: wrong groups, sums, noise, ties, stage borders."""

from tests.mutants.mutant import Mutant

MUTANTS = [
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
        name="a_norm_over_all_heads_takes_a_ranks_mean",
        file="lmtrain/parallel/tensor_parallel.py",
        function="SplitWholeNorm.forward",
        old="sum_of_parts_and_gradients(exact_BTN.square().sum(-1, keepdim=True), self.axis)",
        new="exact_BTN.square().sum(-1, keepdim=True) * self.axis.size",
        breaks="Each rank divides its queries by their own size: the model is another at every tp.",
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
        name="the_average_begins_at_zero",
        file="lmtrain/train/exponential_weight_average.py",
        function="begin",
        old="average.copy_(self.weights.master[name])",
        new="average.zero_()",
        breaks="For thousands of steps the average is far smaller than the weights, and predicts nothing.",
        only_for="runs with checkpoint.ema",
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
