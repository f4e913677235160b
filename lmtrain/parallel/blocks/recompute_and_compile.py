"""Activation recompute, and compilation of single blocks.

Called by build_parallel: recompute after tensor parallelism and before compilation and sharding. Names of parameters
and hooks stay. Gradients are bit-identical to those without recompute, unless a compiler fuses the changed graph
differently: the same kernels run on the same numbers, and dropout draws the same numbers again, from torch's own
generator (restored by checkpoint) and for the attention core (`dropout_seeds`). Recompute applies to whole blocks, to
cheap operators, or to the attention core. Blocks are compiled one by one, so that all layers share a small graph.
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

from lmtrain.errors import SettingsError, way
from lmtrain.models.layers.attention import DotProduct
from lmtrain.models.objectives.causal_and_masked_objectives import CausalLM
from lmtrain.models.objectives.cross_entropy import cross_entropy_plain, cross_entropy_sum
from lmtrain.parallel.blocks.dropout_random_numbers import DropoutSeeds, RankDropoutCore
from lmtrain.parallel.device_and_precision_settings import SomeRecomputeSettings
from lmtrain.spec import LanguageModel

_aten = torch.ops.aten
# results that `operators` keeps: matrix products, before the tp reduction, and fused attention on every device
SAVED_OPERATORS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
SAVED_BY_NAME = "flex_attention"  # because: the operator exists only after an import that takes a second

ContextPair = tuple[AbstractContextManager[Any], ...]  # context managers around forward and around recompute
ContextFunction = Callable[[], ContextPair]


def apply_recompute(
    model: LanguageModel, settings: SomeRecomputeSettings, dropout_seeds: DropoutSeeds, *, compiled: bool
) -> str | None:
    """Make the blocks that `settings` selects recompute their activations in backward, in place. Return a line for the
    log; None if `model`, which holds the blocks of one pipeline stage, has none of them.

    `compiled` means that the blocks are compiled afterwards. `dropout_seeds` make recompute draw the same dropout
    masks.
    """
    options = _checkpoint_options(settings.kind, dropout_seeds, compiled=compiled)
    blocks = [block for number, block in model.blocks.items() if settings.is_for(int(number))]
    for block in blocks:
        if settings.kind == "attention":
            _recompute_cores(block, options)
        else:
            block.forward = RecomputedForward(
                block.forward, options, traced=settings.kind == "operators"
            )
    return f"recompute: {settings.kind}, {len(blocks)} blocks" if blocks else None


def _recompute_cores(block: nn.Module, checkpoint_options: Mapping[str, Any]) -> None:
    """Replace the attention cores of a block by modules that recompute them in backward; raise SettingsError if it has
    none. `checkpoint_options` are keyword arguments of torch.utils.checkpoint.
    """
    core_types = (DotProduct, RankDropoutCore)
    cores = {path: module for path, module in block.named_modules() if isinstance(module, core_types)}
    outer = {path: core for path, core in cores.items() if path.rpartition(".")[0] not in cores}
    if not outer:
        raise SettingsError(
            ["recompute.kind=attention needs blocks with attention, and a block has none. Use "
             f"{way('recompute=full', instead_of='recompute.kind')}."]
        )
    for path, core in outer.items():
        block.set_submodule(path, RecomputedCore(core, checkpoint_options))


class RecomputedForward:
    """A replacement of a block's forward, `inner`, that recomputes it in backward.

    With `traced` the compiler traces recompute as part of the graph and plans it; otherwise only `inner` is compiled,
    and the same compiled graph runs twice.
    """

    def __init__(self, inner: Callable[..., Tensor], options: Mapping[str, Any], *, traced: bool) -> None:
        self.inner, self.options, self.traced = inner, options, traced

    def __call__(self, *args: Any) -> Tensor:
        return _run_with_recompute(self.inner, self.options, *args)


class RecomputedCore(nn.Module):
    """A module around an attention core that recomputes. The core has no weights, so no parameter name changes.

    because: a compiler guards functions by identity and modules by type, so that with a module all blocks share a graph
    """

    def __init__(self, core: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.core, self.options = core, options

    def forward(self, *args: Any) -> Tensor:
        return _run_with_recompute(self.core, self.options, *args)


def _run_with_recompute(function: Callable[..., Tensor], checkpoint_options: Mapping[str, Any], *args: Any) -> Tensor:
    """Return `function(*args)`, whose activations torch.utils.checkpoint recomputes in backward. Without gradients the
    function is called directly. `checkpoint_options` are keyword arguments of torch.utils.checkpoint.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    y: Tensor = checkpoint(function, *args, use_reentrant=False, **checkpoint_options)
    return y


