"""A GPT cut over all ranks of the world beside the uncut one, with the same weights: what the tests here compare.

Which rows a rank holds is worked out here by hand, so that a mistake in the product's own tables cannot hide.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmtrain.batch import IGNORED, Batch
from lmtrain.models import gpt
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.initial_weights import apply_ties
from lmtrain.parallel.mesh import Axis
from lmtrain.parallel.tensor_parallel import apply_tensor_parallel, cross_entropy_sum
from lmtrain.spec import Cut, Split

GPT2 = {
    "num_layers": 2, "width": 24, "num_heads": 12, "ffn_width": 36, "vocab_size": 13, "vocab_multiple": 1, "seq_len": 12
}  # fmt: skip
LLAMA = GPT2 | {
    "num_heads": 24, "num_kv_heads": 12, "head_width": 4, "positions": "rotary", "norm": "rmsnorm",
    "activation": "silu", "gated": True, "bias": "none", "tied": False,
}  # fmt: skip


def world_axis() -> Axis:
    return Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


# because: torch says that any attribute of a module is a Tensor or a Module; Any spares the tests a cast a line
def uncut(settings: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    """Every weight drawn anew, biases and norms too: a zero would hide a bias that is added once a rank."""
    model = gpt.build(GPTSettings(**settings)).to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return model


def cut(settings: dict[str, Any], whole: Any, axis: Axis, *, sequence: bool) -> Any:
    with torch.device("meta"):
        model: Any = gpt.build(GPTSettings(**settings))
    apply_tensor_parallel(model, axis, sequence_parallel=sequence)
    model.to(next(whole.parameters()).dtype).to_empty(device="cpu")
    apply_ties(model)  # leaving meta makes two tensors of one
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(part(values[name], whole.cuts()[name], axis))
    return model


def part(whole: Tensor, cut: Cut, axis: Axis) -> Tensor:
    """This rank's rows or columns of a whole weight or gradient."""
    match cut.split:
        case Split.COLUMN:
            sections = torch.split(whole, list(cut.sections))
            return torch.cat([section.chunk(axis.size)[axis.index] for section in sections])
        case Split.ROW:
            return whole.chunk(axis.size, dim=1)[axis.index]
        case Split.VOCAB:
            rows = -(-len(whole) // axis.size)
            padded = torch.cat([whole, whole.new_zeros(rows * axis.size - len(whole), whole.shape[1])])
            return padded[axis.index * rows : (axis.index + 1) * rows]
    return whole


def batch_of(settings: dict[str, Any], *, documents: bool = False) -> Batch:
    length, vocab_size = settings["seq_len"], settings["vocab_size"]
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(vocab_size, (3, length), generator=generator)
    labels = torch.randint(vocab_size, (3, length), generator=generator)
    labels[0, 2:] = labels[2, 5] = IGNORED
    if not documents:
        return Batch(tokens, labels)
    start = length // 2 - 1
    at = torch.arange(length).expand(3, length)
    return Batch(tokens, labels, torch.where(at < start, at, at - start), (at >= start).to(torch.int32))


def loss_of(model: Any, batch: Batch, axis: Axis) -> Tensor:
    return partial(cross_entropy_sum, axis=axis)(model.logits(model(batch)), batch.labels_BT)


def sum_partial_gradients(model: Any, axis: Axis, *, sequence: bool) -> None:
    """Weights that are not cut but used on a cut of the sequence: what the layout's owner does once a step."""
    for name, parameter in model.named_parameters():
        if sequence and model.cuts()[name].split is Split.NONE:
            dist.all_reduce(parameter.grad, group=axis.group)


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative to the norm of what is expected; a tensor of zeros (a rank of padding) must be met exactly."""
    norm = expected.norm()
    difference = (found - expected).norm()
    return float(difference / norm if norm > 0 else difference)


class Record(TorchDispatchMode):
    """Every operator that runs inside, in order: its namespace, its short name and its arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.namespace, func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))
