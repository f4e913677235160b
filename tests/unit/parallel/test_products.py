"""A linear's products are those of torch's own, and what is summed by a product is summed once, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmtrain.models.layers.output_heads import Head
from lmtrain.parallel import linear_forward_backward_products
from lmtrain.parallel.linear_forward_backward_products import (
    DeferredProduct,
    SummingLinear,
    add_product,
    apply_summing_linears,
    can_sum_products,
    defer_products,
    reset_gradient_totals,
    summing_modules,
)

ROWS, IN, OUT = 37, 24, 24  # because: the gradient of a square weight fits the wrong way round too


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def linear(kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    torch.manual_seed(1)
    plain = Head(IN, OUT - 3, OUT, bias=True) if kind is Head else nn.Linear(IN, OUT)
    return plain.bfloat16()


def run(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs, and the gradient of x."""
    x = x.detach().requires_grad_()
    y: Tensor = module(x)
    torch.autograd.backward(y.nan_to_num(neginf=0.0).square().sum())
    assert x.grad is not None
    return y.detach(), x.grad


def exact(module: SummingLinear, *xs: Tensor) -> Tensor:
    """The sum of the weight's gradients in float64, of outputs as they are rounded."""
    total = torch.zeros(OUT, IN, dtype=torch.float64)
    for x in xs:
        rows = 2 * module(x).detach().nan_to_num(neginf=0.0)
        total += rows.double().t() @ x.double()
    return total


def is_summed(total: Tensor | None, right: Tensor) -> bool:
    return total is not None and float((total - right).norm() / right.norm()) < 1e-6


@pytest.mark.parametrize("kind", [nn.Linear, Head])
def test_an_own_linear_is_the_linear_but_for_the_sum(kind: type[nn.Linear]) -> None:
    plain = linear(kind)
    own, x = SummingLinear(deepcopy(plain)), drawn(ROWS, IN)
    reset_gradient_totals([own], 2)
    for found, right in zip(run(own, x), run(plain, x), strict=True):
        assert torch.equal(found, right)
    assert own.weight.grad is None
    assert own.bias is not None
    assert plain.weight.grad is not None
    assert torch.equal(own.bias.grad, plain.bias.grad)  # type: ignore[arg-type]
    assert own.gradient_total is not None
    assert torch.equal(own.gradient_total.bfloat16(), plain.weight.grad)
    assert is_summed(own.gradient_total, exact(own, x))


def test_sums_are_exact_to_fp32_where_rounded_gradients_are_not() -> None:
    own, xs = SummingLinear(linear()), [drawn(ROWS, IN, seed=seed) for seed in range(16)]
    reset_gradient_totals([own], len(xs))
    rounded = torch.zeros(OUT, IN)
    for x in xs:
        run(own, x)
        rounded += exact(own, x).bfloat16()
    right = exact(own, *xs)
    assert is_summed(own.gradient_total, right)
    assert not is_summed(rounded, right)


def _overwrites(total: Tensor, rows: Tensor, inputs: Tensor) -> None:
    total.copy_(rows.t().float() @ inputs.float())


def _rounds(total: Tensor, rows: Tensor, inputs: Tensor) -> None:
    total.add_(rows.t() @ inputs)


def _transposes(total: Tensor, rows: Tensor, inputs: Tensor) -> None:
    total.addmm_(inputs.t().float(), rows.float())


@pytest.mark.parametrize("bug", [_overwrites, _rounds, _transposes])
def test_planted_bugs_are_noticed(bug: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_forward_backward_products, "_add_product", bug)
    own, xs = SummingLinear(linear()), [drawn(ROWS, IN, seed=seed) for seed in range(3)]
    reset_gradient_totals([own], len(xs))
    for x in xs:
        run(own, x)
    assert not is_summed(own.gradient_total, exact(own, *xs))


def test_microbatches_may_be_under_way_together() -> None:
    own, xs = SummingLinear(linear()), [drawn(ROWS, IN, seed=seed) for seed in range(3)]
    reset_gradient_totals([own], len(xs))
    losses = [own(x).square().sum() for x in xs]
    for loss in losses:
        torch.autograd.backward(loss)
    assert is_summed(own.gradient_total, exact(own, *xs))


def test_a_product_that_is_put_off_is_added_in_the_second_half() -> None:
    own, x, queue = SummingLinear(linear()), drawn(ROWS, IN), list[DeferredProduct]()
    reset_gradient_totals([own], 2)
    with defer_products(queue):
        run(own, x)
    assert own.gradient_total is not None
    assert not own.gradient_total.any()
    for work in queue:
        work()
    assert is_summed(own.gradient_total, exact(own, x))


def test_a_step_begins_at_zero_in_the_same_memory() -> None:
    own = SummingLinear(linear())
    reset_gradient_totals([own], 2)
    total = own.gradient_total
    run(own, drawn(ROWS, IN))
    reset_gradient_totals([own], 2)
    assert own.gradient_total is total
    assert total is not None
    assert not total.any()
    reset_gradient_totals([own], 1)  # nothing to add up: autograd is given the gradient
    run(own, drawn(ROWS, IN))
    assert own.gradient_total is None
    assert own.weight.grad is not None


def test_a_module_is_swapped_around_its_weights() -> None:
    model = nn.Sequential(nn.Linear(IN, OUT), nn.Tanh(), nn.Linear(OUT, IN))
    weights = dict(model.named_parameters())
    assert "2 linears" in apply_summing_linears(model)
    assert all(weights[name] is parameter for name, parameter in model.named_parameters())
    assert [type(module) for module in summing_modules(model)] == [SummingLinear, SummingLinear]


def test_half_precision_sums_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    on = [(d, t) for d in ("cpu", "cuda") for t in (torch.float32, torch.bfloat16, torch.float16)
          if can_sum_products(torch.device(d), t)]  # fmt: skip
    assert on == [("cuda", torch.bfloat16), ("cuda", torch.float16)]


@pytest.mark.parametrize(("capability", "sums"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((10, 0), True)])
def test_and_not_on_those_that_have_no_such_product(
    capability: tuple[int, int], sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert can_sum_products(torch.device("cuda", 0), torch.float16) == sums


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_in_a_compiled_block_the_sum_is_changed_in_place(backend: str) -> None:
    """No graph break, no copy of the sum, and microbatches under way together."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    block: Any = nn.Sequential(linear(), nn.GELU()).bfloat16()
    apply_summing_linears(block)
    own, xs = block[0], [drawn(ROWS, IN, seed=seed) for seed in range(3)]
    reset_gradient_totals([own], len(xs))
    memory = own.gradient_total.data_ptr()
    compiled: Any = torch.compile(block, fullgraph=True, dynamic=False, backend=backend)
    losses = [compiled(x).float().sum() for x in xs]
    for loss in losses:
        torch.autograd.backward(loss)
    right = torch.zeros_like(own.gradient_total)
    for x in xs:
        grad = torch.autograd.grad(nn.functional.gelu(y := own(x)).float().sum(), y)[0]
        add_product(right, grad, x)
    assert own.gradient_total.data_ptr() == memory
    assert own.weight.grad is None
    # because: fused, bf16 is rounded less often
    assert float((own.gradient_total - right).norm() / right.norm()) < 2e-3
    assert not torch._dynamo.utils.counters["inductor"]["possibly_missed_reinplacing_opportunities"]