def _checkpoint_options(kind: str, dropout_seeds: DropoutSeeds, *, compiled: bool) -> dict[str, Any]:
    """Return keyword arguments for torch.utils.checkpoint by the kind of recompute, "full", "operators" or "attention":
    `preserve_rng_state`, and, unless torch's default will do, `context_fn`. `compiled` means that the blocks are
    compiled with torch.compile.
    """
    options: dict[str, Any] = {"preserve_rng_state": dropout_seeds.uses_dropout}
    # because: a compiler can trace only torch's selective-checkpoint context; it restores random numbers by itself
    if kind == "operators":
        save_operators = partial(create_selective_checkpoint_contexts, _checkpoint_policy)
        context_fn = save_operators if compiled else partial(_combine_contexts, save_operators, dropout_seeds.contexts)
        return options | {"context_fn": context_fn}
    return options if kind == "attention" and compiled else options | {"context_fn": dropout_seeds.contexts}


def _checkpoint_policy(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    """Return torch's policy for an operator: its results are saved, or it may be recomputed."""
    is_saved = operator in SAVED_OPERATORS or operator.name() == SAVED_BY_NAME
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _combine_contexts(first: ContextFunction, second: ContextFunction) -> ContextPair:
    """Return the pair of contexts in which the contexts of `second` are nested in those of `first`."""
    return tuple(_nested_context(*pair) for pair in zip(first(), second(), strict=True))


@contextmanager
def _nested_context(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def apply_compile(model: LanguageModel, *, deterministic: bool) -> str:
    """Compile each block of the model separately with torch.compile, in place; return a line for the log.
    `deterministic` forbids autotuning, which may select other kernels in another run.

    Only `forward` is compiled, so that the hooks by which FSDP gathers weights stay outside the graph.
    """
    for block in model.blocks.values():
        forward = block.forward
        if isinstance(forward, RecomputedForward) and not forward.traced:
            forward.inner = _compile(forward.inner, deterministic)
        else:
            block.forward = _compile(forward, deterministic)
    return f"compile: {len(model.blocks)} blocks, each separately"


def compile_loss(objective: CausalLM, *, deterministic: bool) -> str:
    """Replace the objective's cross-entropy by a version compiled with torch.compile, in place; return a line for the
    log. `deterministic` forbids autotuning, which may select other kernels in another run.

    All stages share the compiled function. because: fusion also pays in the softmax over the vocabulary
    """
    # the vocabulary-parallel loss can be compiled unchanged
    function = cross_entropy_plain if objective.cross_entropy is cross_entropy_sum else objective.cross_entropy
    # because: by default torch compiles twice, the second time with a dynamic number of rows
    objective.cross_entropy = _compile(function, deterministic, dynamic=None if objective.rows_vary else False)
    return "compile: the loss"


def _compile(function: Any, deterministic: bool, *, dynamic: bool | None = False) -> Any:
    """Return the function compiled with torch.compile. `dynamic` says whether shapes may vary without another
    compilation (None: torch decides); `deterministic` forbids autotuning.
    """
    # because: compute.tf32 decides on TF32, and with warnings as errors this warning would end the run
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    # because: autotuning selects the fastest kernel of a trial, which may differ between runs
    return torch.compile(function, dynamic=dynamic, options={"deterministic": True} if deterministic else None)
