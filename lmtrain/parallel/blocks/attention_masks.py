"""The choice of a model's mask form: block masks if a kernel can skip blocks, else dense masks.

Called by apply, before compilation, and by inference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from lmtrain.models.block_stack import Stack
from lmtrain.placement.attention_memory import uses_block_masks
from lmtrain.spec import LanguageModel


def apply_block_masks(model: LanguageModel, *, on_gpu: bool) -> str | None:
    """Make the model build block masks for flex_attention instead of dense masks, in place. Return a line for the log,
    or None if the model keeps dense masks: without a GPU, with dropout, or with very narrow heads.

    A model that is no Stack builds its own masks. `on_gpu` means a GPU with a compiler for its kernels.
    """
    if not (isinstance(model, Stack) and uses_block_masks(model.settings, on_gpu=on_gpu)):
        return None
    # because: the import takes a second, and a CPU has no kernel for flex_attention's backward
    from lmtrain.models.layers.block_masks import build_block_mask

    model.build_mask = build_block_mask
    return "masks: block masks for flex_attention, if masks are needed"


@contextmanager
def use_dense_masks(models: Iterable[LanguageModel]) -> Iterator[None]:
    """Make the models build dense attention masks instead of block masks within the context, so that texts may have any
    length.

    because: flex_attention would be compiled for each length, and the compiler caches eight; uncompiled, as in an
    evaluation during training, it creates a matrix of all scores for every head
    """
    built = [(model, model.build_mask) for model in models if isinstance(model, Stack) and "build_mask" in vars(model)]
    for model, _ in built:
        del model.build_mask  # the class attribute builds dense masks
    try:
        yield
    finally:
        for model, build_mask in built:
            model.build_mask = build_mask
