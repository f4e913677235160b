"""Keys below a stage's name: which a stage may set, and what is said of the others."""

from __future__ import annotations

import contextlib

import pytest

from lmtrain.config.compose_run_settings import compose
from lmtrain.errors import LmtrainError, SettingsError
from lmtrain.train.run_config import RunConfig
from lmtrain.train.run_stage_settings import stage_may_set
from tests.marks import wide
from tests.promise.keys import every_key

EVERYWHERE = "cannot differ between the stages of a run. Set {} for the whole run."


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages.a.precision=bf16", EVERYWHERE.format("precision=bf16")),
        ("stages.a.parallel.tp=2", EVERYWHERE.format("parallel.tp=2")),
        ("stages.a.run.dir=x", EVERYWHERE.format("run.dir=x")),
        ("stages.a.model.width=8", "Set model.width=8 for the whole run; a stage may set model.seq_len, "),
        ("stages.a.optim.lrr=1", "is not a setting. Did you mean stages.a.optim.lr=1?"),
        ("stages.a.optin.lr=1", "is not a setting. Did you mean stages.a.optim.lr=1?"),
        ("stages.a.learning_rate=1", "is not a setting. Did you mean stages.a.optim.lr=1?"),
        ("stages.a.stop_afer=true", "is not a setting. Did you mean stages.a.stop_after=true?"),
        ("stages.a.keep_last=1", "is not a setting. Known: data, eval, "),  # not a key that a stage may set
        ("stages.a.data.text=x", "Make a dataset of the text with `lmtrain preprocess`, and give data.path=PREFIX."),
    ],
)
def test_a_key_that_a_stage_may_not_set(override: str, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        compose(RunConfig, ["data.path=x", "stages.a.steps=200", override])
    [problem] = caught.value.problems
    assert problem.startswith(f"{override} ")
    assert words in problem


@pytest.mark.parametrize("value", ["{a: 1}", "[1]", *wide("[{a: 1}]", "x", "null", "1.5")])
def test_a_value_of_any_type_is_taken_or_refused(value: str) -> None:
    keys = sorted({key.name for key in every_key() if stage_may_set(key.name)})
    assert len(keys) > 30
    for key in [*keys, "data.kind", "model.num_positions"]:
        with contextlib.suppress(LmtrainError):
            compose(RunConfig, ["data.path=x", "stages.a.steps=200", f"stages.a.{key}={value}"])


def test_a_length_without_a_name() -> None:
    with pytest.raises(SettingsError) as caught:
        compose(RunConfig, ["data.path=x", "stages.steps=5"])
    assert list(caught.value.problems) == [
        "stages.steps=5 lacks the name of one of the stages. Write stages.NAME.steps=5."
    ]


def test_a_default_micro_batch_fits_the_batch_of_a_stage() -> None:
    said: list[str] = []
    words = ["data.path=x", "stages.a.steps=200", "stages.b.steps=200", "stages.b.train.global_batch=4"]
    assert compose(RunConfig, words, report=said.append).train.micro_batch == 4
    assert said == ["train.micro_batch=4 instead of 8, to fit stages.b.train.global_batch=4."]
    run = compose(RunConfig, [*words, "stages.b.train.micro_batch=2"])
    assert [stage.train.micro_batch for stage in run.stage_configs] == [8, 2]
