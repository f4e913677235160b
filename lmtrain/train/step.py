"""An optimizer update: forward and backward of every micro-batch, a check of the loss, the optimizer step.

Called by the loop. This module does not depend on the axes of the layout, which ParallelModel handles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lmtrain.batch import StepBatches
from lmtrain.errors import NonFiniteLossError
from lmtrain.optim.parameter_groups import apply_learning_rate
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.fault_injection import fault_point


@dataclass(frozen=True)
class StepResult:
    """The result of a training step; the values are global, and equal on all ranks."""
    loss: float  # mean over the step's valid tokens; with several terms, the sum of their means
    grad_norm: float  # before clipping
    skipped: bool  # an fp16 overflow: the scale was halved and no weight changed
    terms: dict[str, float] = field(default_factory=dict)  # each term's mean
    z_loss: float | None = None  # minimised beside the loss, and not a part of it; None: the model has none
    sample_losses: Sequence[float] = ()  # with `batches.by_source`: summed over each sample's labels, by `sample_ids`


def train_step(
    model: ParallelModel, optimizer: torch.optim.Optimizer, batches: StepBatches, lr: float, clip_norm: float | None,
    run_folder: Path | None = None,
) -> StepResult:  # fmt: skip
    """Run forward, backward and the optimizer update of one step, and return the global loss, the gradient norm before
    clipping and whether the update was skipped. `lr` and `clip_norm` are the step's learning rate and gradient-norm
    limit.

    Raise NonFiniteLossError, before any weight changes, if a loss is not finite, or if the gradient norm is not finite
    and the loss scale is not dynamic. All ranks take part in collectives. `run_folder` is only named in that error
    message.
    """
    shares = model.forward_backward(batches)
    norm = model.finish_gradients(clip_norm)
    with current_phase.within("collective", current_phase.DEVICE_WAIT):
        *numbers, grad_norm = torch.cat([shares.flatten(), norm.view(1)]).tolist()  # sync: the only wait of a step
    num_terms, width = len(model.terms), shares.shape[1]
    losses = [math.fsum(numbers[i : i + num_terms]) for i in range(0, len(numbers), width)]
    for index, loss in enumerate(losses):
        if not math.isfinite(loss):
            samples = _sample_text(batches, index, len(losses))
            raise NonFiniteLossError(
                f"The loss of microbatch {index} of step {batches.step + 1} is {loss}. No weight was changed; "
                f"lower optim.lr, or look at samples {samples} as in "
                f"`lmtrain data show --run {run_folder or 'RUN'} --sample {samples.split(',')[0]}`."
            )
    overflow = not math.isfinite(grad_norm)
    if overflow and not model.loss_scale.dynamic:
        raise NonFiniteLossError(
            f"The gradient norm of step {batches.step + 1} is {grad_norm}, though its loss is {sum(losses):.4g}. "
            "No weight was changed; lower optim.lr, or train in a wider precision."
        )
    fault_point("opt_step")
    if not overflow:
        apply_learning_rate(optimizer, lr)
        model.update(optimizer)
    model.loss_scale.update(overflow)
    current_phase.leave()
    return StepResult(math.fsum(losses), grad_norm, overflow, *_parts_of_loss(model, numbers, width))


def _parts_of_loss(
    model: ParallelModel, numbers: list[float], width: int
) -> tuple[dict[str, float], float | None, list[float]]:
    """Return (loss term -> its mean, the z-loss or None if the model has none, the loss of each sample). `numbers` is
    the flattened result of `forward_backward`, `width` the length of its rows.
    """
    num_terms, num_sums = len(model.terms), model.num_sums
    terms = {name: math.fsum(numbers[i::width]) for i, name in enumerate(model.terms)}
    z_loss = math.fsum(numbers[num_terms::width]) if num_sums > num_terms else None
    samples = [loss for i in range(num_sums, len(numbers), width) for loss in numbers[i : i + width - num_sums]]
    return terms, z_loss, samples


def _sample_text(batches: StepBatches, microbatch: int, num_microbatches: int) -> str:
    """Return the ids of the first eight samples of a micro-batch as text. `microbatch` is its index within the step,
    which has `num_microbatches`.
    """
    share = len(batches.sample_ids) // num_microbatches
    ids = batches.sample_ids[microbatch * share : (microbatch + 1) * share][:8].tolist()
    return ", ".join(map(str, ids)) + (", ..." if share > 8 else "")
