"""Every gradient, of every model, in every precision, with every recompute, eager and compiled, against fp64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from lmtrain.kernels import activations, triton_availability
from lmtrain.kernels.cross_entropy import logits_gradient as right_gradient
from lmtrain.models.layers import attention
from lmtrain.models.layers.rotary import Rotation
from lmtrain.models.objectives import cross_entropy
from lmtrain.parallel import linear_forward_backward_products
from lmtrain.parallel.weights import master_weights as precision_room
from lmtrain.placement.attention_activation_bytes import uses_block_masks
from tests.gpu.gradients import CPU, Limits, by_lmtrain
from tests.layouts.bugs import replaced
from tests.layouts.cases import ALL_MODELS, FACTORS, HEADED_MODELS, MODELS, Case
from tests.marks import slow, wide

RECOMPUTES = ("none", "attention", "operators", "full")
# those that a CPU computes in a moment, with each value once; the rest is wide
FEW = {"tied-fp32-micro4", "gqa-bf16-micro4", "bert-full-fp16-micro4", "window-operators-bf16-micro4"}
FEW |= {"postnorm-attention-fp32-micro4", "parallel-bf16-micro4", "untied-full-bf16-micro4"}
# and on a GPU, whose kernels take their heads
HEADED = {f"{model}-bf16-micro4" for model in HEADED_MODELS}


def named(model: str, recompute: str, precision: str, *, compiled: bool) -> str:
    words = [model] + [recompute] * (recompute != "none") + [precision, "micro4"] + ["compile"] * compiled
    return "-".join(words)


OF_ALL = [
    *product(MODELS, RECOMPUTES, FACTORS["precision"]),
    *product(HEADED_MODELS, RECOMPUTES, ("bf16",)),
    *product(HEADED_MODELS, ("none",), ("fp32", "fp16")),
]
EAGER, COMPILED = ([named(*values, compiled=compiled) for values in OF_ALL] for compiled in (False, True))


@pytest.fixture(scope="module")
def limits() -> Limits:
    return Limits()


def marks(name: str, few: set[str]) -> Any:
    return () if name.removesuffix("-compile") in few else pytest.mark.wide


ON_EITHER = [
    pytest.param(device, name, marks=marks(name, few))
    for device, few in (("cpu", FEW), ("cuda", FEW | HEADED))
    for name in EAGER
]


@pytest.mark.parametrize(("device", "name"), ON_EITHER, indirect=["device"])
def test_a_gradient_is_as_right_as_plain_torchs(device: torch.device, name: str, limits: Limits) -> None:
    case = Case.named(name)
    wrong = limits.wrong(case, device, by_lmtrain(case, device))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name, FEW | HEADED)) for name in COMPILED])
def test_a_compiled_one_too_on_a_gpu(name: str, gpu: torch.device, limits: Limits) -> None:
    """because: some shapes have had wrong gradients of norms from a compiler (pytorch issue 193061)"""
    case = Case.named(name)
    wrong = limits.wrong(case, gpu, by_lmtrain(case, gpu))
    assert not wrong, "\n".join(wrong)


def test_some_have_heads_that_kernels_take() -> None:
    """On a GPU cuDNN's or flash attention, and masks of blocks."""
    assert [name for name in ALL_MODELS if uses_block_masks(ALL_MODELS[name], on_gpu=True)] == [*HEADED_MODELS]


@pytest.mark.parametrize("name", [*wide("gqa-full-bf16-micro4-compile"), *slow("postnorm-fp32-micro4-compile")])
def test_and_two_on_a_cpu(name: str, limits: Limits) -> None:
    case = Case.named(name)
    wrong = limits.wrong(case, CPU, by_lmtrain(case, CPU))
    assert not wrong, "\n".join(wrong)


def turned_in_half(x_BTHK: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    cos, sin = (one.to(torch.bfloat16) for one in rotation)
    left, right = x_BTHK.to(torch.bfloat16).chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).type_as(x_BTHK)


def half_as_much_again(master: Any) -> Any:
    def hook(work: torch.Tensor) -> None:
        assert work.grad is not None
        more = work.grad.float() * (1.0 if master.grad is None else 1.5)
        master.grad = more if master.grad is None else master.grad + more
        work.grad = None

    return hook


@pytest.mark.parametrize(
    ("owner", "attribute", "bug", "name"),
    [
        (attention, "rotate", turned_in_half, "gqa-fp32-micro4"),
        *wide(
            (precision_room, "_make_gradient_hook", half_as_much_again, "tied-bf16-micro4"),
            (precision_room, "_make_gradient_hook", half_as_much_again, "bert-fp16-micro4"),
        ),
    ],
)
def test_the_limit_can_be_gone_beyond(
    owner: Any, attribute: str, bug: Any, name: str, device: torch.device, limits: Limits
) -> None:
    case = Case.named(name)
    assert not limits.wrong(case, device, by_lmtrain(case, device)), "without the bug"
    with replaced(owner, attribute, bug):
        assert limits.wrong(case, device, by_lmtrain(case, device))


def bias_twice(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    grad, grad_bias = right_backward(*given)
    return grad, 2 * grad_bias


def label_of_the_next_row(logits_NV: torch.Tensor, column_N: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    return right_gradient(logits_NV, column_N.roll(1), *rest)


def product_over_the_sum(total: torch.Tensor, rows: torch.Tensor, inputs: torch.Tensor) -> None:
    total.zero_()
    right_add(total, rows, inputs)


right_backward, right_add = activations.backward, linear_forward_backward_products._add_product


@pytest.mark.parametrize(
    ("owner", "attribute", "bug", "name"),
    [
        (activations, "backward", bias_twice, "tied-fp32-micro4"),
        *wide(
            (cross_entropy, "logits_gradient", label_of_the_next_row, "gqa-fp32-micro4"),
            (linear_forward_backward_products, "_add_product", product_over_the_sum, "tied-bf16-micro4"),
        ),
    ],
)
def test_what_is_measured_with_takes_no_kernel(
    owner: Any, attribute: str, bug: Any, name: str, device: torch.device
) -> None:
    """Nothing is known from before: what is compared with is worked out with the bug at hand."""
    case, here = Case.named(name), {device.type}
    with (
        replaced(triton_availability, "FUSED_DEVICES", here),
        replaced(linear_forward_backward_products, "SUMMING_DEVICES", here),
    ):
        assert not Limits().wrong(case, device, by_lmtrain(case, device)), "without the bug"
        with replaced(owner, attribute, bug):
            assert Limits().wrong(case, device, by_lmtrain(case, device))
