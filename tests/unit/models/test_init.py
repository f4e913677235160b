"""First weights depend on seed and name alone: not on order, device, padding or ties."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch

from lmtrain.models import initial_weights
from lmtrain.models.gpt import GPT, build
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.initial_weights import apply_ties, draw_parameter
from lmtrain.spec import Start
from tests.unit.models.first_weights import start


def settings(**changes: Any) -> GPTSettings:
    values: dict[str, Any] = {"num_layers": 4, "width": 64, "num_heads": 4, "seq_len": 16, "vocab_size": 1000}
    return GPTSettings(**(values | changes))


def weights(model: GPT) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def started(seed: int = 5, **changes: Any) -> dict[str, torch.Tensor]:
    model = build(settings(**changes))
    start(model, seed)
    return weights(model)


def test_meta_construction_gives_the_same_weights() -> None:
    with torch.device("meta"):
        model = build(settings())
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    apply_ties(model)
    torch.manual_seed(123)  # the global generator plays no part
    start(model, 5)
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.token.weight")
    expected = started()
    assert weights(model).keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in weights(model).items())


def test_order_does_not_matter_and_names_do() -> None:
    whole, stage = started(), build(settings())
    for layer in ("0", "1", "3"):
        del stage.blocks[layer]
    stage.embedding = None
    start(stage, 5)
    for name, value in weights(stage).items():
        # a stage without the embedding holds the tied weight under the head's name
        assert torch.equal(value, whole[name.replace("head", "embedding.token")]), name
    assert not torch.equal(whole["blocks.0.mlp.up.weight"], whole["blocks.1.mlp.up.weight"])
    assert not torch.equal(whole["blocks.0.mlp.up.weight"], started(6)["blocks.0.mlp.up.weight"])


def whole(name: str, shape: tuple[int, ...], start: Start, seed: int = 5) -> torch.Tensor:
    blocks = list(draw_parameter(name, shape, start, seed))
    firsts = [0, *accumulate(len(block) for _, block in blocks)]
    assert [first for first, _ in blocks] == firsts[:-1]
    return torch.cat([block for _, block in blocks])


def test_any_slice_can_be_had_from_the_name() -> None:
    model = build(settings())
    start(model, 5)
    name = "blocks.2.mlp.up.weight"
    value = whole(name, (256, 64), model.starts()[name])
    assert torch.equal(value[128:], model.get_parameter(name)[128:])


SHAPES = [(5,), (16,), (37,), (160,), (1000,), (3, 3), (16, 8), (33, 7), (50, 3), (97, 24), (8, 500), (65, 3, 5)]


def differ(monkeypatch: pytest.MonkeyPatch, rows: int, block_numbers: int) -> list[tuple[int, ...]]:
    """Shapes whose blocks are not the numbers that torch draws for the whole in one call."""
    expected = {shape: whole("a", shape, Start(std=0.5)) for shape in SHAPES}
    assert all(len(list(draw_parameter("a", shape, Start(std=0.5), 5))) == 1 for shape in SHAPES)
    monkeypatch.setattr(initial_weights, "_ROWS", rows)
    monkeypatch.setattr(initial_weights, "_BLOCK_NUMBERS", block_numbers)
    assert max(len(list(draw_parameter("a", shape, Start(std=0.5), 5))) for shape in SHAPES) > 5
    return [shape for shape in SHAPES if not torch.equal(whole("a", shape, Start(std=0.5)), expected[shape])]


@pytest.mark.parametrize("block_numbers", [1, 40, 300])
def test_blocks_are_the_numbers_of_the_whole(monkeypatch: pytest.MonkeyPatch, block_numbers: int) -> None:
    assert not differ(monkeypatch, 16, block_numbers)


def test_blocks_of_other_sizes_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert differ(monkeypatch, 7, 40)


def test_padding_starts_at_zero_and_changes_nothing_else() -> None:
    plain, padded = started(vocab_multiple=1), started(vocab_multiple=128)
    assert padded["embedding.token.weight"].shape == (1024, 64)
    assert (padded["embedding.token.weight"][1000:] == 0).all()
    assert torch.equal(padded["embedding.token.weight"][:1000], plain["embedding.token.weight"])


def test_gpt2_deviations() -> None:
    values = started(width=128)
    for name, value in values.items():
        if name.endswith("bias"):
            assert (value == 0).all(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            shrink = math.sqrt(2 * 4) if name.endswith(("attention.out.weight", "mlp.down.weight")) else 1.0
            true_rows = value[:1000]
            assert abs(float(true_rows.std()) / (0.02 / shrink) - 1) < 0.05, name
            assert abs(float(true_rows.mean())) < 0.002, name


def test_half_precision_is_the_rounded_fp32() -> None:
    model = build(settings()).bfloat16()
    start(model, 5)
    expected = started()
    assert all(torch.equal(value, expected[name].bfloat16()) for name, value in weights(model).items())


def test_it_is_constant_without_deviation() -> None:
    assert whole("norm.weight", (3,), Start(mean=1.0)).tolist() == [1, 1, 1]


def test_ties_come_back_after_leaving_meta() -> None:
    with torch.device("meta"):
        model = build(settings())
    model.to_empty(device="cpu")
    apply_ties(model)
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.token.weight")
