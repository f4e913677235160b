"""Settings of evaluations in training, as typed."""

from __future__ import annotations

import pytest

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.errors import SettingsError
from lmtrain.train.train_settings import EvalSettings

TASK = {"task": "perplexity", "data": "a.txt"}


def test_a_task_is_called_by_its_own_name_or_another() -> None:
    data = {"tasks": [TASK, TASK | {"name": "one/two"}], "interval_steps": "1k"}
    settings = build_settings(EvalSettings, data)
    assert [one.measure_name for one in settings.tasks] == ["perplexity", "one/two"]
    assert settings.interval_steps == 1000
    assert build_settings(EvalSettings, settings.to_dict()) == settings


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"tasks": [TASK, TASK]}, "tasks=perplexity is the name of several entries"),
        ({"tasks": [TASK | {"name": "a b"}]}, "tasks[0].name=a b is not a valid name"),
        ({"tasks": [TASK | {"data": " "}]}, "tasks[0].data=  names no file"),
        ({"tasks": [{"task": "perplexity"}]}, "tasks[0].data is not set"),
        ({"tasks": {"perplexity": "a.txt"}}, "is not a list of groups of settings"),
        ({"interval_steps": 10}, "interval_steps=10 has no effect without eval.tasks"),
        ({"batch_size": 4}, "batch_size=4 has no effect without eval.tasks"),
        ({"tasks": [TASK], "interval_steps": -1}, "interval_steps=-1 must be at least 0"),
        ({"tasks": [TASK], "batch_size": 0}, "batch_size=0 must be at least 1"),
    ],
)
def test_what_would_measure_nothing_is_refused(data: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError) as error:
        build_settings(EvalSettings, data)
    assert said in str(error.value)
