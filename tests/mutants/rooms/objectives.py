"""Mistakes in lmtrain/models/objectives: labels that are none, cuts of a batch, and sums that lose digits."""

from tests.mutants.mutant import Mutant

MUTANTS = [
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
