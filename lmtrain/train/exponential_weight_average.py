"""An exponential average of the weights, kept beside them in fp32 while a run trains.

Built by set_up_run.py, updated by loop.py after the optimizer, and measured by in_loop/validate_and_evaluate.py, which
exchanges it with the weights. It is sharded as the optimizer's weights are, so that an update needs no communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmtrain.checkpoint.weight_ema_settings import WeightAverageSettings
from lmtrain.runtime.processes import current_phase

if TYPE_CHECKING:
    from lmtrain.parallel.weights.reduce_and_clip_gradients import Weights


class WeightAverage:
    """The averages of a rank's weights, or of its shards of them, by name; empty if no average is kept. Copies of a
    weight on several ranks have equal averages, bit for bit, since they have equal weights.
    """

    def __init__(self, weights: Weights, settings: WeightAverageSettings) -> None:
        """Allocate the averages now, even if they begin later, so that a run that lacks the memory fails at its start.
        """
        self.weights, self.settings = weights, settings
        self.tensors: dict[str, Tensor] = {
            name: weight.detach().clone() for name, weight in weights.master.items() if settings.is_on
        }
        self.since_step: int | None = None  # the step at which it began as a copy of the weights; None: not yet

    @property
    def has_begun(self) -> bool:
        return self.since_step is not None

    @torch.no_grad()
    def begin(self, step: int) -> None:
        """Start the average as a copy of the weights that the model has after `step` steps. Do nothing if it was
        started already, or if `step` is before checkpoint.ema.from_step.
        """
        if self.since_step is None and self.settings.covers(step):
            self.since_step = step
            for name, average in self.tensors.items():
                average.copy_(self.weights.master[name])

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights after `step` steps into the average, average += (1 - decay) * (weights - average), if `step`
        is a multiple of `every_steps`. If it has not begun, `begin` it.

        Steps count whether or not they changed the weights, so that a resumed run updates at the same ones.
        """
        if self.since_step is None:
            self.begin(step)
        elif step % self.settings.every_steps == 0 and self.tensors:  # a pipeline stage can be without weights
            assert self.settings.decay is not None
            with current_phase.within("optimizer"):
                torch._foreach_lerp_(
                    list(self.tensors.values()), list[Tensor](self.weights.master.values()), 1 - self.settings.decay
                )

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Exchange the weights with their averages for the `with` block, and exchange them back at its end, even after
        an error; no value is changed by this. The exchange needs memory for one more tensor.
        """
        exchanged: list[str] = []
        try:
            for name in self.tensors:
                self._exchange(name)
                exchanged.append(name)
            self.weights.publish()
            yield
        finally:
            for name in exchanged:
                self._exchange(name)
            self.weights.publish()

    @torch.no_grad()
    def _exchange(self, name: str) -> None:
        weight, average = self.weights.master[name], self.tensors[name]
        copy = weight.detach().clone()
        weight.copy_(average)
        average.copy_(copy)

    def state(self) -> dict[str, Any]:
        """Return the entries that a checkpoint stores beside the tensors."""
        return self.settings.to_dict() | {"since_step": self.since_step}
