"""Which class of work a kernel or an operator belongs to, by its name and by what it runs inside.

Called by kernels.py. The names are those of torch, cuBLAS, CUTLASS, NCCL, Triton and this project.
"""

from __future__ import annotations

import re

CLASSES = ("products", "attention", "elementwise", "norms", "collectives", "copies", "optimizer", "other")

# the first that fits counts; because: an optimizer multiplies, attention too, and NCCL copies
_PATTERNS = [
    ("optimizer", r"Optimizer\.(step|zero_grad)|_fused_adam|adamw_step|multi_tensor_apply|aten::_foreach|_fused_sgd"),
    ("collectives", r"nccl|c10d|gloo|all_?reduce|all_?gather|reduce_?scatter|barrier|record_param_comms"
                    r"|_(send|recv)\b|fsdp::"),
    ("attention", r"attention|sdpa|fmha|flash_(fwd|bwd)|pytorch_flash|ScaledDotProduct"),
    ("norms", r"(layer|rms|batch|group)_?norm|LayerNorm|RMSNorm|GammaBeta|vectorized_layer_norm|fused_norm"),
    ("products", r"gemm|gemv|cutlass|cublas|nvjet|xmma|(add|b|badd)?mm(_out)?\b|\b(add)?mm|MmBackward|BmmBackward"
                 r"|matmul|aten::linear|mkldnn.*linear|mkl_linear|splitK|convolution|ColumnLinear|RowLinear"),
    ("copies", r"memcpy|memset|aten::(copy_|clone|contiguous|_to_copy|to|cat|fill_|zero_|zeros|index_select)\b"
               r"|CatArray|FillFunctor|copy_kernel|Memset|Memcpy"),
    ("elementwise", r"elementwise|cross_entropy_(sums|gradient)|activation_(for|back)ward"
                    r"|triton_poi|triton_(red|per)|cpp_fused|aten::(add|sub|mul|div|neg|pow|exp|gelu|silu"
                    r"|sigmoid|tanh|relu|where|dropout|native_dropout|bernoulli|threshold|lerp|addcmul|sqrt|rsqrt"
                    r"|masked_fill|sin|cos|clamp|maximum|gt|lt|eq|isfinite|sum|mean)_?(_backward)?\b"
                    r"|(Add|Sub|Mul|Div|Gelu|Silu|Sigmoid|Tanh|Pow|Sum|Mean)Backward|CompiledFunction|CompiledFxGraph"),
]  # fmt: skip
_COMPILED = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _PATTERNS]
WHOLE = frozenset(("optimizer", "collectives", "attention", "norms", "products"))  # with all that they call


def class_of(name: str) -> str:
    return next((one for one, pattern in _COMPILED if pattern.search(name)), "other")
