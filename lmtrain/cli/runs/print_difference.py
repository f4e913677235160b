"""What `lmtrain runs diff A B` prints of two runs compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lmtrain.config.settings_base import show
from lmtrain.start.facts_of_outputs.compare_runs import after_step
from lmtrain.units import plural


def diff_lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (label, text) to print for the result of `diff_facts`: rows, first differences, settings, causes, and what
    could not be compared.
    """
    yield "a, b", f"{facts['a']}, {facts['b']}"
    yield "rows", _describe_rows(facts)
    for key, step in sorted(facts["first"].items(), key=lambda item: item[1]):
        until = facts["equal_until"].get(key)
        yield key, f"differs from step {step:,} on" + (f"; equal in every row up to step {until:,}" if until else "")
    for at in facts["loss_after"]:
        yield f"loss at {at['step']:,}", f"{at['a']!r} and {at['b']!r}, {at['apart']:+.3g}"
    for name, facts_key in (
        ("setting", "settings"), ("environment", "environment"), ("at the start", "begun"), ("in the end", "ended")
    ):  # fmt: skip
        for key, (value_a, value_b) in facts[facts_key].items():
            after = after_step(facts, key) if facts_key in ("settings", "environment") else ""
            yield name, f"{key}: {show(value_a)} and {show(value_b)}{after}"
    for cause in facts["causes"] or (["nothing that was recorded"] if facts["first"] else []):
        yield "cause", cause
    for problem in facts["not_compared"]:
        yield "not compared", problem


def _describe_rows(facts: dict[str, Any]) -> str:
    """Return a text that says for how many steps both runs have rows, and which is the first whose rows differ, if any.
    """
    rows = facts["rows"]
    if not rows["shared"]:
        return "no step of which both have a row"
    until = f"{plural(rows['shared'], 'step')} of both, the last {rows['last_step']:,}"
    compared = (
        "all equal, bit for bit" if facts["first_step"] is None
        else f"the first that differs is step {facts['first_step']:,}"
    )  # fmt: skip
    logged = f"; {rows['shared']:,} of {rows['steps']:,} steps were logged, and observe.log_interval_steps=1 logs each"
    return f"{until}: {compared}{logged * (rows['shared'] < rows['steps'])}"
