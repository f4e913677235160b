"""Every schedule of the learning rate that has a config, and every pipeline schedule, a plugin's among them."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.compose_run_settings import compose_plain
from lmtrain.config.settings_base import kinds
from lmtrain.errors import SettingsError
from lmtrain.optim.schedule_settings import ScheduleSettings
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.schedules.pipeline_schedule import PipelineSchedule, schedule_named
from lmtrain.schedules.schedule_simulator import activations_held, simulate
from lmtrain.schedules.table import Kind
from tests.contracts.plugin import PLUGIN_CONF, choices, words

RATES = choices("schedule")
PIPELINES = words(PipelineSchedule)


@cache
def rate_of(name: str, *overrides: str) -> ScheduleSettings:
    plain = compose_plain(["data.path=x", f"schedule={name}", *overrides], config_dir=PLUGIN_CONF)
    return build_settings(ScheduleSettings, plain["schedule"], "schedule")  # type: ignore[type-abstract]


@pytest.mark.parametrize("name", RATES)
def test_a_rate_rises_to_its_peak_and_never_above(name: str) -> None:
    schedule = rate_of(name, "schedule.warmup_steps=10")
    factors = [schedule.factor(step, 200) for step in range(200)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert schedule.factor(10, 200) == 1.0
    assert all(0 <= later <= earlier <= 1 for earlier, later in pairwise(factors[9:]))
    assert type(schedule)(**{k: v for k, v in schedule.to_dict().items() if k != "kind"}) == schedule


@pytest.mark.parametrize("name", RATES)
def test_a_warm_up_as_long_as_the_run_is_refused(name: str) -> None:
    (problem,) = rate_of(name, "schedule.warmup_steps=10").problems_in_run(10)
    assert problem.key == "warmup_steps"


def test_kinds_are_found_by_themselves() -> None:
    """The plugin's among them; and a rate that no config chooses could not be asked for by its name."""
    assert {"1f1b", "eager", "zb_v"} <= set(PIPELINES) == set(kinds(PipelineSchedule))
    assert {"cosine", "stairs"} <= set(kinds(ScheduleSettings)) == {rate_of(name).kind for name in RATES}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_is_complete_and_as_its_settings_say(name: str) -> None:
    """Making a table checks it: every action once, on its rank, in an order in which no rank waits for ever."""
    schedule = schedule_named(name)
    for ranks in (1, 2, 4):
        for microbatches in (1, ranks, 2 * ranks + 1):
            table = schedule.table(ranks, schedule.chunks, microbatches)
            assert table.rank_of == schedule.ranks_of_stages(ranks, schedule.chunks)
            halves = any(action.kind is Kind.WEIGHT for row in table.actions for action in row)
            assert halves == schedule.splits_backward
            assert simulate(table).bubble >= 0
            assert max(activations_held(table)) <= microbatches * schedule.chunks
    with pytest.raises(ValueError, match=f"The pipeline schedule {name} "):
        schedule.table(2, schedule.chunks + 7 if not schedule.allows(schedule.chunks + 7) else 1, 4)


@pytest.mark.parametrize("name", PIPELINES)
def test_settings_take_a_pipeline_by_its_word(name: str) -> None:
    chunks = schedule_named(name).chunks
    settings = ParallelSettings(pp=2, vp=chunks, schedule=name)
    assert settings.pipeline == schedule_named(name)
    assert build_settings(ParallelSettings, settings.to_dict()) == settings
    with pytest.raises(SettingsError, match=f"schedule={name}x is not a pipeline schedule. Did you mean {name}"):
        ParallelSettings(schedule=f"{name}x")
