"""The summary of a comparison of two checkpoints, and the lists that --all prints in full."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

from lmtrain.cli.inspect.checkpoint_view import print_difference
from lmtrain.start.facts_of_outputs.facts_of_checkpoint import _difference_summary


def comparison(num_values: int) -> dict[str, Any]:
    """The facts of a comparison in which tensors of each kind differ."""
    values = {
        f"model.{number}": {"num_different": 1, "num_values": 4, "largest": number / 8, "scale": 1.0}
        for number in range(num_values)
    }
    facts: dict[str, Any] = {
        "checkpoint": "a", "other": "b", "state": {}, "only_in_checkpoint": ["x"], "only_in_other": ["y", "z"],
        "kinds": {"k": ["F32 [1]", "BF16 [1]"]}, "values": values, "same_tensors": False,
    }  # fmt: skip
    return facts | {"summary": _difference_summary(facts, num_tensors=num_values + 5)}


def printed(facts: dict[str, Any], *, show_all: bool) -> list[str]:
    output = io.StringIO()
    with redirect_stdout(output):
        print_difference(facts, show_all)
    return output.getvalue().splitlines()


def test_the_summary_counts_tensors_and_names_the_largest_difference() -> None:
    facts = comparison(3)
    assert facts["summary"] == {
        "equal": 3, "different": 4, "only_in_checkpoint": 1, "only_in_other": 2, "largest": 0.25,
        "largest_in": "model.2",
    }  # fmt: skip
    assert printed(facts, show_all=False)[-1] == (
        "3 tensors equal, 4 different, 1 only in the first, 2 only in the second; "
        "the largest difference is 0.25, in model.2"
    )
    assert printed(comparison(0), show_all=False)[-1].endswith("2 only in the second"), "no value differs"


def test_all_lists_every_difference() -> None:
    facts = comparison(45)
    assert "  ... and 5 more; --all lists them" in printed(facts, show_all=False)
    assert len(printed(facts, show_all=True)) == len(printed(facts, show_all=False)) + 4
