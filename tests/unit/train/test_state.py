"""Whether a checkpoint is of a run: settings that are newer than it are what they always were, others must agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmtrain.config.compose import compose
from lmtrain.data.order import Order
from lmtrain.data.training_data import TrainingData
from lmtrain.errors import CheckpointError
from lmtrain.tokenizer.train import train_wordpiece
from lmtrain.train.config import RunConfig
from lmtrain.train.preflight import Inputs
from lmtrain.train.state import check_same_run
from tests.layouts.toy_data import ToyMasked

WORDS = ["model=bert_tiny", "data=masked", "data.path=x", "run.dir=x"]


def check(*overrides: str, without: tuple[str, ...] = ()) -> None:
    """A run with these settings looks at a checkpoint of one without them, from which some are missing."""
    tokenizer = train_wordpiece(["a cat sat on a mat"], 40, lowercase=True)
    configs = [compose(RunConfig, [*WORDS, *words]) for words in ((), overrides)]
    models = [config.model.with_vocab(67) for config in configs]
    data = TrainingData(ToyMasked(), Order(96, seed=1), None, [], {"blend": None}, 0, 96)
    state: dict[str, Any] = {
        "model": {key: value for key, value in models[0].to_dict().items() if key not in without}, "data": {},
        "tokenizer": {"fingerprint": tokenizer.fingerprint}, "seed": 1234, "optimizer": {"kind": "adamw"}, "step": 0,
        "samples": 0,
    }  # fmt: skip
    check_same_run(Path("here"), state, configs[1], Inputs(models[1], tokenizer, data, None))


def test_a_checkpoint_may_be_older_than_a_setting() -> None:
    check()
    check(without=("activation", "head_activation"))
    with pytest.raises(CheckpointError, match=r"model\.activation is gelu_tanh, there gelu\."):
        check("model.activation=gelu_tanh", without=("activation", "head_activation"))


def test_all_that_differs_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"model\.width is 64, there 128; train\.seed is 7, there 1234\."):
        check("model.width=64", "train.seed=7")
