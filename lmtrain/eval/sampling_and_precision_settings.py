"""Settings of a model in use: the number format, and of text generation temperature, top-k, top-p and seed, checked.

Called by `lmtrain eval`, `lmtrain generate`, the Python interface and the adapter for lm-evaluation-harness.
Torch-free, so that a wrong value is refused before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmtrain.errors import UsageError, leave_out

PrecisionName = Literal["fp32", "bf16", "fp16"]
DEFAULT_NEW_TOKENS = 200
MAX_SEED = 2**32 - 1  # because: torch's generator on the CPU reads 32 bits, so 2**32 would draw what 0 draws


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of sampling. Temperature 0 takes the most likely token. Two seeds in the allowed range draw differently.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature={self.temperature} must be at least 0; 0 takes the most likely token.")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k={self.top_k} must be at least 1. {leave_out('--top-k')} to allow every token.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            way_out = f"{leave_out('--top-p')} to allow every token."
            raise UsageError(f"top_p={self.top_p} must be above 0 and at most 1. {way_out}")
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(
                f"seed={self.seed} is not a whole number from 0 to {MAX_SEED}. Choose a seed in this range; further "
                "samples count up from it."
            )


def build_samplings(
    temperature: float, top_k: int | None, top_p: float | None, seed: int, num_samples: int
) -> list[Sampling]:
    """Return the settings of each sample, whose seeds count up. Raise UsageError if a value is not allowed."""
    return [
        Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed + number) for number in range(num_samples)
    ]
