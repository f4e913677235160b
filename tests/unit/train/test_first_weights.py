"""The model of the weights that a new run starts from: which lengths its table of positions serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmtrain.config.compose_run_settings import compose
from lmtrain.errors import SettingsError
from lmtrain.models.model_settings import ModelSettings
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.check_weights_to_start_from import ForeignWeights, find_first_weights
from tests.unit.exchange.models import bert, gpt2, llama, tokenizer_for

CONFIG = compose(RunConfig, ["data.path=data", "checkpoint.init_from=weights"])


def check(run: ModelSettings, weights: ModelSettings) -> None:
    found = find_first_weights(CONFIG, run, tokenizer_for(run), ForeignWeights(Path("weights"), weights, None))
    assert found == Path("weights")


@pytest.mark.parametrize(
    ("run", "weights"),
    [
        (gpt2(seq_len=24, num_positions=40), gpt2()), (gpt2(), gpt2(seq_len=24, num_positions=40)),
        (bert(seq_len=24, num_positions=40), bert(seq_len=32, num_positions=40)), (llama(seq_len=24), llama()),
    ],
)  # fmt: skip
def test_a_table_of_as_many_rows_serves_every_length(run: ModelSettings, weights: ModelSettings) -> None:
    check(run, weights)


@pytest.mark.parametrize(
    ("run", "weights", "said"),
    [
        ({"seq_len": 24}, {}, "24 here and 40 there. Add model.num_positions=40."),
        ({"seq_len": 24}, {"seq_len": 9, "num_positions": 40}, "24 here and 40 there. Add model.num_positions=40."),
        ({"seq_len": 50}, {}, "50 here and 40 there. Add model.seq_len=40."),
        ({"seq_len": 50, "num_positions": 60}, {}, "40 there. Add model.num_positions=40 model.seq_len=40."),
        ({"num_positions": 60}, {"seq_len": 9}, "60 here and 9 there. Add model.num_positions=9 model.seq_len=9."),
    ],
)
def test_a_table_of_other_rows_is_refused_with_a_way_out(
    run: dict[str, Any], weights: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        check(gpt2(**run), gpt2(**weights))
    message = str(caught.value)
    assert "has a model with other weights: model.num_positions is" in message
    assert message.endswith(said)
