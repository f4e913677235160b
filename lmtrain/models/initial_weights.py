"""Initial weights, each drawn from a seed made of its name: independent of device, construction order and layout.

Called by parallel, which also allocates the model's memory here. A rank that holds a slice draws the whole parameter,
block by block, and keeps the slice. The values are those of torch's CPU generator on every device, because other
generators produce other values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lmtrain.spec import LanguageModel, Start

# because: torch draws normal numbers in groups of 16, and redraws the last 16 of a tensor whose size is no multiple of
# 16. So blocks of multiples of 16 rows, with the remainder in the last block, have the same values as the whole
_ROWS, _BLOCK_NUMBERS = 16, 8 << 20


def draw_parameter(name: str, shape: tuple[int, ...], start: Start, seed: int) -> Iterator[tuple[int, Tensor]]:
    """Draw the initial values of the whole parameter `name` from the distribution `start`, and yield them in blocks of
    rows: (number of the block's first row, fp32 CPU tensor). They depend on the four arguments alone, not on device or
    sharding.

    Padding rows, from `start.num_rows` on, are left out.
    """
    num_rows = shape[0] if start.num_rows is None else start.num_rows
    step = _ROWS * max(1, _BLOCK_NUMBERS // (_ROWS * math.prod(shape[1:])))
    num_blocks = max(1, num_rows // step)
    own_seed = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big")
    generator = torch.Generator().manual_seed(own_seed)
    for index in range(num_blocks):
        first, last = index * step, num_rows if index == num_blocks - 1 else (index + 1) * step
        block = torch.empty((last - first, *shape[1:]), device="cpu")
        if start.std == 0.0:
            yield first, block.fill_(start.mean)
        else:
            yield first, block.normal_(start.mean, start.std, generator=generator)


def allocate_memory(model: nn.Module, device: torch.device) -> None:
    """Replace the model's parameters and buffers, in place, by uninitialized tensors on `device`, as
    `nn.Module.to_empty` does.

    because: `to_empty` calls `empty_like` on meta, which imports sympy and takes a quarter of a CPU second
    """
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(module, name, nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty)


def apply_ties(model: LanguageModel) -> None:
    """Make both names of each pair of tied parameters refer to one nn.Parameter, that of the pair's first name. Leave a
    pair alone if this pipeline stage has only one of the names.
    """
    assert isinstance(model, nn.Module)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for tie in model.ties():
        if {tie.first, tie.second} <= names:
            module, _, attribute = tie.second.rpartition(".")
            setattr(model.get_submodule(module), attribute, model.get_parameter(tie.first))
