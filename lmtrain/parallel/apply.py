"""From a model that knows nothing of processes to one that trains: `build_parallel` and the verbs of ParallelModel.

Called by train and eval. The order of application is the reason for this file: build on meta (no memory, no
random numbers), materialise on the device, initialise by parameter name, split off the fp32 masters, compile.
Cuts over pipelines, tensors and shards come between the first two.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lmtrain.batch import Batch
from lmtrain.data.loader import StepBatches
from lmtrain.errors import LayoutError
from lmtrain.layout import Layout
from lmtrain.models.init import apply_init, apply_ties
from lmtrain.models.model_settings import ModelSettings
from lmtrain.objectives.causal_lm import CausalLM
from lmtrain.parallel.compile import apply_compile
from lmtrain.parallel.compute_settings import ComputeSettings
from lmtrain.parallel.grads import apply_clip, gradient_norm
from lmtrain.parallel.precision import LossScale, MasterWeights
from lmtrain.parallel.precision_settings import PrecisionSettings
from lmtrain.piece import Piece
from lmtrain.runtime.faults import fault_point
from lmtrain.runtime.seed import derive_seed
from lmtrain.spec import Split


def build_parallel(
    settings: ModelSettings,
    layout: Layout,
    precision: PrecisionSettings,
    compute: ComputeSettings,
    device: torch.device,
    *,
    seed: int | None,
    training: bool,
) -> ParallelModel:
    """`seed=None` leaves the weights at zero, to be loaded from a checkpoint."""
    if layout.world_size != 1:
        raise LayoutError(
            f"the layout asks for {layout.world_size} processes and this version has one. Use 1 on each axis."
        )
    with torch.device("meta"):
        model = importlib.import_module(f"lmtrain.models.{settings.kind}").build(settings)
    model.to_empty(device=device)
    if seed is not None:
        apply_init(model, seed)
    else:
        apply_ties(model)
        with torch.no_grad():
            torch._foreach_zero_(list(model.parameters()))
    objective = CausalLM()
    masters = MasterWeights(model, precision)
    if compute.compile:
        apply_compile(model, objective)
    model.train(training)
    return ParallelModel(model, objective, masters, LossScale(precision), settings, device, seed or 0)


class ParallelModel:
    """What train and eval see of a model, whatever its layout. No caller asks which axes exist."""

    def __init__(
        self,
        model: Any,
        objective: CausalLM,
        masters: MasterWeights,
        loss_scale: LossScale,
        settings: ModelSettings,
        device: torch.device,
        seed: int,
    ) -> None:
        self.model, self.objective, self.masters, self.loss_scale = model, objective, masters, loss_scale
        self.settings, self.device, self.seed = settings, device, seed
        self._vocab_rows = {name for name, cut in model.cuts().items() if cut.split is Split.VOCAB}

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The fp32 weights that an optimizer updates, by name, each tied weight once."""
        return self.masters.master

    @property
    def num_parameters(self) -> int:
        return sum(piece.block.numel() for piece in self.pieces())

    def forward_backward(self, batches: StepBatches) -> Tensor:
        """Gradients of the step's mean loss over its valid tokens; gives each microbatch's share of that mean.

        The division by the global count happens here, before backward, so that gradients need no rescaling after.
        """
        self.model.train()
        self.masters.clear_gradients()
        shares = []
        for index, batch in enumerate(batches.microbatches):
            self._seed_dropout(batches.step, index)
            fault_point("forward")
            loss = self.objective.loss_sum(self.model, self._place(batch)) / batches.valid_tokens
            fault_point("backward")
            torch.autograd.backward(loss * self.loss_scale.value if self.loss_scale.dynamic else loss)
            shares.append(loss.detach())
        return torch.stack(shares)

    def finish_gradients(self, clip_norm: float | None) -> Tensor:
        """Clip in place; gives the norm before clipping, still on the device."""
        gradients = self.masters.gradients
        norm = gradient_norm(gradients)
        apply_clip(gradients, norm, clip_norm, self.loss_scale.value)
        return norm / self.loss_scale.value

    @torch.no_grad()
    def loss_sums(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """Each batch's summed loss without gradients: validation."""
        self.model.eval()
        for batch in batches:
            yield self.objective.loss_sum(self.model, self._place(batch))
        self.model.train()

    @torch.no_grad()
    def logits(self, batch: Batch, keep_BT: Tensor | None = None) -> Tensor:
        """fp32 logits over the true vocabulary, of all positions or of the kept ones only."""
        self.model.eval()
        hidden = self.model(self._place(batch))
        if keep_BT is not None:
            hidden = hidden[keep_BT.to(self.device)]
        logits: Tensor = self.model.logits(hidden)
        return logits[..., : self.settings.shape.vocab_size].float()

    def pieces(self) -> list[Piece]:
        return self.place(self.parameters, "model")

    def place(self, tensors: dict[str, Any], prefix: str) -> list[Piece]:
        """Say where tensors shaped like a parameter stand in the whole; each key is, or ends in, a parameter's name.

        Padding of the vocabulary is a layout's business and no part of the whole.
        """
        vocab_size = self.settings.shape.vocab_size
        result = []
        for name, tensor in tensors.items():
            block = tensor.detach()
            if any(name == rows or name.endswith("." + rows) for rows in self._vocab_rows):
                block = block[:vocab_size]
            result.append(Piece(f"{prefix}.{name}", tuple(block.shape), (0,) * block.ndim, block))
        return result

    def _place(self, batch: Batch) -> Batch:
        return batch.map(lambda array: array.to(self.device, non_blocking=True))

    def _seed_dropout(self, step: int, index: int) -> None:
        # because: masks that are a pure function of (seed, step, microbatch) need no saving and repeat on resume
        if self.settings.uses_dropout:
            torch.manual_seed(derive_seed(self.seed, "dropout", step, index))
