"""How much each checkpoint counts in a merge: the names of means, and the shares they give. Torch-free.

Called by the merge command. Checkpoints are counted from the oldest. A merge of checkpoints 0 to n - 1 with shares c(j)
takes the change between the checkpoints j - 1 and j with the factor c(j) + ... + c(n - 1), as a decay of the learning
rate by that factor would; see the papers on WSM and PMA (arXiv 2507.17634 and 2505.12082).
"""

from __future__ import annotations

import math
from itertools import pairwise

from lmtrain.errors import UsageError

UNIFORM, LINEAR, EMA = "uniform", "linear", "ema"


def merge_weights(mean: str, num_checkpoints: int) -> list[float]:
    """Return the factor of each of `num_checkpoints` checkpoints in their weighted mean, oldest first; the factors add
    up to 1. `mean` is the kind of mean, such as "uniform" or "ema:0.9", as `parse_mean` or `decay_mean` returns it.
    """
    kind, _, value = mean.partition(":")
    if mean in (UNIFORM, "decay:linear"):  # because: a linear decay counts each change 1/n less than the one before
        return [1 / num_checkpoints] * num_checkpoints
    if mean == LINEAR:
        return [(j + 1) / (num_checkpoints * (num_checkpoints + 1) / 2) for j in range(num_checkpoints)]
    if kind == EMA:
        beta = float(value)
        newer = ((1 - beta) * beta ** (num_checkpoints - 1 - j) for j in range(1, num_checkpoints))
        return [beta ** (num_checkpoints - 1), *newer]
    factors = [1 - math.sqrt(j / num_checkpoints) for j in range(num_checkpoints)]  # decay:sqrt
    return [factor - later for factor, later in pairwise([*factors, 0.0])]


def parse_mean(text: str) -> str:
    """Check the value of the option --mean and return it in its standard form: "uniform", "linear" or "ema:BETA". Raise
    UsageError for any other value.
    """
    if text in (UNIFORM, LINEAR):
        return text
    kind, _, value = text.partition(":")
    try:
        beta = float(value)
    except ValueError:
        beta = math.nan
    if kind != EMA or not 0 < beta < 1:
        raise UsageError(
            f"--mean {text} names no mean. Use uniform, linear (checkpoint j counts j + 1), or ema:BETA with a number "
            "between 0 and 1, as in ema:0.9."
        )
    return f"{EMA}:{beta!r}"


def decay_mean(shape: str) -> str:
    """Return the name of the mean that stands in for a decay of this shape, linear or sqrt."""
    return f"decay:{shape}"
