"""Seeds derived from the run's seed by name. Called wherever random numbers start. Torch-free.

A seed per purpose, `derive_seed(seed, "dropout", step, index)`, makes every random choice a pure function of what it
is for: nothing has to be saved, and no order of calls or layout can change it.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *parts: int | str) -> int:
    """Return a number in [0, 2**63) that depends on the seed and on every part, equal on every machine."""
    words = [f"{type(part).__name__}:{len(str(part))}:{part}" for part in (seed, *parts)]
    return int.from_bytes(hashlib.sha256("\0".join(words).encode()).digest()[:8], "little") >> 1
