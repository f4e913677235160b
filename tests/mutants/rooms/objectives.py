"""Mistakes in lmtrain/models/objectives: labels that are none, cuts of a batch, and sums that lose digits."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="missing_masked_labels_are_token_0",
        file="lmtrain/models/objectives/causal_and_masked_objectives.py",
        function="MaskedLM.prepare_batch",
        old="F.pad(labels, (0, num_scored - len(labels)), value=IGNORED)",
        new="F.pad(labels, (0, num_scored - len(labels)))",
        breaks="Places that fill up the shorter cuts are scored as if token 0 had been masked there, which changes "
        "loss and gradients.",
        only_for="masked models whose sequence is cut over tp into parts with unequally many labels, or batches without"
        " a label",
    ),
    Mutant(
        name="labels_are_cut_by_rows_and_not_by_sequence",
        file="lmtrain/models/objectives/causal_and_masked_objectives.py",
        function="MaskedLM.prepare_batch",
        old="label_shards = [labels.flatten() for labels in batch.labels_BT.chunk(self.num_shards, dim=1)]",
        new="label_shards = list(batch.labels_BT.flatten().chunk(self.num_shards))",
        breaks="A rank scores hidden states of its cut of the sequence against labels of other rows and positions.",
        only_for="masked models whose sequence is cut over tp, with more than one sample in a microbatch",
    ),
    Mutant(
        name="ignored_labels_can_be_hits",
        file="lmtrain/models/objectives/cross_entropy.py",
        function="count_hits",
        old="hits_N = (label_N == logits_NV.amax(-1)) & (labels_N != IGNORED)",
        new="hits_N = label_N == logits_NV.amax(-1)",
        breaks="Where token 0 is the most likely one a position without a label counts as a hit, so the accuracy of "
        "validation is too high.",
        only_for="batches with ignored labels at positions where token 0 scores highest, without tensor parallelism",
    ),
    Mutant(
        name="loss_is_summed_in_the_dtype_of_logits",
        file="lmtrain/models/objectives/cross_entropy.py",
        function="_CrossEntropySum.forward",
        old="""\
            total = total + F.nll_loss(log_p, labels_N[rows], ignore_index=IGNORED, reduction="sum")
""",
        new="""\
            total = total + F.nll_loss(
                log_p.to(logits_NV.dtype), labels_N[rows], ignore_index=IGNORED, reduction="sum"
            ).to(total.dtype)
""",
        breaks="The loss that is logged is a sum in bf16 or fp16, right to two or three digits, or inf in fp16; the "
        "gradients are right.",
        only_for="half precision where no kernel makes the loss, on one tensor-parallel rank (CPU)",
    ),
    Mutant(
        name="losses_by_sample_reach_the_gradient",
        file="lmtrain/models/objectives/cross_entropy.py",
        function="cross_entropy_plain",
        old="F.cross_entropy(logits_NV.detach(), labels_N",
        new="F.cross_entropy(logits_NV, labels_N",
        breaks="A gradient that reaches the losses by sample, which are only recorded, changes the weights.",
        only_for="code that uses the losses by sample of the loss for a compiler in a backward pass",
    ),
    Mutant(
        name="z_loss_has_no_gradient_in_torch_operations",
        file="lmtrain/models/objectives/cross_entropy.py",
        function="_CrossEntropySum.forward",
        old="            factors.append(softmax_factor(log_sums_N, z_loss))\n",
        new="",
        breaks="The z-loss is shown and not minimised.",
        only_for="model.z_loss where no kernel makes the loss, on one tensor-parallel rank (CPU)",
    ),
    Mutant(
        name="z_loss_has_no_gradient_in_kernels",
        file="lmtrain/models/objectives/cross_entropy.py",
        function="with_z_loss",
        old="z_loss), sum_N / softmax_factor(log_sums_N, z_loss)",
        new="z_loss), sum_N",
        breaks="The z-loss is shown and not minimised.",
        only_for="model.z_loss on a GPU, or with a vocabulary that is cut over tp",
    ),
    Mutant(
        name="z_loss_of_rows_without_a_label",
        file="lmtrain/models/objectives/cross_entropy.py",
        function="append_z_loss",
        old="log_sums_N.masked_fill(ignored_N, 0.0).square()",
        new="log_sums_N.square()",
        breaks="The z-loss that is shown has the rows without a label in it; for a compiler its gradient has them, "
        "too.",
        only_for="model.z_loss with ignored labels",
    ),
]
