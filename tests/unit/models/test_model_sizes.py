"""What settings say of a decoder's size equals the model itself, for every word: weights, parameters and FLOPs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lmtrain.batch import Batch
from lmtrain.models.gpt import GPT, build
from lmtrain.models.gpt_settings import GPTSettings
from tests.unit.models.decoders import each_word, random_decoders

ALONE, NUM_RANDOM, ROWS = each_word(), 200, 2


def on_meta(settings: GPTSettings) -> GPT:
    with torch.device("meta"):
        return build(settings)


def differences(name: str, settings: GPTSettings) -> list[str]:
    """Return what the model has otherwise than its settings say."""
    built = {key: tuple(p.shape) for key, p in on_meta(settings).named_parameters()}
    problems = [f"{name}: {key} {shape}" for key, shape in settings.weights().items() ^ built.items()]
    count = sum(map(math.prod, built.values()))
    return problems + ([] if settings.num_parameters == count else [f"{name}: {settings.num_parameters} for {count}"])


def test_weights_of_each_word_are_counted_to_the_unit() -> None:
    assert not [problem for case in ALONE for problem in differences(*case)]


@pytest.mark.wide
def test_so_are_those_of_random_combinations() -> None:
    assert not [problem for case in random_decoders(NUM_RANDOM) for problem in differences(*case)]


def products(settings: GPTSettings) -> float:
    """Return the FLOPs per token of the products of a forward, as torch counts them; masks save none."""
    length = settings.seq_len
    batch = Batch(*torch.zeros(2, ROWS, length, dtype=torch.int64, device="meta"))
    model = on_meta(settings)
    with FlopCounterMode(display=False) as counter:
        model.logits(model(batch))
    total: int = counter.get_total_flops()
    return total / (ROWS * length)


@pytest.mark.wide
@pytest.mark.parametrize("settings", [case for _, case in ALONE], ids=[name for name, _ in ALONE])
def test_flops_are_those_of_the_products(settings: GPTSettings) -> None:
    """Three times a forward's: backward has two products for each. A window is computed in full here."""
    in_full = replace(settings.shape, num_window_layers=0)
    assert in_full.flops_per_token() == pytest.approx(3 * products(settings), rel=0.03)


@pytest.mark.parametrize(("pattern", "windows"), [(None, 5), ("wf", 3), ("ffw", 1), ("F", 0)])
def test_layers_with_a_window_save_what_lies_beyond_it(pattern: str | None, windows: int) -> None:
    settings = next(
        replace(case, layer_pattern=pattern, positions="rotary") for name, case in ALONE if name == "window=7"
    )
    in_full = replace(settings.shape, num_window_layers=0)
    saved = in_full.flops_per_token() - settings.shape.flops_per_token()
    assert saved == pytest.approx(windows * 12 * 6 * 8 * (24 - 7))
