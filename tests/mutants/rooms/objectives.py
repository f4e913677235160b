"""Mistakes in lmtrain/objectives: labels that are none, cuts of a batch, and sums that lose digits."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="missing_masked_labels_are_token_0",
        file="lmtrain/objectives/objective.py",
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
        file="lmtrain/objectives/objective.py",
        function="MaskedLM.prepare_batch",
        old="label_shards = [labels.flatten() for labels in batch.labels_BT.chunk(self.num_shards, dim=1)]",
        new="label_shards = list(batch.labels_BT.flatten().chunk(self.num_shards))",
        breaks="A rank scores hidden states of its cut of the sequence against labels of other rows and positions.",
        only_for="masked models whose sequence is cut over tp, with more than one sample in a microbatch",
    ),
    Mutant(
        name="ignored_labels_can_be_hits",
        file="lmtrain/objectives/cross_entropy.py",
        function="count_hits",
        old="((label_N == logits_NV.amax(-1)) & (labels_N != IGNORED)).sum()",
        new="(label_N == logits_NV.amax(-1)).sum()",
        breaks="Where token 0 is the most likely one a position without a label counts as a hit, so the accuracy of "
        "validation is too high.",
        only_for="batches with ignored labels at positions where token 0 scores highest, without tensor parallelism",
    ),
    Mutant(
        name="loss_is_summed_in_the_dtype_of_logits",
        file="lmtrain/objectives/cross_entropy.py",
        function="_CrossEntropySum.forward",
        old="""\
        total = torch.zeros((), dtype=sum_dtype(logits_NV), device=logits_NV.device)
        for rows in row_chunks(logits_NV):
            log_p = F.log_softmax(logits_NV[rows], dim=-1, dtype=total.dtype)
            total = total + F.nll_loss(log_p, labels_N[rows], ignore_index=IGNORED, reduction="sum")
        return total
""",
        new="""\
        total = torch.zeros((), dtype=logits_NV.dtype, device=logits_NV.device)
        for rows in row_chunks(logits_NV):
            log_p = F.log_softmax(logits_NV[rows], dim=-1, dtype=total.dtype)
            total = total + F.nll_loss(log_p, labels_N[rows], ignore_index=IGNORED, reduction="sum")
        return total.to(sum_dtype(logits_NV))
""",
        breaks="The loss that is logged is a sum in bf16 or fp16, right to two or three digits, or inf in fp16; the "
        "gradients are right.",
        only_for="half precision where no kernel makes the loss, on one tensor-parallel rank (CPU)",
    ),
]
