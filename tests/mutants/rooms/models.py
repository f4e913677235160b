"""Mistakes in lmtrain/models: masks, heads, settings that nobody reads, and a model's file."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="window_sees_one_token_more",
        file="lmtrain/models/layers/attention.py",
        function="build_mask",
        old="distance_TT < window if causal",
        new="distance_TT <= window if causal",
        breaks="A token looks back over window + 1 tokens, one more than the setting, the block masks of GPUs and "
        "other programs say.",
        only_for="models with a window where masks are of all positions: on a CPU, with dropout, in evaluation",
    ),
    Mutant(
        name="masked_grouped_queries_take_keys_in_turn",
        file="lmtrain/models/layers/attention.py",
        function="DotProduct.forward",
        old="(x.repeat_interleave(group, dim=1) for x in (k_BHTK, v_BHTK))",
        new="(x.repeat(1, group, 1, 1) for x in (k_BHTK, v_BHTK))",
        breaks="Query heads meet the keys of another group, so that with a mask the model is another one than without.",
        only_for="grouped-query attention with several keys under a mask: windows, document masks, asked positions",
    ),
    Mutant(
        name="every_stage_works_out_asked_positions_alone",
        file="lmtrain/models/block_stack.py",
        function="Stack._query_positions",
        old="if batch.is_query_BT is None or self.head is None or x_BTD",
        new="if batch.is_query_BT is None or x_BTD",
        breaks="The last block of a stage in the middle leaves zeros where nothing is asked for, and the blocks of the "
        "next stage look at these: scores of an evaluation are wrong.",
        only_for="evaluation of a pipeline where few positions are asked for",
    ),
    Mutant(
        name="parameters_without_the_gates_biases",
        file="lmtrain/models/gpt_settings.py",
        function="GPTSettings.num_parameters",
        old="shape.ffn_width * (1 + shape.gated)",
        new="shape.ffn_width",
        breaks="The number of parameters that is reported misses ffn_width numbers a layer.",
        only_for="swiglu with bias=true",
    ),
    Mutant(
        name="parameters_without_the_rows_behind_the_sequence",
        file="lmtrain/models/bert_settings.py",
        function="BertSettings.num_parameters",
        old="(vocab + self.position_rows + NUM_SEGMENTS)",
        new="(vocab + self.seq_len + NUM_SEGMENTS)",
        breaks="The number of parameters that is reported, and the room on the disk that is checked for, miss rows "
        "of the table of positions.",
        only_for="a BERT with model.num_positions above model.seq_len",
    ),
    Mutant(
        name="rotary_base_is_not_handed_on",
        file="lmtrain/models/layers/rotary.py",
        function="_frequencies",
        old="else s.rotary_base",
        new="else 10000.0",
        breaks="model.rotary_base is accepted and ignored: angles always have the base 10,000.",
        only_for="rotary models with another base than 10,000, as imported LLaMA 3 has",
    ),
    Mutant(
        name="masked_head_takes_the_blocks_activation",
        file="lmtrain/models/bert.py",
        function="Bert.__init__",
        old="s.padded_vocab_size, s.head_activation)",
        new="s.padded_vocab_size, s.activation)",
        breaks="The head of masked tokens computes the activation of the blocks and model.head_activation is ignored.",
        only_for="BERTs whose blocks have another activation than the head",
    ),
    Mutant(
        name="window_blocks_at_the_far_edge_are_whole",
        file="lmtrain/models/layers/block_masks.py",
        function="_blocks_by_distance",
        old="(nearest >= min_distance) & (furthest <= max_distance)",
        new="(nearest >= min_distance) & (nearest <= max_distance)",
        breaks="Blocks that the window's far edge crosses count as visible to everybody, so tokens look up to 127 "
        "places too far back.",
        only_for="windows smaller than the sequence, where masks are of blocks (GPUs)",
    ),
    Mutant(
        name="rmsnorm_has_torchs_own_eps",
        file="lmtrain/models/layers/norms.py",
        function="build_norm",
        old="return nn.RMSNorm(width, eps=eps, elementwise_affine",
        new="return nn.RMSNorm(width, elementwise_affine",
        breaks="model.norm_eps is ignored and the dtype's own epsilon taken, so activations differ from those of the "
        "same weights in other programs, most of all while hidden states are small.",
        only_for="rmsnorm",
    ),
    Mutant(
        name="post_norm_branches_start_small",
        file="lmtrain/models/bert_settings.py",
        function="BertSettings.branch_std",
        old='return self.init_std if self.norm_order == "post" else super().branch_std',
        new="return super().branch_std",
        breaks="The last linears of branches start at init_std / sqrt(2 x layers), which is the scheme of pre-norm "
        "models and not of the first BERT.",
        only_for="norm_order=post",
    ),
    Mutant(
        name="gpt3_is_padded_as_the_small_models",
        file="conf/model/gpt3_175b.yaml",
        function="",
        old="vocab_multiple: 1024 ",
        new="vocab_multiple: 128 ",
        breaks="The vocabulary has 50,304 rows where Megatron-LM's runs had 51,200, so plans are held against a "
        "model of another size.",
        only_for="model=gpt3_175b and the experiments that use it",
    ),
]
