"""Mistakes in lmtrain/placement, layout, units and spec: holders, borders of what is legal, and bytes."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="head_weighs_on_the_first_stage",
        file="lmtrain/placement/layers_and_shards_of_ranks.py",
        function="layers_of_stages",
        old="for stage in range(num_stages - 1)] + [(cost_of_head, num_stages - 1)]",
        new="for stage in range(1, num_stages)] + [(cost_of_head, 0)]",
        breaks="The stage of the embedding gets fewer layers and that of the head, which is the dear one, more.",
        only_for="balance=cost in pipelines with a large vocabulary beside the width",
    ),
    Mutant(
        name="attention_flops_of_heads_as_wide_as_the_model",
        file="lmtrain/spec.py",
        function="ModelShape.flops_per_token",
        old="12 * self.num_heads * self.head_width * attended_tokens",
        new="12 * self.width * attended_tokens",
        breaks="FLOPs of attention, and with them MFU in logs and plans, are those of heads that make up the width.",
        only_for="models whose head_width is not width / num_heads",
    ),
    Mutant(
        name="norms_of_queries_keep_no_copy",
        file="lmtrain/placement/attention_activation_bytes.py",
        function="AttentionSizes.norm_bytes",
        old="if self._norm_copies else 0.0",
        new="if self._norm_copies and self.norm == 'head' else 0.0",
        breaks="Predicted activations lack the fp32 copies that a norm over all heads of queries and keys keeps.",
        only_for="qk_norm=whole in bf16 on a CPU, or over tp",
    ),
    Mutant(
        name="a_relu_is_said_to_keep_its_input",
        file="lmtrain/placement/weight_and_activation_bytes.py",
        function="ActivationSizes.mlp_bytes",
        old='if self.activation in ("relu", "relu2") else self.up',
        new='if self.activation == "relu2" else self.up',
        breaks="Predicted activations of a model with relu count a tensor that no operation keeps.",
        only_for="activation=relu without a gate on a CPU",
    ),
    Mutant(
        name="layers_with_a_window_share_the_others_mask",
        file="lmtrain/placement/weight_and_activation_bytes.py",
        function="ActivationSizes.shared_bytes",
        old="windows = {model.layer_kinds[number].window: model.layer_kinds[number] for number in recomputed}",
        new="windows = {True: model.layer_kinds[number] for number in recomputed}",
        breaks="The masks of a pattern's layers with and without a window count once, where recompute keeps both.",
        only_for="layer_pattern with recompute and documents",
    ),
]
