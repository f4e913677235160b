"""Derive a seed for each purpose from the run's seed. Called wherever random numbers start. Torch-free.

With `derive_seed(seed, "dropout", step, index)` every random choice is a pure function of its purpose: no generator
state has to be saved, and neither the order of calls nor the layout changes the result.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *parts: int | str) -> int:
    """Return a seed in [0, 2**63) that depends on the run's seed and on every part; it is equal on all machines."""
    words = [f"{type(part).__name__}:{len(str(part))}:{part}" for part in (seed, *parts)]
    return int.from_bytes(hashlib.sha256("\0".join(words).encode()).digest()[:8], "little") >> 1
