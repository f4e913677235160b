"""In which form a model's masks are made: of blocks where a kernel can skip them, else of all positions.

Called by apply, before compiling, and by inference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from lmtrain.models.stack import Stack
from lmtrain.placement.memory import of_blocks
from lmtrain.spec import LanguageModel


def apply_block_masks(model: LanguageModel, *, on_gpu: bool) -> str | None:
    """Apply block masks in place and return a line for the log; a model that is no Stack makes its masks itself.

    `on_gpu`: with a compiler for its kernels.
    """
    if not (isinstance(model, Stack) and of_blocks(model.settings, on_gpu=on_gpu)):
        return None
    # because: it takes a second to import, and a CPU has no kernel for its backward
    from lmtrain.models.layers.block_masks import build_block_mask

    model.build_mask = build_block_mask
    return "masks, where there are any: of blocks, for flex_attention"


@contextmanager
def masks_of_positions(models: Iterable[LanguageModel]) -> Iterator[None]:
    """Use masks of positions within the block, for texts of any length.

    because: flex_attention would be compiled for each length, and a compiler keeps eight; where it is not, as in an
    evaluation while a run trains, it makes a matrix of all scores for every head
    """
    built = [(model, model.build_mask) for model in models if isinstance(model, Stack) and "build_mask" in vars(model)]
    for model, _ in built:
        del model.build_mask  # the class has the other form
    try:
        yield
    finally:
        for model, build_mask in built:
            model.build_mask = build_mask
