"""The checks for whether this folder's kernels can run: on a GPU with Triton installed, which torch for CUDA includes.

`uses_fused_kernels` is called by models, optim and parallel before they choose the fused path, `can_run_kernel` by
this folder's functions, whose fallbacks work on any tensor. Triton is imported only after one of these checks.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

FUSED_DEVICES = {"cuda"}
HAS_TRITON = find_spec("triton") is not None
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def uses_fused_kernels(device: torch.device) -> bool:
    """Return True if fused operations should be used on this device."""
    return device.type in FUSED_DEVICES and (HAS_TRITON or device.type != "cuda")


def can_run_kernel(tensor: Tensor) -> bool:
    """Return True if a Triton kernel can process the tensor. An empty tensor cannot launch a kernel."""
    return tensor.is_cuda and tensor.numel() > 0 and HAS_TRITON and tensor.dtype in _KERNEL_DTYPES
