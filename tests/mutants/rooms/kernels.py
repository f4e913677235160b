"""Mistakes in lmtrain/kernels: last chunks, addresses, and rows that hold nothing but padding."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="row_of_nothing_but_padding_is_nan",
        file="lmtrain/kernels/cross_entropy.py",
        function="_chunk_statistics",
        old="top_N = logits_NV.amax(-1).clamp(min=torch.finfo(logits_NV.dtype).min)",
        new="top_N = logits_NV.amax(-1)",
        breaks="A tensor-parallel rank whose rows of the vocabulary are all padding makes the loss nan on all ranks.",
        only_for="tp that leaves a rank without a true token, as a small vocabulary over many ranks does",
    ),
    Mutant(
        name="last_partial_chunk_of_rows_is_left_out",
        file="lmtrain/kernels/cross_entropy.py",
        function="row_chunks",
        old="for start in range(0, max(1, num_rows), step))",
        new="for start in range(0, max(1, num_rows - num_rows % step), step))",
        breaks="The last rows of a microbatch have no part in the loss, and their gradient is whatever lay in memory.",
        only_for="microbatches of more than 64M logits whose rows are no multiple of a chunk's, on a CPU",
    ),
    Mutant(
        name="bias_gradient_forgets_the_last_rows",
        file="lmtrain/kernels/triton_activations.py",
        function="backward",
        old="triton.cdiv(num_rows, ROWS_OF_A_SUM)",
        new="max(1, num_rows // ROWS_OF_A_SUM)",
        breaks="Gradients of the last tokens are never written and the bias's gradient misses them.",
        only_for="GPUs, with more than 64 tokens in a microbatch that are no multiple of 64",
    ),
    Mutant(
        name="address_of_a_logit_overflows",
        file="lmtrain/kernels/triton_cross_entropy.py",
        function="_cross_entropy_gradient",
        old="row = tl.program_id(0).to(tl.int64)",
        new="row = tl.program_id(0)",
        breaks="The place of a logit is worked out in 32 bits, so gradients of the last rows are written over other "
        "memory.",
        only_for="GPUs, with more than 2**31 logits in a microbatch",
    ),
]
