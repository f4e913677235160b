"""Where this room's kernels run: on a GPU where Triton is installed, which torch for CUDA brings.

`fuses` is asked by models, objectives and parallel before they take the fused way; `runs_kernel` by the functions of
this room, whose twins do the same on any tensor. Whoever imports Triton has asked here first.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

FUSES_ON = {"cuda"}
HAS_TRITON = find_spec("triton") is not None
_KNOWN = (torch.float32, torch.bfloat16, torch.float16)


def fuses(device: torch.device) -> bool:
    return device.type in FUSES_ON and (HAS_TRITON or device.type != "cuda")


def runs_kernel(tensor: Tensor) -> bool:
    """Return whether a Triton kernel runs for a tensor; none can be launched for an empty one."""
    return tensor.is_cuda and tensor.numel() > 0 and HAS_TRITON and tensor.dtype in _KNOWN
