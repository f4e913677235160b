"""Mistakes in lmtrain/models: masks, heads, settings that nobody reads, and a model's file."""

from tests.mutants.mutant import Mutant

MUTANTS = [
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
        name="rows_that_pad_the_vocabulary_are_parameters",
        file="lmtrain/models/model_settings.py",
        function="ModelSettings.num_parameters",
        old="unpadded_shapes(self).values()",
        new="self.weights().values()",
        breaks="The number of parameters on every screen, and the room on the disk that is checked for, have the rows "
        "that pad the vocabulary.",
        only_for="a vocabulary that is no multiple of model.vocab_multiple",
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
        name="gpt3_is_padded_as_the_small_models",
        file="conf/model/gpt3_175b.yaml",
        function="",
        old="vocab_multiple: 1024 ",
        new="vocab_multiple: 128 ",
        breaks="The vocabulary has 50,304 rows where Megatron-LM's runs had 51,200, so plans are held against a "
        "model of another size.",
        only_for="model=gpt3_175b and the experiments that use it",
    ),
    Mutant(
        name="llama3_stretches_from_the_other_end",
        file="lmtrain/models/layers/rotary.py",
        function="_llama3",
        old="(1 - share) * slow + share * frequencies",
        new="share * slow + (1 - share) * frequencies",
        breaks="The frequencies between the slow and the fast ones are stretched the less, the slower they are.",
        only_for="model.rotary_scaling=llama3",
    ),
    Mutant(
        name="yarn_rounds_whatever_is_asked",
        file="lmtrain/models/layers/rotary.py",
        function="_yarn",
        old="    if s.rotary_rounds:\n        first, last",
        new="    if True:\n        first, last",
        breaks="model.rotary_rounds is ignored: a model that was trained without rounding has other angles.",
        only_for="model.rotary_scaling=yarn with rotary_rounds=false",
    ),
    Mutant(
        name="queries_and_keys_are_normalized_after_they_are_turned",
        file="lmtrain/models/layers/attention.py",
        function="Attention.forward",
        old="        if self.q_norm is not None and self.k_norm is not None:\n"
        "            q_BTHK, k_BTHK = self.q_norm(q_BTHK), self.k_norm(k_BTHK)\n"
        "        if rotation is not None:\n"
        "            q_BTHK, k_BTHK = rotate(q_BTHK, rotation), rotate(k_BTHK, rotation)\n",
        new="        if rotation is not None:\n"
        "            q_BTHK, k_BTHK = rotate(q_BTHK, rotation), rotate(k_BTHK, rotation)\n"
        "        if self.q_norm is not None and self.k_norm is not None:\n"
        "            q_BTHK, k_BTHK = self.q_norm(q_BTHK), self.k_norm(k_BTHK)\n",
        breaks="With equal weights, as at the start of a training, nothing changes; a trained Qwen 3 is another model.",
        only_for="model.qk_norm with rotary positions and trained weights",
    ),
    Mutant(
        name="scores_have_the_usual_scale",
        file="lmtrain/models/layers/attention.py",
        function="DotProduct.forward",
        old="scale=self.scale,",
        new="scale=None,",
        breaks="model.attention_scale is ignored.",
        only_for="model.attention_scale without model.attention_cap",
    ),
    Mutant(
        name="positions_are_scaled_with_the_tokens",
        file="lmtrain/models/layers/token_and_position_embedding.py",
        function="Embedding.forward",
        old="        if self.scale != 1.0:\n"
        "            x_BTD = x_BTD * self.scale\n"
        "        if self.position is not None:\n"
        "            x_BTD = x_BTD + self.position(positions_of(batch))\n",
        new="        if self.position is not None:\n"
        "            x_BTD = x_BTD + self.position(positions_of(batch))\n"
        "        if self.scale != 1.0:\n"
        "            x_BTD = x_BTD * self.scale\n",
        breaks="model.embedding_scale multiplies learned positions too.",
        only_for="model.embedding_scale with learned positions",
    ),
    Mutant(
        name="logits_are_capped_before_they_are_scaled",
        file="lmtrain/models/gpt.py",
        function="GPT.finish_logits",
        old="        logits = logits if s.logit_scale == 1.0 else logits * s.logit_scale\n"
        "        return logits if s.logit_cap is None else cap_logits(logits, s.logit_cap)",
        new="        logits = logits if s.logit_cap is None else cap_logits(logits, s.logit_cap)\n"
        "        return logits if s.logit_scale == 1.0 else logits * s.logit_scale",
        breaks="The largest logit is the cap times the scale.",
        only_for="model.logit_scale with model.logit_cap",
    ),
    Mutant(
        name="a_pattern_is_stretched_over_the_layers",
        file="lmtrain/models/gpt_settings.py",
        function="GPTSettings.layer_kinds",
        old="self.layer_pattern[i % len(self.layer_pattern)]",
        new="self.layer_pattern[i * len(self.layer_pattern) // self.num_layers]",
        breaks="The first layers all have a window and the last ones none.",
        only_for="model.layer_pattern with fewer letters than layers",
    ),
    Mutant(
        name="a_stage_counts_its_layers_from_the_first",
        file="lmtrain/models/block_stack.py",
        function="Stack.block_contexts",
        old="kinds = {name: all_kinds[int(name)] for name in self.blocks}",
        new="kinds = dict(zip(self.blocks, all_kinds, strict=False))",
        breaks="Layers of later stages have the windows and angles of others: another layout is another model.",
        only_for="model.layer_pattern in a pipeline whose stages are no whole periods",
    ),
    Mutant(
        name="layers_with_a_window_have_the_usual_angles",
        file="lmtrain/models/block_stack.py",
        function="Stack.block_contexts",
        old="angles = {local: self._rotation(batch, local)",
        new="angles = {local: self._rotation(batch, False)",
        breaks="model.local_rotary_base is ignored.",
        only_for="model.local_rotary_base",
    ),
    Mutant(
        name="scores_have_the_usual_scale_under_block_masks",
        file="lmtrain/models/layers/flex_attention_block_masks.py",
        function="attend_with_block_mask",
        old="score_mod, mask, scale, q_BHTK.shape",
        new="score_mod, mask, None, q_BHTK.shape",
        breaks="model.attention_scale has no effect on a GPU.",
        only_for="model.attention_scale where masks are block masks",
    ),
    Mutant(
        name="a_pattern_without_an_effect_is_accepted",
        file="lmtrain/models/gpt_settings.py",
        function="GPTSettings.unused",
        old="self.layer_pattern is not None and self.layer_kinds == replace(self, layer_pattern=None).layer_kinds",
        new="False",
        breaks="layer_pattern=f and layer_pattern=w with a window are accepted and change nothing.",
        only_for="a pattern of one letter",
    ),
]
