"""LAMB (You et al. 2020): Adam's direction with each matrix's step scaled to the matrix's norm. For large batches.

Found by train through the settings' kind. Steps on shards: the norms of all matrices are summed over shards in a single
collective per step. Biases and norms take Adam's step unscaled, as in the authors' code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmtrain.optim.groups import Groups
from lmtrain.optim.lamb_settings import LAMBSettings
from lmtrain.optim.moments import SLOTS, UncompiledOptimizer, adam_directions, with_gradients
from lmtrain.optim.state import apply_empty_state
from lmtrain.optim.whole import Alone, Whole


def build(settings: LAMBSettings, groups: Groups, whole: Whole = Alone()) -> LAMB:
    return LAMB(settings, groups, whole)


class _Move(NamedTuple):
    """A parameter group's tensors and directions in this step."""

    group: dict[str, Any]
    names: list[str]
    parameters: list[Tensor]
    directions: list[Tensor]


class LAMB(UncompiledOptimizer):
    def __init__(self, settings: LAMBSettings, groups: Groups, whole: Whole) -> None:
        adapted = [{**group, "slots": SLOTS, "adapted": min(p.ndim for p in group["params"]) >= 2} for group in groups]
        super().__init__(adapted, {"lr": settings.lr})
        self.settings, self.whole = settings, whole

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        apply_empty_state(self)
        moves = [move for move in map(self._move_of, self.param_groups) if move.names]
        self._adapt([move for move in moves if move.group["adapted"]])
        for move in moves:
            torch._foreach_add_(move.parameters, move.directions, alpha=-move.group["lr"])

    def _move_of(self, group: dict[str, Any]) -> _Move:
        """Return the group's move with LAMB's u: Adam's direction plus the weight decay."""
        names, parameters = with_gradients(group)
        directions = adam_directions(self, parameters, betas=self.settings.betas, eps=self.settings.eps)
        if parameters and group["weight_decay"]:
            torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
        return _Move(group, names, parameters, directions)

    def _adapt(self, moves: list[_Move]) -> None:
        """Scale each u in place by |w| / |u|, norms over all shards; by 1 if either norm is 0, as for new zero weights.

        Collective: every process takes part, with the same matrices in the same order.
        """
        if not moves:
            return
        names = [name for move in moves for name in move.names]
        directions = [u for move in moves for u in move.directions]
        weights = [w for move in moves for w in move.parameters]
        norms = [torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, directions)]
        # collective: sums squared norms over all shards of each matrix, once per step
        w_P, u_P = self.whole.sum(names, torch.stack(norms, dim=1).square()).sqrt().unbind(dim=1)
        ratio_P = torch.where((w_P > 0) & (u_P > 0), w_P / u_P, 1.0)
        torch._foreach_mul_(directions, ratio_P.unbind())
