"""AdamW: torch's own, in its fused form where the device has one. Found by train through the settings' kind."""

from __future__ import annotations

import torch

from lmtrain.optim.adamw_settings import AdamWSettings
from lmtrain.optim.groups import Groups
from lmtrain.optim.whole import Alone, Whole

SLOTS = ("exp_avg", "exp_avg_sq")
_FUSED = {"cpu", "cuda"}


def build(settings: AdamWSettings, groups: Groups, whole: Whole = Alone()) -> torch.optim.AdamW:
    """Every number moves by itself, so shards need nothing of the whole."""
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    first, second = settings.betas
    return torch.optim.AdamW(
        [{**group, "slots": SLOTS} for group in groups],
        lr=settings.lr,
        betas=(first, second),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=devices <= _FUSED,
    )
