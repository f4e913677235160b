"""Factors of one machine, fitted to runs that were measured on it. Torch-free."""

from __future__ import annotations

from lmtrain.plan.factors import Factors, fitted, interval
from lmtrain.plan.hardware import Hardware


def factors_of(hardware: Hardware) -> Factors:
    """Those of all machines, but for what runs on this one have shown."""
    return Factors({**fitted().values, **hardware.factors})


def interval_of(hardware: Hardware) -> float:
    return interval() if hardware.interval is None else hardware.interval
