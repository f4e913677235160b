"""Which random numbers dropout draws, as a pure function of (seed, step, microbatch, place in the layout).

Called by ParallelModel before each microbatch and by recompute, which draws the same again. Nothing is saved: a resumed
run enters the same step. Where tp ranks hold the same activations they must drop the same ones, where they hold
different ones they must not:

    sequence cut over tp      every activation is split          each rank its own
    whole sequence, tp > 1    residual and embedding are whole   torch's own generator is the same on all tp ranks
                              attention's heads are split        each rank its own for each core, see SplitCore
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lmtrain.models.layers.attention import DotProduct
from lmtrain.parallel.mesh import Axis
from lmtrain.runtime.seed import derive_seed


@dataclass(frozen=True)
class Microbatch:
    step: int
    number: int  # among all dp ranks' microbatches of the step
    stage: int = 0


class Noise:
    """The random numbers of dropout."""

    def __init__(self, seed: int, tp: Axis, dp: Axis, *, sequence: bool, uses_dropout: bool) -> None:
        self.seed, self.tp, self.dp, self.uses_dropout = seed, tp, dp, uses_dropout
        self.splits_all = sequence and tp.size > 1
        self.splits_heads = not sequence and tp.size > 1
        self.current = Microbatch(0, 0)

    def enter(self, step: int, index: int, stage: int = 0) -> None:
        """Prepare dropout for a stage's forward of this rank's micro-batch `index`.

        Micro-batches are numbered as the loader distributes samples over dp ranks, so that one process with all of them
        draws the same masks.
        """
        self.current = Microbatch(step, index * self.dp.size + self.dp.index, stage)
        if self.uses_dropout:
            at: tuple[int | str, ...] = ("tp", self.tp.index) if self.splits_all else ()
            at += ("stage", stage) if stage else ()
            torch.manual_seed(derive_seed(self.seed, "dropout", step, self.current.number, *at))

    def core_seed(self, path: str) -> int:
        at = self.current
        return derive_seed(self.seed, "dropout", at.step, at.number, "tp", self.tp.index, path)

    @contextmanager
    def at(self, microbatch: Microbatch) -> Iterator[None]:
        before, self.current = self.current, microbatch
        try:
            yield
        finally:
            self.current = before

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts for checkpoint's `context_fn`: recompute may come after another micro-batch has begun."""
        return nullcontext(), self.at(self.current)


def apply_noise(model: nn.Module, noise: Noise) -> str | None:
    """Give every attention core that needs it noise of its own, in place; returns what was done, for the log.

    Paths name the noise, so pipelines and the order of layers do not matter.
    """
    if not (noise.uses_dropout and noise.splits_heads):
        return None
    cores = [(path, module) for path, module in model.named_modules() if isinstance(module, DotProduct)]
    for path, module in cores:
        model.set_submodule(path, SplitCore(module, noise, path))
    return f"dropout: {len(cores)} attention cores with noise of this tp rank's own"


class SplitCore(nn.Module):
    """Draws the rank's own noise and leaves torch's own generator where it was, in step with the other tp ranks."""

    def __init__(self, core: nn.Module, noise: Noise, path: str) -> None:
        super().__init__()
        self.core, self.noise, self.path = core, noise, path

    def forward(self, q_BHTK: Tensor, *rest: Tensor | None) -> Tensor:
        if not self.training:
            y_BHTK: Tensor = self.core(q_BHTK, *rest)
            return y_BHTK
        generator = _generator(q_BHTK.device)
        before = generator.get_state()
        try:
            generator.manual_seed(self.noise.core_seed(self.path))
            y_BHTK = self.core(q_BHTK, *rest)
        finally:  # recompute leaves a forward by an exception as soon as it has what it needs
            generator.set_state(before)
        return y_BHTK


def _generator(device: torch.device) -> torch.Generator:
    """Return the generator that dropout draws from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
