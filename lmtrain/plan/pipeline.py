"""How long a pipeline takes for a step: closed forms of the schedules' tables.

tests/unit/plan/test_pipeline.py replays the tables and compares. Called for thousands of layouts at once, where a
replay of each would take minutes.
"""

from __future__ import annotations

import numpy as np

from lmtrain.plan.case import Column, Columns, Schedule


def makespan(c: Columns, forward: Column, backward: Column, weight: Column, last: Column, largest: Column) -> Column:
    """Seconds of all microbatches.

    `forward` and `backward` are of an even stage (all its chunks), `weight` is the part of the backward that nobody
    waits for, `last` a microbatch's time in the last stage with the head, `largest` in the fullest of the others.
    """
    num, pp, vp = c.num_microbatches, c.pp, c.vp
    pace = np.maximum(last, largest)
    passage = (pp - 1) * (forward + backward) + last - pace  # one microbatch through all stages but the slowest
    one = num * pace + passage / vp
    saved = np.where(c.schedule == Schedule.ZB_1, 2 * np.minimum(weight, backward / 2), forward + backward)
    zero = num * pace + (pp - 1) * np.maximum(forward + backward - saved, 0.0)
    halves = (c.schedule != Schedule.ONE_F_ONE_B) & (c.schedule != Schedule.GPIPE)
    return np.where(pp == 1, num * last, np.where(halves, zero, one))
