"""Muon (Jordan et al. 2024): a hidden matrix moves by its orthogonalized momentum; other parameters use AdamW.

Train imports this module by the settings' `kind` and calls `build`. A hidden matrix is a matrix inside a block.
Queries, keys and values, and the two halves of SwiGLU, count as separate matrices, however they are stored.
Orthogonalization needs the whole matrix: each matrix is gathered, orthogonalized by one of the processes that share it,
broadcast, and sharded again. The processes take turns, so that each does an equal share of the work.

An orthogonal n x m matrix has entries with a root mean square of 1/sqrt(max(n, m)). Times 0.2 sqrt(max(n, m)) it moves
a weight as far as AdamW does (Liu et al. 2025), so the same learning rate and weight decay suit both.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lmtrain.optim import adam_update_direction
from lmtrain.optim.adam_update_direction import (
    UncompiledOptimizer,
    adam_directions,
    groups_with_gradients,
    increment_update_count,
)
from lmtrain.optim.interface_to_whole_weights import LocalTensors, WholeTensors
from lmtrain.optim.muon_settings import MuonSettings, is_hidden_matrix
from lmtrain.optim.parameter_groups import Groups, build_group

SLOTS = ("momentum",)
# because: Jordan's quintic brings singular values to 0.7 .. 1.2 in five rounds, and more precision does not help
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADAM_RMS = 0.2  # because: the root mean square of AdamW's usual update, measured by Liu et al. 2025


def build(settings: MuonSettings, groups: Groups, whole: WholeTensors = LocalTensors()) -> Muon:
    """Build Muon. `whole` gathers matrices from their shards, and shards them again."""
    return Muon(settings, groups, whole)


class Muon(UncompiledOptimizer):
    """The Muon optimizer. Each of `groups` is split into hidden matrices and parameters that AdamW updates."""

    def __init__(self, settings: MuonSettings, groups: Groups, whole: WholeTensors) -> None:
        split: Groups = []
        for group in groups:
            by_name = dict(zip(group["names"], group["params"], strict=True))
            for hidden, slots in ((True, SLOTS), (False, adam_update_direction.SLOTS)):
                part = {name: p for name, p in by_name.items() if is_hidden_matrix(name, p.ndim) == hidden}
                if part:
                    subgroup = build_group(part, group["weight_decay"])
                    split.append({**group, **subgroup, "hidden": hidden, "slots": slots})
        super().__init__(split, {"lr": settings.lr})
        self.settings, self.whole = settings, whole

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group, names, parameters in groups_with_gradients(self):
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            if group["hidden"]:
                self._update_hidden(group, names, parameters)
            else:
                directions = adam_directions(self, parameters, betas=self.settings.betas, eps=self.settings.eps)
                torch._foreach_add_(parameters, directions, alpha=-group["lr"])

    def _update_hidden(self, group: dict[str, Any], names: list[str], parameters: list[Tensor]) -> None:
        """Make a Muon step for the matrices in `parameters`: update their momenta with the gradients, then subtract the
        orthogonalized Nesterov momenta, times the learning rate of `group`, from the matrices. Collective, as
        `_update_matrices` is.
        """
        momentum = self.settings.momentum
        increment_update_count(self, parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        momenta = [self.state[p]["momentum"] for p in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        # Nesterov: use the momentum of the next step. Its norm is irrelevant, because the matrix is orthogonalized
        ahead = torch._foreach_lerp(gradients, momenta, momentum)
        items = list(zip(names, parameters, ahead, strict=True))
        for first in range(0, len(items), self.whole.num_sharers):
            self._update_matrices(items[first : first + self.whole.num_sharers], group["lr"])

    def _update_matrices(self, matrices: list[tuple[str, Tensor, Tensor]], lr: float) -> None:
        """Orthogonalize the momentum of each (name, parameter, momentum) in `matrices`, scale it to the size of an
        AdamW update, and subtract it, times `lr`, from the parameter. The process with index i among the sharers does
        the work for the i-th matrix, so there may be at most `num_sharers` matrices. Collective: all sharers must call
        it with the same matrices in the same order.
        """
        shapes: list[list[torch.Size]] = []
        mine: list[Tensor] = []
        for owner, (name, _, direction) in enumerate(matrices):
            # collective: this matrix's shards are gathered over the processes that share it
            sections = self.whole.gather_sections(name, direction)
            shapes.append([x.shape for x in sections])
            if owner == self.whole.sharer_index:
                mine = sections
        # because: orthogonalizing between two gathers would stall all other processes, once for each matrix
        orthogonal_sections = [orthogonalize(x, self.settings.newton_schulz_rounds) for x in mine]
        for owner, (name, parameter, direction) in enumerate(matrices):
            rows, width = [shape[0] for shape in shapes[owner]], shapes[owner][0][1]
            if owner == self.whole.sharer_index:
                whole = torch.cat(orthogonal_sections).contiguous()
            else:
                whole = direction.new_empty(sum(rows), width, dtype=_work_dtype(direction))
            # collective: broadcasts a process's matrix, without a sum, to all processes that share it
            updates = torch.split(self.whole.broadcast(owner, whole).to(direction.dtype), rows)
            parameter.add_(self.whole.local_shard(name, [scale_to_adam_rms(x) for x in updates]), alpha=-lr)


def orthogonalize(x: Tensor, rounds: int) -> Tensor:
    """Return a matrix close to U V, where x = U S V is the singular value decomposition of `x`: its singular values are
    all brought near 1 (0.7 to 1.2). `rounds` is the number of Newton-Schulz iterations. On a GPU the result is in bf16.

    The products use the shorter side of the matrix.
    """
    a, b, c = COEFFICIENTS
    y: Tensor = x.mT if x.shape[0] > x.shape[1] else x
    y = y.to(_work_dtype(x))
    y = y / (y.norm() + 1e-7)  # because: the norm bounds the largest singular value by 1; zero stays zero
    for _ in range(rounds):
        square = y @ y.mT
        y = torch.addmm(y, torch.addmm(square, square, square, beta=b, alpha=c), y, beta=a)
    return y.mT if x.shape[0] > x.shape[1] else y


def _work_dtype(x: Tensor) -> torch.dtype:
    # because: matrix products dominate the cost, and bf16 rounding is far below the 0.3 deviation of the values from 1
    return torch.bfloat16 if x.is_cuda else x.dtype


def scale_to_adam_rms(x: Tensor) -> Tensor:
    """Return the matrix scaled so that its root mean square equals that of a usual AdamW update."""
    return x * (ADAM_RMS * math.sqrt(max(x.shape)))
