"""Rotary positions: turn pairs of query and key numbers by an angle that grows with the position (RoFormer).

Angles are made once for each forward by the stack and handed to every block, so there is no table to fill on meta, to
resize, or to round to bf16 with the weights. LLaMA's pairing: number i turns with number i + K/2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """fp32, [T, 1, K/2], or [B, T, 1, K/2] where positions restart within a row: one set for all heads."""

    cos: Tensor
    sin: Tensor


def build_rotation(positions: Tensor, head_width: int, base: float) -> Rotation:
    """Positions are [T], or [B, T]."""
    pairs = torch.arange(0, head_width, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / base ** (pairs / head_width)
    angles = positions.float()[..., None, None] * frequencies
    return Rotation(angles.cos(), angles.sin())


def rotate(x_BTHK: Tensor, rotation: Rotation) -> Tensor:
    """Turn in fp32: at position 100,000 a bf16 angle would be off by whole turns."""
    left, right = x_BTHK.float().chunk(2, dim=-1)
    cos, sin = rotation
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).type_as(x_BTHK)
