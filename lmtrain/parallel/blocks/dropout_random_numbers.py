"""The random numbers of dropout, as a pure function of (seed, step, micro-batch, place in the layout).

Called by ParallelModel before each micro-batch and by recompute, which draws the same numbers again. No random state is
saved: a resumed run re-enters the step. If tp ranks hold the same activations they must drop the same elements; if they
hold different activations they must draw different numbers:

    sharded sequence          every activation is split          each rank has its own random numbers
    whole sequence, tp > 1    residual and embedding are whole   torch's own generator is equal on all tp ranks
                              attention's heads are split        each rank has its own for each core: RankDropoutCore
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
from lmtrain.runtime.derive_random_seeds import derive_seed


@dataclass(frozen=True)
class Microbatch:
    """The step and micro-batch that, with the seed and a module's path, determine the dropout of an attention core."""

    step: int
    number: int  # index among all dp ranks' micro-batches of the step


class DropoutSeeds:
    """The seeds of dropout: they depend only on the run's seed, step, micro-batch, stage and, if needed, tp rank."""

    def __init__(self, seed: int, tp: Axis, dp: Axis, *, sequence_parallel: bool, uses_dropout: bool) -> None:
        self.seed, self.tp, self.dp, self.uses_dropout = seed, tp, dp, uses_dropout
        self.varies_by_rank = sequence_parallel and tp.size > 1  # every activation is split over tp
        self.varies_in_attention = not sequence_parallel and tp.size > 1  # only attention's heads are split over tp
        self.current = Microbatch(0, 0)

    def seed_forward(self, step: int, microbatch: int, stage: int = 0) -> None:
        """Seed torch's default random generator for the forward of pipeline stage `stage` on this rank's micro-batch
        number `microbatch` (from 0) of step `step`. Leave the generator alone if the model has no dropout.

        Micro-batches are numbered as the loader deals samples to dp ranks, so that a single process with all of these
        micro-batches draws the same masks.
        """
        self.current = Microbatch(step, microbatch * self.dp.size + self.dp.index)
        if self.uses_dropout:
            at: tuple[int | str, ...] = ("tp", self.tp.index) if self.varies_by_rank else ()
            at += ("stage", stage) if stage else ()
            torch.manual_seed(derive_seed(self.seed, "dropout", step, self.current.number, *at))

    def core_seed(self, path: str) -> int:
        """Return the dropout seed of the attention core at module path `path` for the current micro-batch. It differs
        between tp ranks.
        """
        at = self.current
        return derive_seed(self.seed, "dropout", at.step, at.number, "tp", self.tp.index, path)

    @contextmanager
    def use_microbatch(self, microbatch: Microbatch) -> Iterator[None]:
        """Make `microbatch` the current micro-batch while the context is open, so that attention cores draw the dropout
        masks of this one, as a recompute in backward needs.
        """
        before, self.current = self.current, microbatch
        try:
            yield
        finally:
            self.current = before

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return two context managers, for a forward and for its recompute in backward, so that both draw the same
        numbers.

        because: recompute may run after another micro-batch has been entered
        """
        return nullcontext(), self.use_microbatch(self.current)


def apply_rank_dropout(model: nn.Module, dropout_seeds: DropoutSeeds) -> str | None:
    """Replace, in place, each attention core of the model by one that draws its dropout masks from a seed of its tp
    rank, so that the masks differ between tp ranks. Return a line for the log; None if nothing is replaced, because
    there is no dropout or no tensor parallelism, or because sequence parallelism makes it unnecessary.

    The seed contains the module path, so that pipelines and the order of layers do not matter.
    """
    if not (dropout_seeds.uses_dropout and dropout_seeds.varies_in_attention):
        return None
    cores = [(path, module) for path, module in model.named_modules() if isinstance(module, DotProduct)]
    for path, module in cores:
        model.set_submodule(path, RankDropoutCore(module, dropout_seeds, path))
    return f"dropout: {len(cores)} attention cores with random numbers per tp rank"


class RankDropoutCore(nn.Module):
    """An attention core whose dropout masks differ between tp ranks; torch's own generator stays equal on all tp ranks.
    """

    def __init__(self, core: nn.Module, dropout_seeds: DropoutSeeds, path: str) -> None:
        super().__init__()
        self.core, self.dropout_seeds, self.path = core, dropout_seeds, path

    def forward(self, q_BHTK: Tensor, *rest: Tensor | None) -> Tensor:
        if not self.training:
            y_BHTK: Tensor = self.core(q_BHTK, *rest)
            return y_BHTK
        generator = _generator(q_BHTK.device)
        before = generator.get_state()
        try:
            generator.manual_seed(self.dropout_seeds.core_seed(self.path))
            y_BHTK = self.core(q_BHTK, *rest)
        finally:  # because: recompute exits a forward by an exception as soon as it has all saved tensors
            generator.set_state(before)
        return y_BHTK


def _generator(device: torch.device) -> torch.Generator:
    """Return torch's default random generator of the device, which dropout uses."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
