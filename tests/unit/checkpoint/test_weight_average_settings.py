"""An average of the weights that would have no effect, or never be updated, is refused."""

from __future__ import annotations

from typing import Any

import pytest

from lmtrain.checkpoint.weight_ema_settings import WeightAverageSettings
from lmtrain.errors import SettingsError


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"decay": 1.0}, "decay=1.0 is not between 0 and 1"),
        ({"decay": 0.0}, "decay=0.0 is not between 0 and 1"),
        ({"decay": 0.9, "every_steps": 0}, "every_steps=0 must be at least 1"),
        ({"decay": 0.9, "from_step": -1}, "from_step=-1 must be at least 0"),
        ({"every_steps": 2}, "every_steps=2 has no effect, since with decay=null no average is kept"),
        ({"from_step": 2}, "from_step=2 has no effect, since with decay=null no average is kept"),
    ],
)
def test_what_makes_no_average_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as error:
        WeightAverageSettings(**values)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({}, []),
        ({"decay": 0.9, "every_steps": 10}, []),
        ({"decay": 0.9, "from_step": 9}, []),
        ({"decay": 0.9, "from_step": 10}, ["from_step"]),
        ({"decay": 0.9, "every_steps": 11}, ["every_steps"]),
        ({"decay": 0.9, "every_steps": 4, "from_step": 8}, ["every_steps"]),
        ({"decay": 0.9, "every_steps": 4, "from_step": 7}, []),
    ],
)
def test_a_run_of_ten_steps_updates_it_at_least_once(values: dict[str, Any], keys: list[str]) -> None:
    assert [problem.key for problem in WeightAverageSettings(**values).problems_in_run(10)] == keys


@pytest.mark.parametrize(("from_step", "first"), [(0, 4), (1, 4), (4, 4), (5, 8)])
def test_it_is_first_measured_where_it_has_begun(from_step: int, first: int) -> None:
    assert WeightAverageSettings(decay=0.9, from_step=from_step).first_measured_step(4) == first
