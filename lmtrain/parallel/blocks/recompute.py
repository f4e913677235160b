"""Activations that backward computes again instead of keeping, and blocks that are compiled, each alone.

Called by apply: recompute after the model is cut and before it is compiled and sharded. Names of parameters and hooks
stay. Gradients are bit for bit those without, unless a compiler fuses the changed graph in another way: the same
kernels run on the same numbers, and dropout draws again what it drew, from torch's own generator (kept by checkpoint)
and for the attention core (`noise`). What is recomputed: whole blocks, cheap operators, or attention's core. What is
compiled: one small graph that every layer shares, instead of one graph of the whole model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lmtrain.errors import SettingsError
from lmtrain.models.layers.attention import DotProduct
from lmtrain.objectives.cross_entropy import cross_entropy_plain, cross_entropy_sum
from lmtrain.objectives.objective import CausalLM
from lmtrain.parallel.blocks.dropout import Noise, SplitCore
from lmtrain.parallel.compute_settings import SomeRecomputeSettings
from lmtrain.spec import LanguageModel

_aten = torch.ops.aten
# what `operators` keeps: products, before tp sums them, and fused attention in every form that a device has
KEPT = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
KEPT_BY_NAME = "flex_attention"  # because: it has no operator until it is imported, which takes a second

Pair = tuple[AbstractContextManager[Any], ...]  # around forward and around recompute
Contexts = Callable[[], Pair]


def apply_recompute(
    model: LanguageModel, settings: SomeRecomputeSettings, noise: Noise, *, compiled: bool
) -> str | None:
    """Apply recompute in place and return a line for the log; a pipeline stage may have no block that uses it."""
    options = _options(settings.kind, noise, compiled=compiled)
    blocks = [block for number, block in model.blocks.items() if settings.is_for(int(number))]
    for block in blocks:
        if settings.kind == "attention":
            _apply_to_cores(block, options)
        else:
            block.forward = Recomputed(
                block.forward, options, inside=settings.kind == "operators"
            )
    return f"recompute: {settings.kind}, {len(blocks)} blocks" if blocks else None


def _apply_to_cores(block: nn.Module, options: Mapping[str, Any]) -> None:
    cores = {path: module for path, module in block.named_modules() if isinstance(module, (DotProduct, SplitCore))}
    outer = {path: core for path, core in cores.items() if path.rpartition(".")[0] not in cores}
    if not outer:
        raise SettingsError(["recompute.kind=attention finds no attention in this model's blocks. Use recompute=full."])
    for path, core in outer.items():
        block.set_submodule(path, RecomputedCore(core, options))


class Recomputed:
    """Stands in for a block's forward.

    A compiler sees recompute `inside` its graph and plans it; otherwise it is given `inner` alone, and the same
    compiled graph runs twice.
    """

    def __init__(self, inner: Callable[..., Tensor], options: Mapping[str, Any], *, inside: bool) -> None:
        self.inner, self.options, self.inside = inner, options, inside

    def __call__(self, *args: Any) -> Tensor:
        return _recomputed(self.inner, self.options, *args)


class RecomputedCore(nn.Module):
    """Stands around an attention core, which has no weights and so no names to keep.

    because: a compiler tells functions apart by identity and modules by their kind: so all blocks share one graph.
    """

    def __init__(self, core: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.core, self.options = core, options

    def forward(self, *args: Any) -> Tensor:
        return _recomputed(self.core, self.options, *args)


def _recomputed(inner: Callable[..., Tensor], options: Mapping[str, Any], *args: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return inner(*args)
    y: Tensor = checkpoint(inner, *args, use_reentrant=False, **options)
    return y


def _options(kind: str, noise: Noise, *, compiled: bool) -> dict[str, Any]:
    """Return the options of checkpoint: whether it restores torch's generator, and the contexts of both forwards."""
    options: dict[str, Any] = {"preserve_rng_state": noise.uses_dropout}
    # because: a compiler can trace no context but torch's choice of operators; it repeats random numbers by itself
    if kind == "operators":
        keep = partial(create_selective_checkpoint_contexts, _policy)
        return options | {"context_fn": keep if compiled else partial(_both, keep, noise.contexts)}
    if kind == "attention" and compiled:
        return options
    return options | {"context_fn": noise.contexts}


def _policy(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    kept = operator in KEPT or operator.name() == KEPT_BY_NAME
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _both(first: Contexts, second: Contexts) -> Pair:
    return tuple(_stacked(*pair) for pair in zip(first(), second(), strict=True))


@contextmanager
def _stacked(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def apply_compile(model: LanguageModel, *, deterministic: bool) -> str:
    """Compile each block by itself and return a line for the log.

    `forward` is compiled and not the whole call: the hooks by which FSDP gathers weights stay outside the graph.
    """
    for block in model.blocks.values():
        forward = block.forward
        if isinstance(forward, Recomputed) and not forward.inside:
            forward.inner = _compiled(forward.inner, deterministic)
        else:
            block.forward = _compiled(forward, deterministic)
    return f"compile: {len(model.blocks)} blocks, each alone"


def compile_loss(objective: CausalLM, *, deterministic: bool) -> str:
    """Compile the loss once for all stages, since fusion pays for the softmax over the vocabulary."""
    # a loss over tp serves a compiler as it is
    function = cross_entropy_plain if objective.cross_entropy is cross_entropy_sum else objective.cross_entropy
    # because: left to itself torch compiles twice, the second time for any number of rows
    objective.cross_entropy = _compiled(function, deterministic, dynamic=None if objective.rows_vary else False)
    return "compile: the loss"


def _compiled(function: Any, deterministic: bool, *, dynamic: bool | None = False) -> Any:
    # because: compute.tf32 says whether it is used, and where warnings are errors this one would end the run
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    # because: else what runs fastest in a trial is taken, which is not the same kernel each time
    return torch.compile(function, dynamic=dynamic, options={"deterministic": True} if deterministic else None)
