"""Dropout over several ranks: the same where they hold the same activation, different where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmtrain.models.layers.attention import DotProduct
from lmtrain.parallel.blocks.dropout_random_numbers import DropoutSeeds, Microbatch, RankDropoutCore, apply_rank_dropout
from lmtrain.parallel.mesh import Axis
from lmtrain.runtime.derive_random_seeds import derive_seed
from tests.layouts.workers import Pool
from tests.unit.parallel.cut_models import GPT2, batch_of, cut, uncut, world_axis

DROPPING = GPT2 | {"dropout": 0.5}


def noise_of(*, tp: int = 0, num_tp: int = 1, dp: int = 0, num_dp: int = 1, sequence: bool = False) -> DropoutSeeds:
    axes = Axis(num_tp, tp, None), Axis(num_dp, dp, None)
    return DropoutSeeds(7, *axes, sequence_parallel=sequence, uses_dropout=True)


def drawn() -> list[float]:
    """What torch's own stream gives next."""
    values: list[float] = torch.rand(8).tolist()
    return values


def entered(noise: DropoutSeeds, step: int, index: int) -> list[float]:
    noise.seed_forward(step, index)
    return drawn()


def test_one_process_draws_by_step_and_microbatch() -> None:
    torch.manual_seed(derive_seed(7, "dropout", 3, 1))
    assert drawn() == entered(noise_of(), 3, 1)


def test_two_copies_draw_as_one_process_with_as_many_microbatches() -> None:
    """So no mask repeats across dp."""
    alone = [entered(noise_of(), 3, index) for index in range(4)]
    copies = [entered(noise_of(dp=dp, num_dp=2), 3, index) for index in range(2) for dp in range(2)]
    assert copies == alone
    assert len({tuple(values) for values in alone}) == 4


@pytest.mark.parametrize("sequence", [False, True])
def test_torchs_own_stream_agrees_over_tp_where_the_sequence_is_whole(sequence: bool) -> None:
    first, second = (entered(noise_of(tp=tp, num_tp=2, sequence=sequence), 0, 0) for tp in range(2))
    assert (first == second) is not sequence


def test_a_resumed_step_draws_the_same_again() -> None:
    noise = noise_of(tp=1, num_tp=2, sequence=True)
    first = entered(noise, 5, 0)
    assert entered(noise, 6, 0) != first
    assert entered(noise, 5, 0) == first


def core_mask(noise: DropoutSeeds, path: str = "blocks.0.attention.core") -> Tensor:
    """Which weights a core dropped: with equal scores and values of one position each they are its output."""
    core = RankDropoutCore(DotProduct(0.5, causal=False), noise, path).train()
    zeros, ones = torch.zeros(2, 3, 8, 8), torch.eye(8).expand(2, 3, 8, 8)
    mask: Tensor = core(zeros, zeros, ones, None) > 0
    return mask


def test_cores_differ_over_everything_that_tells_them_apart() -> None:
    masks = []
    for tp, dp, step, path in [(0, 0, 0, "a"), (1, 0, 0, "a"), (0, 1, 0, "a"), (0, 0, 1, "a"), (0, 0, 0, "b")]:
        noise = noise_of(tp=tp, num_tp=2, dp=dp, num_dp=2)
        noise.seed_forward(step, 0)
        masks.append(core_mask(noise, path))
        assert torch.equal(core_mask(noise, path), masks[-1])
        assert 0.2 < masks[-1].float().mean() < 0.8
    for i, mask in enumerate(masks):
        assert not any(torch.equal(mask, other) for other in masks[:i])


def test_a_core_leaves_torchs_own_stream_where_it_was() -> None:
    noise = noise_of(num_tp=2)
    expected = entered(noise, 0, 0)
    noise.seed_forward(0, 0)
    core_mask(noise)
    assert drawn() == expected


