"""Factors of one machine, fitted to runs that were measured on it. Torch-free."""

from __future__ import annotations

from lmtrain.plan.factors import Factors, fitted, interval
from lmtrain.plan.hardware import Hardware
from lmtrain.plan.rank import Prices


def prices_of(hardware: Hardware) -> Prices:
    """Those of all machines, but for what runs on this one have shown."""
    time = Factors({**fitted().values, **hardware.factors})
    return Prices(time=time, interval=interval() if hardware.interval is None else hardware.interval)
