"""In which form attention is told who may look at whom: not at all, by all positions, or by blocks. Torch-free.

Asked by parallel, which has the masks made, and by whoever prices a run.
"""

from __future__ import annotations

from lmtrain.models.model_settings import ModelSettings

LEAST_HEAD_WIDTH = 16  # because: flex_attention's kernels are made of products that have no smaller side


def needs_mask(model: ModelSettings, *, document_mask: bool) -> bool:
    """Whether a kernel's own causal rule leaves something to say.

    To a model that sees both sides it always does: its rows end early.
    """
    shape = model.shape
    windowed = shape.window is not None and shape.window < shape.seq_len
    return document_mask or windowed or not shape.causal


def of_blocks(model: ModelSettings, *, on_gpu: bool) -> bool:
    """Whether a mask, where there is one, is of blocks, whose kernels skip what nobody sees.

    because: on a CPU they have no backward, and they drop nothing, as dropout asks.
    """
    return on_gpu and not model.uses_dropout and model.shape.head_width >= LEAST_HEAD_WIDTH
