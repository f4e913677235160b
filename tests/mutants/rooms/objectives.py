"""Mistakes in lmtrain/models/objectives: cuts of a batch, and sums that lose digits."""

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
]
