"""Which batches a layout can share out: the rules that need its sizes and the batch's. Torch-free.

Called by train/config, where a run is judged, and by whoever looks for layouts that it would accept.
"""

from __future__ import annotations

from collections.abc import Iterator

from lmtrain.config.base import Problem
from lmtrain.data.batch_plan import RampUp
from lmtrain.layout import Layout, divisors, words

MAX_STAGE_MICROBATCHES = 1 << 16  # because: a schedule is worked out action by action before the run begins


def batch_problems(layout: Layout, global_batch: int, micro_batch: int) -> Iterator[Problem]:
    dp, stages = layout.dp, layout.pp * layout.vp
    if global_batch % dp != 0:
        rule, way_out = f"cannot be shared by dp={dp} copies of the model", "or as many copies as divide it."
        yield Problem("train.global_batch", global_batch, rule, f"Use {-(-global_batch // dp) * dp}, {way_out}")
        return
    if global_batch % (micro_batch * dp) != 0:
        rule = f"x {dp} data-parallel copies does not divide train.global_batch={global_batch}"
        yield Problem("train.micro_batch", micro_batch, rule, f"Use {words(divisors(max(global_batch // dp, 1)))}.")
        return
    microbatches = global_batch // (micro_batch * dp)
    if layout.pp > 1 and stages * microbatches > MAX_STAGE_MICROBATCHES:
        rule = f"takes {microbatches} microbatches a step through {stages} stages, and the most, multiplied, is "
        way_out = "Use a larger train.micro_batch, or more copies of the model (parallel.dp_shard)."
        yield Problem("parallel.pp", layout.pp, f"{rule}{MAX_STAGE_MICROBATCHES}", way_out)


def rampup_problems(layout: Layout, rampup: RampUp, micro_batch: int) -> Iterator[Problem]:
    """Every batch on the way has to be shared out too."""
    together = micro_batch * layout.dp
    for key in ("start", "increment"):
        if (value := getattr(rampup, key)) % together != 0:
            rule = f"is not a multiple of micro_batch x copies = {together}"
            yield Problem(f"train.rampup.{key}", value, rule, f"Use {together}.")
