"""What a worker does for test_dropout.py: train, and tell every mask that any dropout drew."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lmtrain.models.layers.attention import DotProduct
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.schedules.table import Action
from lmtrain.train.set_up_run import build_optimizer
from lmtrain.train.step import train_step
from tests.layouts.bugs import planted
from tests.layouts.cases import Case
from tests.layouts.toy_data import loader_of
from tests.layouts.training import OPTIM, build, dp_index

Saw = Callable[[str, Tensor], None]


@dataclass
class Now:
    """What is going on, as the schedule says it: the noise of random numbers are under test."""

    step: int = 0
    microbatch: int = -1

    def follow(self, watch: Any) -> Any:
        """The same watch, which tells us of every action too."""
        begin = watch.before_action

        def begin_and_tell(action: Action) -> None:
            self.microbatch = action.microbatch
            begin(action)

        watch.before_action = begin_and_tell
        return watch


def masks(name: str, steps: int = 2, bug: str | None = None) -> dict[str, Any]:
    """This rank's place over tp, and [step, number among all copies' microbatches, module, digest] of each mask."""
    case = Case.named(name)
    now = Now()
    seen: list[tuple[int, int, str, str]] = []
    with planted(bug) if bug else nullcontext():
        model = build(case)
        dp = model.mesh.dp

        def saw(path: str, mask: Tensor) -> None:
            bits = mask.contiguous().view(torch.uint8).numpy().tobytes()
            seen.append((now.step, now.microbatch * dp.size + dp.index, path, hashlib.sha256(bits).hexdigest()))

        _watch(model, saw)
        right: Any = model.runner.train
        model.runner.train = lambda *a: right(*a[:-1], now.follow(a[-1]))  # type: ignore[method-assign]
        optimizer = build_optimizer(OPTIM, model)
        loader = loader_of(case, dp_index(case))
        for now.step in range(steps):
            train_step(model, optimizer, loader.read(now.step), OPTIM.lr, OPTIM.clip_norm)
    return {"tp": model.mesh.tp.index, "masks": seen}


def _watch(model: ParallelModel, saw: Saw) -> None:
    for stage in model.stages.values():
        assert isinstance(stage, nn.Module)
        for path, module in stage.named_modules():
            if isinstance(module, DotProduct):
                module.register_forward_pre_hook(partial(_core_mask, saw, path))
            elif isinstance(module, nn.Dropout):
                module.register_forward_hook(partial(_mask, saw, path))


def _mask(saw: Saw, path: str, module: nn.Module, given: Any, dropped: Tensor) -> None:
    saw(path, (dropped == 0) & (given[0] != 0))


def _core_mask(saw: Saw, path: str, core: DotProduct, given: Any) -> None:
    """What it is about to drop: equal scores, and values that each stand for one position, show the weights."""
    q_BHTK, before = given[0], torch.get_rng_state()
    zeros = torch.zeros_like(q_BHTK)
    ones = torch.eye(q_BHTK.shape[2]).expand(*q_BHTK.shape[:2], -1, -1)
    saw(path, core.forward(zeros, zeros, ones, None) > 0)
    torch.set_rng_state(before)
