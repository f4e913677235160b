"""LAMB (You et al. 2020): Adam's direction with each matrix's step scaled to the matrix's norm. For large batches.

Train imports this module by the settings' `kind` and calls `build`. Steps on shards: the norms of all matrices are
summed over shards in a single collective per step. Biases and norms take Adam's step unscaled, as in the authors' code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmtrain.kernels.vector_norms import vector_norms
from lmtrain.optim.adam_update_direction import SLOTS, UncompiledOptimizer, adam_directions, groups_with_gradients
from lmtrain.optim.interface_to_whole_weights import LocalTensors, WholeTensors
from lmtrain.optim.lamb_settings import LAMBSettings
from lmtrain.optim.parameter_groups import Groups


def build(settings: LAMBSettings, groups: Groups, whole: WholeTensors = LocalTensors()) -> LAMB:
    """Build LAMB. `whole` sums norms over the shards of a matrix."""
    return LAMB(settings, groups, whole)


class _GroupUpdate(NamedTuple):
    """A parameter group with its parameters that have a gradient, and the direction of each in this step."""

    group: dict[str, Any]
    names: list[str]
    parameters: list[Tensor]
    directions: list[Tensor]


class LAMB(UncompiledOptimizer):
    """The LAMB optimizer. Groups of matrices are scaled by weight norms; groups of biases and norms are not."""

    def __init__(self, settings: LAMBSettings, groups: Groups, whole: WholeTensors) -> None:
        adapted = [{**group, "slots": SLOTS, "adapted": min(p.ndim for p in group["params"]) >= 2} for group in groups]
        super().__init__(adapted, {"lr": settings.lr})
        self.settings, self.whole = settings, whole

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        updates = [self._group_update(*each) for each in groups_with_gradients(self)]
        self._scale_to_weight_norms([update for update in updates if update.group["adapted"]])
        for update in updates:
            torch._foreach_add_(update.parameters, update.directions, alpha=-update.group["lr"])

    def _group_update(self, group: dict[str, Any], names: list[str], parameters: list[Tensor]) -> _GroupUpdate:
        """Update Adam's running averages of these parameters of a group. Return the parameters with LAMB's direction
        for each, still to be scaled: Adam's direction plus weight decay times the weight.
        """
        directions = adam_directions(self, parameters, betas=self.settings.betas, eps=self.settings.eps)
        if group["weight_decay"]:
            torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
        return _GroupUpdate(group, names, parameters, directions)

    def _scale_to_weight_norms(self, updates: list[_GroupUpdate]) -> None:
        """Multiply each direction in `updates`, in place, by |weight| / |direction|, norms over all shards of a weight.
        If either norm is 0, as for new zero weights, the direction is left unchanged. Collective: every process must
        call it, with the same matrices in the same order.
        """
        if not updates:
            return
        names = [name for update in updates for name in update.names]
        directions = [u for update in updates for u in update.directions]
        weights = [w for update in updates for w in update.parameters]
        counted = [list(map(self.whole.counted, names, tensors)) for tensors in (weights, directions)]
        norms = list(map(vector_norms, counted))
        # collective: sums squared norms over all shards of each matrix, once per step
        w_P, u_P = self.whole.sum_over_shards(names, torch.stack(norms, dim=1).square()).sqrt().unbind(dim=1)
        ratio_P = torch.where((w_P > 0) & (u_P > 0), w_P / u_P, 1.0)
        torch._foreach_mul_(directions, ratio_P.unbind())
