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
        name="a_stage_counts_its_layers_from_the_first",
        file="lmtrain/models/block_stack.py",
        function="Stack.block_contexts",
        old="kinds = {name: all_kinds[int(name)] for name in self.blocks}",
        new="kinds = dict(zip(self.blocks, all_kinds, strict=False))",
        breaks="Layers of later stages have the windows and angles of others: another layout is another model.",
        only_for="model.layer_pattern in a pipeline whose stages are no whole periods",
    ),
]