def test_a_core_that_fails_leaves_it_too() -> None:
    noise = noise_of(num_tp=2)
    expected = entered(noise, 0, 0)
    noise.seed_forward(0, 0)
    core = RankDropoutCore(DotProduct(0.5, causal=False), noise, "core").train()
    with pytest.raises(RuntimeError):
        core(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 4), None)
    assert drawn() == expected


def test_contexts_bring_back_the_microbatch_they_were_made_in() -> None:
    noise = noise_of(num_tp=2)
    noise.seed_forward(2, 1)
    forward, recompute = noise.contexts()
    noise.seed_forward(2, 2)
    with forward:
        assert noise.current == Microbatch(2, 2)
    with recompute:
        assert noise.current == Microbatch(2, 1)
    assert noise.current == Microbatch(2, 2)


@pytest.mark.parametrize(("sequence", "num_tp", "swapped"), [(False, 1, 0), (False, 2, 2), (True, 2, 0)])
def test_cores_are_swapped_only_where_heads_alone_are_split(sequence: bool, num_tp: int, swapped: int) -> None:
    model = uncut(DROPPING)
    apply_rank_dropout(model, noise_of(num_tp=num_tp, sequence=sequence))
    assert sum(isinstance(module, RankDropoutCore) for module in model.modules()) == swapped


def hidden_and_gradients(settings: dict[str, Any], sequence: bool, recompute: bool) -> dict[str, Any]:
    """Of two microbatches whose backwards come after both forwards, as in a pipeline."""
    axis = world_axis()
    model = cut(settings, uncut(settings), axis, sequence=sequence)
    noise = DropoutSeeds(7, axis, Axis(1, 0, None), sequence_parallel=sequence, uses_dropout=True)
    apply_rank_dropout(model, noise)
    if recompute:
        for block in model.blocks.values():
            recompute_in_place(block, noise)
    batch, hiddens = batch_of(settings), []
    for index in range(2):
        noise.seed_forward(4, index)
        hiddens.append(model(batch))
    noise.seed_forward(9, 0)
    for hidden in hiddens:
        torch.autograd.backward(hidden, torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden))
    gradients = {name: parameter.grad.flatten().tolist() for name, parameter in model.blocks["0"].named_parameters()}
    return {"hidden": hiddens[0].flatten().tolist(), "second": hiddens[1].flatten().tolist(), "gradients": gradients}


def recompute_in_place(block: Any, noise: DropoutSeeds) -> None:
    forward = block.forward
    block.forward = lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False, context_fn=noise.contexts)


@pytest.mark.parametrize("sequence", [False, True])
def test_recompute_draws_the_same_bits(pool: Pool, sequence: bool) -> None:
    function, arguments = f"{__name__}:hidden_and_gradients", {"settings": DROPPING, "sequence": sequence}
    kept = pool.run(function, 2, arguments | {"recompute": False})
    assert pool.run(function, 2, arguments | {"recompute": True}) == kept
    assert (kept[0]["hidden"] == kept[1]["hidden"]) is not sequence  # whole: every dropout after a sum agrees over tp
    assert kept[0]["hidden"] != kept[0]["second"]


def residual_masks() -> list[list[bool]]:
    """What each rank drops of a residual of ones, gathered from all ranks, under sequence parallelism."""
    axis = world_axis()
    model = cut(DROPPING, uncut(DROPPING), axis, sequence=True)
    noise = DropoutSeeds(7, axis, Axis(1, 0, None), sequence_parallel=True, uses_dropout=True)
    noise.seed_forward(0, 0)
    mask = model.blocks["0"].mlp.dropout(torch.ones(2, 6, 24)) > 0
    masks = [torch.empty_like(mask) for _ in range(axis.size)]
    dist.all_gather(masks, mask)
    return [each.flatten().tolist() for each in masks]


def test_cuts_of_the_sequence_drop_different_numbers(pool: Pool) -> None:
    first, second = pool.run(f"{__name__}:residual_masks", 2)[0]
    assert first != second
