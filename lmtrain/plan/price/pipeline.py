"""How long a pipeline takes for a step: closed forms of the schedules' tables.

tests/unit/plan/test_pipeline.py replays the tables and compares. Called for thousands of layouts at once, where a
replay of each would take minutes.
"""

from __future__ import annotations

import numpy as np

from lmtrain.plan.price.workload import Column, Columns, Schedule


def makespan(
    c: Columns, forward: Column, backward: Column, weight: Column, last: Column, largest: Column, weight_last: Column
) -> Column:
    """Seconds of all microbatches.

    `forward` and `backward` are of a stage before the last, on average (all its chunks), `weight` is the part of the
    backward that nobody waits for, `last` a microbatch's time in the last stage with the head, `largest` in the fullest
    of the others, and `weight_last` what nobody waits for in the last.

    Many microbatches keep the slowest stage busy but for the bubble; few take as long as the first one's passage, and
    what of each other one comes after it.
    """
    num, pp, vp, others = c.num_microbatches, c.pp, c.vp, c.pp - 1
    pace = np.maximum(last, largest)
    passage = others * (forward + backward) + last
    one = np.maximum(num * pace + (passage - pace) / vp, passage + (num - 1) * pace / vp)
    sooner = passage - others * weight  # with the halves that nobody waits for put off
    behind = np.where(last > largest, weight_last, weight)  # of the slowest stage
    h1 = np.maximum(
        num * pace + others * (forward + np.maximum(backward - weight - behind, 0.0)),
        sooner + (num - 1) * (pace - behind),
    )
    v = np.maximum(
        num * pace + others * np.maximum.reduce([forward, backward - weight, weight]) / 2,
        sooner + (num - 1) * (pace - forward),
    )
    split = np.where(c.schedule == Schedule.ZB_1, h1, v)
    halves = (c.schedule != Schedule.ONE_F_ONE_B) & (c.schedule != Schedule.GPIPE)
    return np.where(pp == 1, num * last, np.where(halves, split, one))
