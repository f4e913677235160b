"""flex_attention with gradients on a CPU: torch refuses them there, though its unfused form computes them.

Unfused, it asks the mask of every pair and never looks at the table of blocks: that is compared by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.nn.attention import flex_attention

from lmtrain.models.block_stack import Stack
from lmtrain.models.layers.flex_attention_block_masks import build_block_mask
from lmtrain.parallel import build_parallel_model


@contextmanager
def flex_on_cpu() -> Iterator[None]:
    with patch.object(flex_attention, "_validate_device", lambda *_: None), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


@contextmanager
def block_masks_everywhere() -> Iterator[None]:
    """Models that are built inside make their masks of blocks, whatever the device."""

    def apply_them(model: Any, *, on_gpu: bool) -> str:
        assert isinstance(model, Stack)
        model.build_mask = build_block_mask
        return "masks: of blocks, on a CPU"

    with flex_on_cpu(), patch.object(build_parallel_model, "apply_block_masks", apply_them):
        yield
