"""What stays in fp32 under bf16 and fp16: rotation, norms, softmax, sums of losses, sums of gradients.

A layout is compared with one process, which would round alike; so each of these is compared with float64 here, and a
half-precision version of it, planted, is found by the very same comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lmtrain.batch import Batch
from lmtrain.kernels import cross_entropy as kernels_room
from lmtrain.layout import Layout
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.layers.attention import DotProduct, build_mask
from lmtrain.models.layers.norms import build_norm
from lmtrain.models.layers.rotary import Rotation, build_rotation, rotate
from lmtrain.models.objectives import cross_entropy as loss_room
from lmtrain.models.objectives.cross_entropy import count_hits, cross_entropy_plain, cross_entropy_sum
from lmtrain.models.rotary_settings import RotarySettings
from lmtrain.parallel import tensor_parallel as tensor_room
from lmtrain.parallel.mesh import Axis, build_mesh
from lmtrain.parallel.weights import fsdp_sharding as sharding_room
from lmtrain.parallel.weights import master_weights as precision_room
from lmtrain.parallel.weights.fsdp_sharding import ShardedWeights, apply_data_parallel
from lmtrain.parallel.weights.master_weights import MasterWeights
from lmtrain.schedules.table import Action, Kind

HALVES = [torch.bfloat16, torch.float16]
ROUNDED_ONCE = 0.55  # of a unit in the last place; because: fp32's own error comes on top of the half


def normal(*shape: int, dtype: torch.dtype, size: float = 1.0, seed: int = 3) -> Tensor:
    return (size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def last_places(found: Tensor, exact: Tensor, floor: float) -> float:
    """The largest error, in units of the last place that `found` has; values below the floor count as of its size."""
    size = exact.abs().clamp(min=floor)
    unit = torch.finfo(found.dtype).eps * 2.0 ** size.log2().floor()
    return float(((found.double() - exact).abs() / unit).max())


# rotation


def exactly_rotated(x_BTHK: Tensor, base: float) -> Tensor:
    length, _, width = x_BTHK.shape[-3:]
    pairs = torch.arange(0, width, 2, dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None, None] / base ** (pairs / width)
    left, right = x_BTHK.double().chunk(2, dim=-1)
    return torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), dim=-1)


def angles_in_half(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> Rotation:
    pairs = torch.arange(0, width, 2, dtype=dtype)
    angles = positions.to(dtype)[:, None, None] * (1.0 / base ** (pairs / width))
    return Rotation(angles.cos().float(), angles.sin().float())


def turned_in_half(x_BTHK: Tensor, rotation: Rotation) -> Tensor:
    left, right = x_BTHK.chunk(2, dim=-1)
    cos, sin = (one.to(x_BTHK.dtype) for one in rotation)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


@pytest.mark.parametrize("dtype", HALVES)
def test_rotation(dtype: torch.dtype) -> None:
    x_BTHK, positions, base = normal(1, 256, 2, 16, dtype=dtype), torch.arange(256), 10000.0
    exact = exactly_rotated(x_BTHK, base)

    def off(found: Tensor) -> float:
        return last_places(found, exact, 0.5)  # because: fp32's angles are off by 1e-5 at position 256

    rotation = build_rotation(positions, 16, RotarySettings(rotary_base=base), length=256)
    assert rotation.cos.dtype is rotation.sin.dtype is torch.float32
    assert off(rotate(x_BTHK, rotation)) <= ROUNDED_ONCE
    assert off(turned_in_half(x_BTHK, rotation)) > ROUNDED_ONCE
    assert off(rotate(x_BTHK, angles_in_half(positions, 16, base, dtype))) > ROUNDED_ONCE


# norms


def exactly_normed(kind: str, x: Tensor, norm: Any) -> Any:
    x, weight = x.double(), norm.weight.double()
    if kind == "rmsnorm":
        return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    bias = 0.0 if norm.bias is None else norm.bias.double()
    return centred * (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * weight + bias


def normed_in_half(kind: str, x: Tensor, norm: Any) -> Any:
    if kind == "rmsnorm":
        return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight + norm.bias


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm(kind: Literal["layernorm", "rmsnorm"], dtype: torch.dtype) -> None:
    """Its own values, and the gradient of what it is given, which takes the statistics once more."""
    norm = build_norm(kind, 512, eps=1e-5, bias=True).to(dtype)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(normal(512, dtype=dtype, seed=5))
    # because: a mean far from 0 is what half-precision statistics lose
    x = (normal(64, 512, dtype=dtype) + 2.0).requires_grad_()
    exact = exactly_normed(kind, x, norm)
    weights = normal(64, 512, dtype=dtype, seed=7)
    (exact_gradient,) = torch.autograd.grad(exact, x, weights.double())

    def off(found: Tensor) -> tuple[float, float]:
        (gradient,) = torch.autograd.grad(found, x, weights)
        apart = (gradient.double() - exact_gradient.double()).norm() / exact_gradient.double().norm()
        return last_places(found.detach(), exact.detach(), 0.5), float(apart) / torch.finfo(dtype).eps

    values, gradients = off(norm(x))
    assert values <= ROUNDED_ONCE
    assert gradients <= 0.42  # because: on a CPU torch hands statistics to the backward in half, which costs 0.37
    values, gradients = off(normed_in_half(kind, x, norm))
    assert values > ROUNDED_ONCE
    assert gradients > 0.42


# softmax


def attended_in_half(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dropout", [0.0, 1e-12])  # the second takes the kernel that can drop, and drops nothing
@pytest.mark.parametrize("num_keys", [4, 2])
@pytest.mark.parametrize("window", [None, 100])
def test_softmax(dtype: torch.dtype, dropout: float, num_keys: int, window: int | None) -> None:
    """Scores as large as 50: half precision would round them by a tenth, and each weight by a tenth of itself."""
    q, k, v = (
        normal(1, heads, 192, 16, dtype=dtype, size=size, seed=seed)
        for heads, size, seed in ((4, 4.0, 1), (num_keys, 4.0, 2), (num_keys, 1.0, 3))
    )
    mask = build_mask(192, causal=True, window=window, documents_BT=None, device=q.device)
    seen = mask if mask is not None else torch.ones(192, 192, dtype=torch.bool).tril()
    k4, v4 = (x.repeat_interleave(4 // num_keys, dim=1) for x in (k, v))
    scores = q.double() @ k4.double().transpose(-1, -2) / math.sqrt(16)
    exact = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v4.double()
    core = DotProduct(dropout, causal=True).train()
    # because: weights are rounded before their product with v, as on a GPU
    assert last_places(core(q, k, v, mask), exact, 1.0) <= 2.0
    assert last_places(attended_in_half(q, k4, v4, seen), exact, 1.0) > 2.0


# the loss

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "eager": cross_entropy_sum,
    "for a compiler": cross_entropy_plain,
    "cut over tp": partial(tensor_room.cross_entropy_sum, axis=Axis()),
}


def lost_in_half(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def off_by(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> tuple[float, float]:
    """Of a sum over many rows: relative error of the sum, last places of the gradient of the scores."""
    logits = normal(512, 300, dtype=dtype, size=4.0).requires_grad_()
    labels = torch.randint(0, 300, (512,), generator=torch.Generator().manual_seed(1))
    whole = logits.detach().double().requires_grad_()
    exact = F.cross_entropy(whole, labels, reduction="sum")
    (exact_gradient,) = torch.autograd.grad(exact, whole)
    found = loss(logits, labels)
    (gradient,) = torch.autograd.grad(found, logits)
    return abs(found.double() - exact).item() / exact.item(), last_places(gradient, exact_gradient, 1e-3)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary that is cut into one part needs nobody to tell it the others'."""
    monkeypatch.setattr(tensor_room, "gather_stack", lambda x, axis: x[None])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss(loss: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    total, gradient = off_by(LOSSES[loss], dtype)
    assert total <= 1e-6
    assert gradient <= ROUNDED_ONCE
    for room in (loss_room, kernels_room):
        monkeypatch.setattr(room, "sum_dtype", lambda logits: logits.dtype)
    total, gradient = off_by(lost_in_half if loss == "for a compiler" else LOSSES[loss], dtype)
    assert total > 1e-6
    # because: torch itself makes a softmax of fp16 in fp32 on a CPU
    assert gradient > ROUNDED_ONCE or (loss, dtype) == ("eager", torch.float16)


@pytest.mark.parametrize("dtype", HALVES)
def test_hits(dtype: torch.dtype) -> None:
    """More than half precision can count to."""
    logits = F.one_hot(torch.arange(3001) % 8, 8).to(dtype)
    assert count_hits(logits, torch.arange(3001) % 8) == 3001


# gradients of many microbatches

SIZES = [256.0] + [1.0] * 8  # because: their sum stands still in bf16, whose next number after 256 is 258


def accumulated(dtype: torch.dtype) -> Tensor:
    model = nn.Linear(4, 4, bias=False)
    masters = MasterWeights(dict(model.named_parameters()), dtype)
    for size in SIZES:
        (size * model(torch.ones(1, 4, dtype=dtype)).sum()).backward()
    gradient = masters.master["weight"].grad
    assert gradient is not None
    return gradient


def added_in_half(master: nn.Parameter) -> Any:
    def hook(work: Tensor) -> None:
        assert work.grad is not None
        before = torch.zeros_like(work) if master.grad is None else master.grad.to(work.dtype)
        master.grad = (before + work.grad).float()
        work.grad = None

    return hook


def test_gradients_of_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (accumulated(torch.bfloat16) == sum(SIZES)).all()
    monkeypatch.setattr(precision_room, "_make_gradient_hook", added_in_half)
    assert (accumulated(torch.bfloat16) < sum(SIZES)).all()


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def accumulated_by_fsdp(zero: int, masters: torch.dtype = torch.float32) -> Tensor:
    """The gradient of the last norm's bias, which is given one size each time."""
    model: Any = GPTSettings(num_layers=1, width=8, num_heads=2, seq_len=8, vocab_size=16, norm="layernorm").build()
    model.to(masters)
    mesh = build_mesh(Layout(), torch.device("cpu"))
    apply_data_parallel(model, mesh, zero, torch.bfloat16)
    weights = ShardedWeights({0: model}, dict(model.named_parameters()), zero, {0: []})
    batch = Batch(*torch.zeros(2, 1, 1, dtype=torch.int64))
    for index, size in enumerate(SIZES):
        action, last = Action(Kind.BACKWARD, 0, index), index == len(SIZES) - 1
        weights.before_action(Action(Kind.FORWARD, 0, index), last)
        hidden = model(batch)
        weights.before_action(action, last)
        (size * hidden.sum()).backward()
        weights.after_action(action, last)
    weights.collect_gradients()
    gradient = weights.master["norm.bias"].grad
    assert gradient is not None
    return gradient


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("zero", [1, 2])
def test_gradients_of_several_copies(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (accumulated_by_fsdp(zero) == sum(SIZES)).all()
    if zero == 2:  # where each microbatch's is added to a shard of the masters' type
        assert (accumulated_by_fsdp(zero, torch.bfloat16) < sum(SIZES)).all()
        return
    policy = MixedPrecisionPolicy
    monkeypatch.setattr(sharding_room, "MixedPrecisionPolicy", lambda work, sums, **more: policy(work, work, **more))
    assert (accumulated_by_fsdp(zero) < sum(SIZES)).all()
