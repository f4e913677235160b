"""What settings say of a decoder's size equals the model itself, for every word: weights, parameters and FLOPs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lmtrain.batch import Batch
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.gpt import GPT, build
from lmtrain.models.gpt_settings import GPTSettings
from tests.unit.models.decoders import SIZES, each_word, random_decoders

ALONE, NUM_RANDOM, ROWS = each_word(), 200, 2
SEQ_LEN: int = SIZES["seq_len"]
MIXED = [settings for _, settings in random_decoders(3)]  # with and without a gate, grouped heads, a tied table
SHARED = {key: size for key, size in SIZES.items() if key != "head_width"}
BERTS = [BertSettings(**SHARED, norm_order="pre"), BertSettings(**SHARED, norm_order="post", pair_head=False)]


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


def products(settings: GPTSettings | BertSettings, num_scored: int = ROWS * SEQ_LEN) -> int:
    """Return the FLOPs of the products of a forward, as torch counts them; masks save none."""
    batch = Batch(*torch.zeros(2, ROWS, SEQ_LEN, dtype=torch.int64, device="meta"))
    with torch.device("meta"):
        model = settings.build()
    with FlopCounterMode(display=False) as counter:
        model.logits(model(batch).flatten(0, 1)[:num_scored])
    total: int = counter.get_total_flops()
    return total


def in_training(settings: GPTSettings | BertSettings, share: float = 1.0) -> float:
    """Return the FLOPs that the settings say of a batch's training; a window is computed in full here."""
    shape = replace(settings.shape, num_window_layers=0)
    return ROWS * SEQ_LEN * shape.flops_per_token(scored_share=share)


@pytest.mark.wide
@pytest.mark.parametrize("settings", [case for _, case in ALONE], ids=[name for name, _ in ALONE])
def test_flops_are_those_of_the_products(settings: GPTSettings) -> None:
    """Three times a forward's: backward has two products for each."""
    assert in_training(settings) == pytest.approx(3 * products(settings), rel=1e-12)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("settings", "num_scored"), [*((case, ROWS * SEQ_LEN) for case in MIXED), *zip(BERTS, (7, 31), strict=True)]
)
def test_so_are_those_of_random_decoders_and_of_encoders_that_score_a_share(
    settings: GPTSettings | BertSettings, num_scored: int
) -> None:
    """The linear in front of an encoder's logits is no part of the published formula."""
    dense = 2 * num_scored * settings.width**2 if isinstance(settings, BertSettings) else 0
    counted = products(settings, num_scored) - dense
    assert in_training(settings, num_scored / (ROWS * SEQ_LEN)) == pytest.approx(3 * counted, rel=1e-12)


@pytest.mark.parametrize("settings", [*MIXED, *BERTS])
def test_flops_follow_from_the_matrices_of_the_modules(settings: GPTSettings | BertSettings) -> None:
    """Six a weight and token, six for each number of the table that scores, and twelve for each pair and number."""
    with torch.device("meta"):
        weights = dict(settings.build().named_parameters())
    matrices = {name: w for name, w in weights.items() if name.startswith("blocks.") and w.ndim == 2}
    pairs = SEQ_LEN * sum(w.shape[1] for name, w in matrices.items() if name.endswith("attention.out.weight"))
    table = 0.15 * weights["embedding.token.weight"].numel()
    expected = 6 * (sum(w.numel() for w in matrices.values()) + table) + 12 * pairs
    assert in_training(settings, 0.15) == pytest.approx(ROWS * SEQ_LEN * expected, rel=1e-12)


@pytest.mark.parametrize(("pattern", "windows"), [(None, 5), ("wf", 3), ("ffw", 1), ("F", 0)])
def test_layers_with_a_window_save_what_lies_beyond_it(pattern: str | None, windows: int) -> None:
    settings = next(
        replace(case, layer_pattern=pattern, positions="rotary") for name, case in ALONE if name == "window=7"
    )
    in_full = replace(settings.shape, num_window_layers=0)
    saved = in_full.flops_per_token() - settings.shape.flops_per_token()
    assert saved == pytest.approx(windows * 12 * 6 * 8 * (24 - 7))
