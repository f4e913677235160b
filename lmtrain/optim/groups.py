"""What an optimizer is given: parameters in groups, a learning rate, memory with names, and whole weights.

Called by train; knows no optimizer in particular. An optimizer's memory is tensors with names, so that a checkpoint
holds them like weights. That works for all whose groups name their `slots`: the state tensors shaped like the
parameter. What else such an optimizer may remember is one count of updates. Names are `SLOT.PARAMETER`, as in
`exp_avg.norm.weight`.

Optimizers step on local fp32 shards and know no process. LAMB needs norms of whole weights, Muon whole matrices, out of
whatever shards a weight lies in; `parallel` hands in how to get them. Every process calls these in the same order,
whatever it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

Groups = list[dict[str, Any]]  # torch's parameter groups, with the "names" of their "params" beside them


def build_groups(parameters: Mapping[str, Tensor], weight_decay: float) -> Groups:
    """Matrices and embeddings decay, as in GPT-2; biases and norms, which have one dim, do not."""
    matrices = {name: p for name, p in parameters.items() if p.ndim >= 2}
    vectors = {name: p for name, p in parameters.items() if p.ndim < 2}
    return [group_of(part, decay) for part, decay in ((matrices, weight_decay), (vectors, 0.0)) if part]


def group_of(parameters: Mapping[str, Tensor], weight_decay: float) -> dict[str, Any]:
    return {"params": list(parameters.values()), "names": list(parameters), "weight_decay": weight_decay}


def apply_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set once a step. A group may scale it by `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


@torch.no_grad()
def apply_empty_state(optimizer: Optimizer) -> None:
    """Give every parameter the state it has before its first update, so that there is something to load into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for slot in group["slots"]:
                if slot not in state:
                    state[slot] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if "step" not in state:
                # because: a fused kernel counts on the device, the others on the host
                device = parameter.device if group.get("fused") or group.get("capturable") else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)


def state_tensors(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The live state by name, made empty where no update has happened yet; filling these tensors loads them."""
    apply_empty_state(optimizer)
    slots = {p: group["slots"] for group in optimizer.param_groups for p in group["params"]}
    return {
        f"{slot}.{name}": optimizer.state[parameter][slot]
        for name, parameter in parameters.items()
        for slot in slots.get(parameter, ())
    }


def num_updates(optimizer: Optimizer) -> int:
    """How many updates the optimizer has made; an optimizer that has made none has no state."""
    counts = {int(state["step"]) for state in optimizer.state.values() if "step" in state}  # sync: on save only
    assert len(counts) <= 1, "parameters that were not all updated together cannot be saved as one count"
    return counts.pop() if counts else 0


@torch.no_grad()
def apply_num_updates(optimizer: Optimizer, count: int) -> None:
    apply_empty_state(optimizer)
    for state in optimizer.state.values():
        state["step"].fill_(count)


class Whole(Protocol):
    def sum(self, names: Sequence[str], values_PN: Tensor) -> Tensor:
        """Row p holds sums over this process's shard of names[p]; returns those over the whole, each number once."""

    def gather(self, name: str, local: Tensor) -> list[Tensor]:
        """The whole of a tensor shaped like this shard of a matrix, as its sections: queries, keys and values apart."""

    def part(self, name: str, sections: list[Tensor]) -> Tensor:
        """This process's shard of whole sections: the way back from `gather`."""

    @property
    def sharers(self) -> int:
        """How many processes hold shards of the same weights, or copies of them."""

    @property
    def number(self) -> int:
        """This one's among them."""

    def handed(self, owner: int, tensor: Tensor) -> Tensor:
        """The tensor of the process with this number, to all of them; the others give one of its shape."""


class Alone:
    """One process holds everything. `sections` lists the rows of matrices that are several; others are one."""

    def __init__(self, sections: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self.sections = sections or {}

    def sum(self, names: Sequence[str], values_PN: Tensor) -> Tensor:
        return values_PN

    def gather(self, name: str, local: Tensor) -> list[Tensor]:
        return list(torch.split(local, list(self.sections.get(name) or local.shape[:1])))

    def part(self, name: str, sections: list[Tensor]) -> Tensor:
        return torch.cat(sections) if len(sections) > 1 else sections[0]

    sharers, number = 1, 0

    def handed(self, owner: int, tensor: Tensor) -> Tensor:
        return tensor
