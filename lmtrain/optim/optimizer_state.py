"""An optimizer's state as named tensors, so that a checkpoint stores them like weights. Called by train.

Works for every optimizer whose groups list their `slots`, the state tensors shaped like the parameter. The only other
state that such an optimizer may have is the count of updates. Names are `SLOT.PARAMETER`, as in `exp_avg.norm.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer


@torch.no_grad()
def apply_empty_state(optimizer: Optimizer) -> None:
    """Create zero state tensors and an update count of 0 for every parameter that has none yet, as before a first step,
    so that a checkpoint can be loaded into them. Existing state stays.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for slot in group["slots"]:
                if slot not in state:
                    state[slot] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if "step" not in state:
                # because: a fused kernel keeps its count on the device, the others on the host
                device = parameter.device if group.get("fused") or group.get("capturable") else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)


def state_tensors(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimizer's state tensors of the parameters in `parameters` (name -> parameter), by names such as
    `exp_avg.norm.weight`. Missing state is created as zeros. These are the optimizer's own tensors, not copies: whoever
    writes to them changes its state.
    """
    apply_empty_state(optimizer)
    slots = {p: group["slots"] for group in optimizer.param_groups for p in group["params"]}
    return {
        f"{slot}.{name}": optimizer.state[parameter][slot]
        for name, parameter in parameters.items()
        for slot in slots.get(parameter, ())
    }


def num_updates(optimizer: Optimizer) -> int:
    """Return how many steps the optimizer has made; 0 if it has no state. All of its parameters must have the same
    count.
    """
    counts = {int(state["step"]) for state in optimizer.state.values() if "step" in state}  # sync: on save only
    assert len(counts) <= 1, "parameters that were not all updated together cannot be saved as one count"
    return counts.pop() if counts else 0


@torch.no_grad()
def apply_num_updates(optimizer: Optimizer, count: int) -> None:
    """Set the update count of every parameter of the optimizer to `count`, as read from a checkpoint. Missing state is
    created.
    """
    apply_empty_state(optimizer)
    for state in optimizer.state.values():
        state["step"].fill_(count)
