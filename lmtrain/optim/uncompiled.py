"""The base of the optimizers here: torch's Optimizer without the wrappers that import torch's compiler.

Torch imports `torch._dynamo` when the first optimizer is made and at every step, so that a compiler does not trace
these calls. The import takes 0.4 CPU seconds in every process, and no optimizer is compiled here: models are compiled
block by block (parallel/compile).
"""

from __future__ import annotations

import inspect

import torch


class UncompiledOptimizer(torch.optim.Optimizer):
    # because: torch wraps these functions with functools.wraps, so that the function inside can be asked for; where a
    # release of torch wraps nothing, this is the function itself
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class UncompiledAdamW(UncompiledOptimizer, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


UncompiledAdamW.__name__ = "AdamW"  # because: a profile names the span of a step after the class
