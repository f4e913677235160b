"""Mistakes in lmtrain/kernels: last rows."""

from tests.mutants.mutant import Mutant

MUTANTS = [
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
]
