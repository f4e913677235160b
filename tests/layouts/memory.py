"""What lies in memory: storages by kind between two microbatches.

Runs in workers. Storages and not tensors are counted: views share, and FSDP frees by shrinking a storage to nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lmtrain.batch import Batch
from lmtrain.parallel.parallel_model import ParallelModel

# because: losses and their scale are single numbers, and no weight is that small
SMALLEST_BYTES = 64


def storages(tensors: Iterator[Tensor]) -> dict[int, tuple[int, torch.dtype]]:
    """Address of each distinct storage -> its bytes and what its first tensor takes them for."""
    found: dict[int, tuple[int, torch.dtype]] = {}
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), (storage.nbytes(), local.dtype))
    return found


def living_tensors() -> Iterator[Tensor]:
    """Every tensor that Python can reach, gradients included."""
    gc.collect()
    # because: a compiler leaves tensors of other types behind, which have no memory
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter, DTensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return iter([tensor for tensor in tensors if tensor.device.type == "cpu"])


def weight_bytes(model: ParallelModel, optimizer: torch.optim.Optimizer, before: set[int]) -> dict[str, int]:
    """Bytes by kind, of what has come since `before`. Work and gradients are told apart by dtype: use bf16."""
    # because: a thread of gloo's may still be letting go of what it has sent; a second look a moment later is right
    looks = [_look(model, optimizer, before) for _ in range(3)]
    return {kind: min(look[kind] for look in looks) for kind in looks[0]}


def _look(model: ParallelModel, optimizer: torch.optim.Optimizer, before: set[int]) -> dict[str, int]:
    masters = storages(iter(model.parameters.values()))
    slots = storages(t for state in optimizer.state.values() for t in state.values() if t.ndim)
    rest = storages(living_tensors())
    before = before | storages(on_their_way(model)).keys()
    rest = {at: (n, dtype) for at, (n, dtype) in rest.items() if at not in before | masters.keys() | slots.keys()}
    return {
        "masters": sum(n for n, _ in masters.values()),
        "optimizer": sum(n for n, _ in slots.values()),
        "work": sum(n for n, dtype in rest.values() if dtype is torch.bfloat16),
        "gradients": sum(n for n, dtype in rest.values() if dtype is torch.float32 and n >= SMALLEST_BYTES),
    }


def on_their_way(model: ParallelModel) -> Iterator[Tensor]:
    """What FSDP keeps of its newest reduction until the next one: a buffer, which the planner counts as such."""
    for stage in model.stages.values():
        if isinstance(stage, FSDPModule):
            found = stage._get_fsdp_state()._comm_ctx
            # because: torch 2.11 keeps one, 2.13 a list
            for one in getattr(found, "reduce_scatter_states", None) or [getattr(found, "reduce_scatter_state", None)]:
                if one is not None:
                    yield one.reduce_scatter_input


class Between(list[Batch]):
    """Microbatches that look at memory when the second one is asked for."""

    def __init__(self, batches: list[Batch], look: Callable[[], None]) -> None:
        super().__init__(batches)
        self.look = look

    def __getitem__(self, index: Any) -> Any:
        if index == 1:
            self.look()
        return super().__getitem__(index)
