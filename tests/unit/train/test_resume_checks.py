"""A checkpoint is accepted only for its own run; settings newer than the checkpoint count as their old default."""

from __future__ import annotations

from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest

from lmtrain.checkpoint.disk.checkpoint_format import Manifest
from lmtrain.config.compose_run_settings import compose
from lmtrain.data.sample_dataset_interface import ShuffledOrder
from lmtrain.data.training_data_by_source import TrainingData
from lmtrain.errors import CheckpointError, Way
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_wordpiece
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.resume_checks import check_same_run
from tests.layouts.toy_data import ToyMasked

WORDS = ["model=bert_tiny", "data=masked", "data.path=x"]


@cache
def learned() -> Tokenizer:
    return train_wordpiece(["a cat sat on a mat"], 40, lowercase=True)


@cache
def composed(words: tuple[str, ...]) -> RunConfig:
    place = [] if any(word.startswith("run.dir=") for word in words) else ["run.dir=x"]
    return compose(RunConfig, [*WORDS, *place, *words])


def check(
    *overrides: str, without: tuple[str, ...] = (), changed: dict[str, Any] | None = None, at: int = 0
) -> None:  # fmt: skip
    """A run with these settings looks at a checkpoint of one without them, from which some are missing."""
    tokenizer, configs = learned(), [composed(words) for words in ((), overrides)]
    models = [config.model.with_vocab(67) for config in configs]
    data = TrainingData(ToyMasked(), ShuffledOrder(96, seed=1), {}, [], {"blend": None}, 0, 96)
    state: dict[str, Any] = {
        "model": {key: value for key, value in models[0].to_dict().items() if key not in without}, "data": {},
        "tokenizer": {"fingerprint": tokenizer.fingerprint}, "seed": 1234, "step": at, "samples": 32 * at, "tokens": 0,
        "attempt": 1, "skipped": 0, "optimizer": {"kind": "adamw", "num_updates": 0}, "precision": {"kind": "fp32"},
    }  # fmt: skip
    for key, value in (changed or {}).items():
        *groups, last = key.split(".")
        reduce(lambda inner, group: inner[group], groups, state)[last] = value
    check_same_run(Path("here"), Manifest(at, {}, {}, state), configs[1], models[1], tokenizer, data)


def test_a_checkpoint_may_be_older_than_a_setting() -> None:
    check()
    check(without=("activation", "head_activation"))
    with pytest.raises(CheckpointError, match=r"model\.activation is gelu_tanh, and was gelu\."):
        check("model.activation=gelu_tanh", without=("activation", "head_activation"))


def test_all_that_differs_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"model\.width is 64, and was 128; train\.seed is 7, and was 1234\."):
        check("model.width=64", "train.seed=7")


@pytest.mark.parametrize(
    ("overrides", "at", "said"),
    [
        (["train.global_batch=16"], 2, r"train\.global_batch is 16, and was 32\."),
        (["train.rampup={start: 16, increment: 16, samples: 64}"], 2,
         r"train\.global_batch with train\.rampup, as samples up to step 2, is 32, and was 64\."),
        (["train.seed=7"], 0, r"weights alone: checkpoint\.init_from=here, without checkpoint\.resume\.$"),
        (["train.seed=7", "run.dir=."], 0, r"weights alone: run\.dir=/\S+-2 checkpoint\.init_from=here\.$"),
        (["model.width=64"], 0, r"Go on with its settings, or leave checkpoint\.resume out to begin x anew\."),
    ],
)  # fmt: skip
def test_what_differs_is_named_by_its_key_and_there_is_a_way_on(overrides: list[str], at: int, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        check(*overrides, at=at)


def test_a_new_run_is_told_with_the_words_to_type_in_place_of_the_old_ones() -> None:
    with pytest.raises(CheckpointError) as caught:
        check("train.seed=7")
    [from_weights] = caught.value.ways[0]
    assert from_weights == Way(("checkpoint.init_from=here",), ("checkpoint.resume",))


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("step", 3, "is not the step 0"), ("step", "0", "is not the step 0"), ("samples", -1, "a number from 0"),
        ("tokens", "many", "a number from 0"), ("attempt", 1.5, "a number from 0"), ("skipped", None, "a number from"),
        ("seed", True, "a whole number"), ("data", [], "an object"), ("data.shares", "some", "read or all"),
        ("data.content_sha256", 5, "a text"), ("tokenizer", "gpt2", "a text"), ("optimizer.kind", None, "a text"),
        ("optimizer.num_updates", 10**30, "the step 0"), ("precision", None, "an object"),
        ("ema", {"decay": 0.9}, "an average's decay"), ("ema", {"decay": 1, "since_step": 0}, "an average's decay"),
        ("ema", {"decay": 0.9, "since_step": 1}, "interval and steps up to 0"),
        ("precision.loss_scale", 0, "a number above 0"), ("precision.good_steps", "0", "a number from 0"),
    ],
)  # fmt: skip
def test_a_state_of_other_types_is_refused_by_key_and_file(key: str, value: object, rule: str) -> None:
    with pytest.raises(CheckpointError, match=rf"manifest.json does not hold the state of a run: state\.{key}.*{rule}"):
        check(changed={key: value})


def test_settings_that_were_not_typed_are_taken_from_the_run() -> None:
    with pytest.raises(CheckpointError) as info:
        check("run.dir=.", changed={"seed": 5})
    assert Way(("--from-run", ".")) in info.value.ways[0]
    with pytest.raises(CheckpointError) as info:
        check("train.seed=7")
    assert Way(("--from-run", ".")) not in info.value.ways[0]
