"""checkpoint.best_by must name a measure that is taken at steps that are saved."""

from __future__ import annotations

import pytest

from lmtrain.config.compose_run_settings import compose
from lmtrain.errors import SettingsError
from lmtrain.train.run_config import RunConfig

BASE = ("data.path=x", "train.steps=1000", "train.valid_interval_steps=100", "checkpoint.interval_steps=50",
        "schedule.warmup_steps=0", "checkpoint.keep_best=1")  # fmt: skip
DECAY = "checkpoint.ema.decay=0.9"
TASK = "eval.tasks=[{task: perplexity, data: y, name: prose}]"


@pytest.mark.parametrize(
    "words",
    [
        [], ["checkpoint.best_by=valid/accuracy"], ["train.valid_interval_steps=30"], ["checkpoint.interval_steps=300"],
        ["data.valid_paths={wiki: z}", "checkpoint.best_by=loss/valid/wiki"],
        [TASK, "eval.interval_steps=100", "checkpoint.best_by=eval/prose/x", "train.valid_interval_steps=0"],
        ["checkpoint.keep_best=0", "train.valid_interval_steps=0"],
        [DECAY, "checkpoint.best_by=loss/ema"], [DECAY, "checkpoint.best_by=loss/valid"],
        [DECAY, "checkpoint.best_by=ema/accuracy", "checkpoint.ema.from_step=900"],
        [DECAY, "data.valid_paths={wiki: z}", "checkpoint.best_by=loss/ema/wiki"],
        [DECAY, TASK, "eval.interval_steps=100", "checkpoint.best_by=eval/prose/ema/x"],
    ],
)  # fmt: skip
def test_what_can_be_told(words: list[str]) -> None:
    keys = [word.partition("=")[0] for word in words]
    compose(RunConfig, [word for word in BASE if word.partition("=")[0] not in keys] + words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.valid_interval_steps=0"], "best_by=loss/valid is never measured before the end of the run with"),
        (["checkpoint.best_by=loss/vlaid"], "is not a measure of this run. Did you mean loss/valid?"),
        (["checkpoint.best_by=loss/valid/wiki"], "is not a measure of this run. Did you mean loss/valid?"),
        (
            ["data=blend", "data.datasets=[{path: a, weight: 1}]", "data.path", "checkpoint.best_by=loss/valid/a"],
            "is a measure of a dataset of the blend, of which a validation may read no sample. Give that dataset in",
        ),
        (["checkpoint.best_by=eval/prose/x"], "is not a measure of this run. Give its task in eval.tasks."),
        ([TASK, "checkpoint.best_by=eval/pros/x"], "is not a measure of this run. Give eval/prose/MEASURE."),
        ([TASK, "checkpoint.best_by=eval/prose/x"], "with eval.interval_steps=0. Use eval.interval_steps=50"),
        (["train.valid_interval_steps=999"], "interval_steps=50 saves none of these steps before the last, 1000"),
        (["checkpoint.best_by=loss/ema"], "loss/ema measures an average of the weights, and with"),
        ([TASK, "eval.interval_steps=100", "checkpoint.best_by=eval/prose/ema/x"], "average of the weights, and with"),
        (
            [DECAY, "checkpoint.best_by=loss/ema", "checkpoint.ema.from_step=901"],
            "every 100 steps from step 901 on, and checkpoint.interval_steps=50 saves none of these steps",
        ),
        ([DECAY, "checkpoint.best_by=loss/em"], "is not a measure of this run. Did you mean loss/ema?"),
        (["checkpoint.interval_steps=null"], "checkpoint.keep_best=1 has no checkpoints to choose from"),
        (["checkpoint.keep_best=-1"], "checkpoint.keep_best=-1 must be at least 0"),
        (["checkpoint.keep_best=0", "checkpoint.best_by=valid/ppl"], "has no effect with keep_best=0"),
    ],
)  # fmt: skip
def test_what_cannot_be_told(words: list[str], said: str) -> None:
    keys = [word.partition("=")[0] for word in words]
    typed = [word for word in BASE if word.partition("=")[0] not in keys] + [word for word in words if "=" in word]
    with pytest.raises(SettingsError) as error:
        compose(RunConfig, typed)
    assert said in str(error.value)
