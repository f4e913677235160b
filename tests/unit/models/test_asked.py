"""The last block for the asked positions alone: the same hidden states as the whole block's, for less work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.batch import Batch
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings
from tests.layouts.family_models import FAMILY_MODELS
from tests.unit.models.first_weights import start

LENGTH, VOCAB = 24, 61
SIZE: dict[str, Any] = {"num_layers": 2, "width": 32, "num_heads": 4, "vocab_size": VOCAB, "seq_len": LENGTH}
ROTARY: dict[str, Any] = {
    "positions": "rotary", "norm": "rmsnorm", "activation": "silu", "gated": True, "num_kv_heads": 2,
}  # fmt: skip
MODELS: dict[str, ModelSettings] = {
    "gpt2": GPTSettings(**SIZE),
    "llama": GPTSettings(**SIZE, **ROTARY),
    "window": GPTSettings(**SIZE, window=5),
    "parallel": GPTSettings(**SIZE, parallel_block="one_norm"),
    "bert": BertSettings(**SIZE, norm_order="post"),
    "bert, norms before": BertSettings(**SIZE, norm_order="pre"),
    **FAMILY_MODELS,
}


def model_of(settings: ModelSettings) -> Any:
    model: Any = settings.build()
    start(model, 1)
    for index, parameter in enumerate(model.parameters()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
        parameter.data.add_(noise, alpha=0.1)
    return model.eval()


def batch_of(*, packed: bool) -> tuple[Batch, Tensor]:
    """Rows that ask for 0, 1 and 7 positions, scattered."""
    tokens_BT = torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    is_query_BT = torch.zeros(3, LENGTH, dtype=torch.bool)
    is_query_BT[1, LENGTH - 1] = True
    is_query_BT[2, [0, 3, 4, 9, 15, 20, 22]] = True
    batch = Batch(tokens_BT=tokens_BT, labels_BT=tokens_BT)
    if packed:
        at = torch.arange(LENGTH).expand(3, -1)
        batch = replace(batch, documents_BT=at // 10, positions_BT=at % 10)
    return batch, is_query_BT


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_the_asked_positions_are_those_of_the_whole_block(kind: str, packed: bool) -> None:
    model, (batch, is_query_BT) = model_of(MODELS[kind]), batch_of(packed=packed)
    rows: list[tuple[int, ...]] = []
    for block in model.blocks.values():
        block.mlp.register_forward_pre_hook(lambda _, given: rows.append(tuple(given[0].shape[:2])))
    found = model(replace(batch, is_query_BT=is_query_BT))
    assert rows == [(3, LENGTH), (3, 7)]
    torch.testing.assert_close(found[is_query_BT], model(batch)[is_query_BT], rtol=1e-6, atol=2e-6)


@torch.no_grad()
def test_more_than_half_is_worked_out_whole() -> None:
    model, (batch, _) = model_of(MODELS["gpt2"]), batch_of(packed=False)
    is_query_BT = torch.ones_like(batch.tokens_BT, dtype=torch.bool)
    assert torch.equal(model(replace(batch, is_query_BT=is_query_BT)), model(batch))
    is_query_BT[:, : LENGTH // 2 - 1] = False
    assert torch.equal(model(replace(batch, is_query_BT=is_query_BT)), model(batch))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_only_the_last_of_several_stages_leaves_positions_out(kind: str) -> None:
    """The blocks behind another stage's last one look at all of them."""
    whole, first, last = (model_of(MODELS[kind]) for _ in range(3))
    first.cut(range(1), first=True, last=False)
    last.cut(range(1, 2), first=False, last=True)
    batch, is_query_BT = batch_of(packed=False)
    asking = replace(batch, is_query_BT=is_query_BT)
    found = last(asking, first(asking, None))
    torch.testing.assert_close(found[is_query_BT], whole(batch)[is_query_BT], rtol=1e-6, atol=2e-6)


@torch.no_grad()
def test_a_block_of_another_kind_may_do_all() -> None:
    model, (batch, is_query_BT) = model_of(MODELS["gpt2"]), batch_of(packed=False)
    whole = model(batch)
    last = model.blocks["1"]
    whole_block = last.forward
    last.forward = lambda x_BTD, around: whole_block(x_BTD, replace(around, query_positions_BQ=None))
    assert torch.equal(model(replace(batch, is_query_BT=is_query_BT)), whole)
