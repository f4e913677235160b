"""Loss by how much a target's window held before it: what a long context is worth. Pure numpy. Called by the runner."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.eval.text.windows import MaskedRequest, Request

_MOST = 64  # powers of two


class Positions:
    """Sums over targets with 1, 2 to 3, 4 to 7, ... tokens before them in what was fed."""

    def __init__(self) -> None:
        self._nll, self._targets = np.zeros(_MOST), np.zeros(_MOST, np.int64)

    def add(self, request: Request, nll: NDArray[np.float64]) -> None:
        if isinstance(request, MaskedRequest):
            return  # because: to it a window is what stands on both sides
        num_fed = request.num_fed
        power = np.frexp(np.arange(num_fed - len(nll) + 1, num_fed + 1))[1] - 1
        self._nll += np.bincount(power, nll, _MOST)
        self._targets += np.bincount(power, minlength=_MOST)

    def rows(self) -> tuple[dict[str, Any], ...]:
        return tuple(
            {
                "tokens_before_from": 1 << power,
                "tokens_before_to": (2 << power) - 1,
                "targets": int(targets),
                "nll_per_token_nats": float(self._nll[power] / targets),
            }
            for power, targets in enumerate(self._targets)
            if targets
        )
