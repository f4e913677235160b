"""The way out of a ramp-up that a layout cannot divide is one that it can, and near to what was asked."""

from __future__ import annotations

import re

from hypothesis import assume, given
from hypothesis import strategies as st

from lmtrain.layout import Layout
from lmtrain.placement.batch_rampup_settings import MAX_INCREMENTS, RampUpSettings, rampup_problems


@given(
    together=st.integers(1, 6), batches=st.integers(1, 40_000) | st.integers(1, 6), extra=st.sampled_from([0, 0, 0, 1]),
    start=st.integers(1, 60), increment=st.integers(1, 60),
)
def test_the_advised_ramp_up_can_be_divided(
    together: int, batches: int, extra: int, start: int, increment: int
) -> None:
    asked = {"start": start, "increment": increment, "samples": 1}
    global_batch = batches * together + extra
    problems = [*rampup_problems(Layout(), RampUpSettings(**asked), together, global_batch)]
    assume(problems)
    advice = problems[0].text()
    if global_batch % together or global_batch < 2 * together:
        assert f"Give a train.global_batch of {2 * together} " in advice
        return
    found = {key: int(value) for key, value in re.findall(r"train\.rampup\.(\w+)=(\d+)", advice.partition("Use ")[2])}
    advised = RampUpSettings(**asked | found)
    assert not [*rampup_problems(Layout(), advised, together, global_batch)]
    count, rest = divmod(global_batch - advised.start, advised.increment)
    assert (rest, 1 <= count <= MAX_INCREMENTS, advised.start > 0) == (0, True, True)
    wide_enough = [
        size for size in range(together, global_batch, together)
        if size >= increment and (global_batch - 1) // size <= MAX_INCREMENTS
    ]  # fmt: skip
    assert advised.increment == (wide_enough[0] if wide_enough else together)
