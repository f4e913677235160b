"""Mistakes in lmtrain/kernels: last rows."""

from tests.mutants.mutant import Mutant

MUTANTS = [
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
