"""First weights, each drawn by its name alone: device, order of construction and layout never matter.

Called by parallel, which gives the model its memory here too. Whoever holds a slice draws the whole, block by block,
and keeps the slice.
The numbers are those of torch's generator on the CPU, whatever the device: other generators have other numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lmtrain.spec import LanguageModel, Start

# because: torch draws normal numbers by sixteens, and the last sixteen of a tensor that is no multiple of it twice. So
# blocks of multiples of 16 rows, of which the last takes what is left over, have the numbers of the whole
_ROWS, _BLOCK_NUMBERS = 16, 8 << 20


def drawn(name: str, shape: tuple[int, ...], start: Start, seed: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the initial values of a whole parameter as blocks of rows in fp32 on the CPU, with their first row.

    True rows do not change with the padding, which is left out.
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


def apply_memory(model: nn.Module, device: torch.device) -> None:
    """Replace tensors on meta by uninitialized ones on `device`, as `to_empty` does.

    because: `to_empty` calls `empty_like` on meta, which imports sympy, a quarter of a CPU second
    """
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(module, name, nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty)


def apply_ties(model: LanguageModel) -> None:
    """Make each tie's second name the same object as its first, where this model holds both."""
    assert isinstance(model, nn.Module)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for tie in model.ties():
        if {tie.first, tie.second} <= names:
            module, _, attribute = tie.second.rpartition(".")
            setattr(model.get_submodule(module), attribute, model.get_parameter(tie.first))
