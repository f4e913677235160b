"""Watts that devices draw while they train, and what a budget of tokens then costs. Torch-free.

A device that waits for others draws nearly as much as one that computes, which is why exposed communication costs
energy too. The two shares are drawn through two figures of one study (658 W of 700 on 128 H100, 620 W on 2,048, as a
second source gives them): no joule here has been checked against a meter, and what prints them says so.
"""

from __future__ import annotations

from lmtrain.plan.price.hardware import Hardware
from lmtrain.plan.price.step import StepTime
from lmtrain.plan.price.workload import Column

RESTING = 0.80  # of the device's power, whatever it does within a step
COMPUTING = 0.18  # and so much more for the share of a step in which it computes


def busy_share(time: StepTime) -> Column:
    found: Column = (time.compute - time.tp - time.sends + time.update) / time.total
    return found


def watts(time: StepTime, hardware: Hardware) -> Column:
    """Of one device, without its host and what cools it; 0 where the device's power is not known."""
    found: Column = hardware.power_W * (RESTING + COMPUTING * busy_share(time))
    return found


def dollars(seconds: float, gpus: int, price: float) -> float:
    """`price` of a device for an hour."""
    return seconds / 3600 * gpus * price
