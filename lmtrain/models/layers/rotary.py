"""Rotary positions: the angles by which pairs of a head's numbers are turned. Called by Stack and Attention.

The frequencies are computed in fp32 in the order of transformers' operations, so that a model that was trained with
either has the same angles.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lmtrain.models.rotary_settings import RotarySettings


class Rotation(NamedTuple):
    """Rotary angles in fp32: [T, 1, R/2], or [B, T, 1, R/2] if positions restart within a row; equal for all heads. R
    is the number of a head's numbers that are turned.
    """

    cos: Tensor
    sin: Tensor


def build_rotation(
    positions: Tensor, head_width: int, settings: RotarySettings, *, length: int | Tensor, is_local: bool = False
) -> Rotation:
    """Return the cosines and sines for rotary position embedding at `positions`, [T] or [B, T]. `length` is that of the
    texts in tokens, on which longrope's frequencies depend: the same for all, or [B, T] or [B, 1] with that of each
    token's text. `is_local` asks for the angles of a layer with a window, which may have a base of its own.
    """
    frequencies, factor = _frequencies(head_width, settings, length, is_local=is_local, device=positions.device)
    angles = positions.float()[..., None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return Rotation(cos, sin) if factor == 1.0 else Rotation(cos * factor, sin * factor)


def rotate(x_BTHK: Tensor, rotation: Rotation) -> Tensor:
    """Return queries or keys with rotary position embedding applied, in their own dtype. Numbers of a head beyond the
    first R, the width of `rotation`, stay unchanged. The computation is in fp32, since a bf16 angle at position 100,000
    would be off by whole turns.
    """
    cos, sin = rotation
    width = 2 * cos.shape[-1]
    left, right = x_BTHK[..., :width].float().chunk(2, dim=-1)
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).type_as(x_BTHK)
    return turned if width == x_BTHK.shape[-1] else torch.cat((turned, x_BTHK[..., width:]), dim=-1)


def _frequencies(
    head_width: int, s: RotarySettings, length: int | Tensor, *, is_local: bool, device: torch.device
) -> tuple[Tensor, float]:
    """Return (angle from one position to the next of each pair of numbers, [R/2] in fp32; factor of cosines and sines),
    those of layers with a window if `is_local`. R is the number of a head's numbers that are rotated. longrope's angles
    depend on `length`, the length of the texts: they are [B, T, 1, R/2] or [B, 1, 1, R/2] if that is a tensor.
    """
    is_own = is_local and s.local_rotary_base is not None
    base = s.local_rotary_base if is_local and s.local_rotary_base is not None else s.rotary_base
    width, scaling = s.rotary_width(head_width), "none" if is_own else s.rotary_scaling
    pairs = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    powers = base ** (pairs / width)
    factor = 1.0 if is_own else s.angle_factor
    match scaling:
        case "linear":
            return 1.0 / powers / s.rotary_factor, factor
        case "llama3":
            return _llama3(1.0 / powers, s), factor
        case "yarn":
            return _yarn(powers, s, width), factor
        case "longrope":
            is_long = length > (s.rotary_original_len or 0)
            short, long = (
                torch.tensor(divisors or (), dtype=torch.float32, device=device)
                for divisors in (s.rotary_short_factors, s.rotary_long_factors)
            )
            if isinstance(is_long, Tensor):
                divisors = torch.where(is_long[..., None, None], long, short)
            else:
                divisors = long if is_long else short
            return 1.0 / (divisors * powers), factor
    return 1.0 / powers, factor


def _llama3(frequencies: Tensor, s: RotarySettings) -> Tensor:
    """Return `frequencies` as LLaMA 3.1 changes them for longer texts: slow ones are divided by rotary_factor, fast
    ones are kept, and those between are a mixture of both.
    """
    original = float(s.rotary_original_len or 0)
    wavelengths = 2 * math.pi / frequencies
    slow = frequencies / s.rotary_factor
    share = (original / wavelengths - s.rotary_low_factor) / (s.rotary_high_factor - s.rotary_low_factor)
    between = (1 - share) * slow + share * frequencies
    kept_or_between = torch.where(wavelengths < original / s.rotary_high_factor, frequencies, between)
    return torch.where(wavelengths > original / s.rotary_low_factor, slow, kept_or_between)


def _yarn(powers: Tensor, s: RotarySettings, width: int) -> Tensor:
    """Return the frequencies 1 / `powers` as YaRN changes them for longer texts: those of the first, fast pairs are
    kept, those of the last, slow pairs are divided by rotary_factor, and those between are a mixture of both.

    The two are those that turn `rotary_beta_fast` and `rotary_beta_slow` times over the original length.
    """
    def pair_that_turns(times: float) -> float:
        turns = math.log((s.rotary_original_len or 1) / (times * 2 * math.pi))
        return width * turns / (2 * math.log(s.rotary_base))

    first, last = pair_that_turns(s.rotary_beta_fast), pair_that_turns(s.rotary_beta_slow)
    if s.rotary_rounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001  # because: the published code does so, to divide by something
    numbers = torch.arange(len(powers), dtype=torch.float32, device=powers.device)
    kept = 1 - ((numbers - first) / (last - first)).clamp(0, 1)
    return 1.0 / (s.rotary_factor * powers) * (1 - kept) + 1.0 / powers * kept
