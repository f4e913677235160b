"""Mistakes in lmtrain/parallel, and in the average of the weights: wrong groups, sums, noise, ties, stage borders."""

from tests.mutants.mutant import Mutant

MUTANTS = [
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
        name="the_average_begins_at_zero",
        file="lmtrain/train/exponential_weight_average.py",
        function="begin",
        old="average.copy_(self.weights.master[name])",
        new="average.zero_()",
        breaks="For thousands of steps the average is far smaller than the weights, and predicts nothing.",
        only_for="runs with checkpoint.ema",
    ),
]
