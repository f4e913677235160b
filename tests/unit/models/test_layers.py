"""Norms, rotary angles, the MLP, the head and both kinds of block against formulas written out by hand."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from lmtrain.batch import Batch
from lmtrain.models.gpt import build
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.layers.block import MLP, BlockContext
from lmtrain.models.layers.norms import build_norm
from lmtrain.models.layers.output_heads import Head
from lmtrain.models.layers.rotary import Rotation, build_rotation, rotate
from lmtrain.models.layers.token_and_position_embedding import Embedding, positions_of
from lmtrain.models.rotary_settings import RotarySettings


@pytest.mark.parametrize("parallel", ["no", "one_norm", "two_norms"])
def test_block_formula(parallel: Literal["no", "one_norm", "two_norms"]) -> None:
    """x + A(LN(x)), then + MLP(LN2(.)); in parallel x + MLP(LN(x)) + A(LN(x)) on one norm, or each on its own."""
    settings = GPTSettings(
        num_layers=1, width=32, num_heads=2, vocab_size=16, seq_len=8, parallel_block=parallel, init_std=0.3
    )
    torch.manual_seed(0)
    block = build(settings).blocks["0"]
    weights = dict(block.named_parameters())
    assert ("mlp_norm.weight" in weights) == (parallel != "one_norm")
    with torch.no_grad():
        for name in ("attention_norm.weight", "mlp_norm.weight"):
            if name in weights:
                weights[name].copy_(torch.rand(32))
    x = torch.randn(2, 8, 32)

    def linear(name: str, value: torch.Tensor) -> torch.Tensor:
        return value @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name: str, value: torch.Tensor) -> torch.Tensor:
        centred = value - value.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def attention(value: torch.Tensor) -> torch.Tensor:
        parts = torch.split(linear("attention.qkv", value), 32, -1)
        q, k, v = (part.view(2, 8, 2, 16).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(-1, -2) / 4).masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf)
        return linear("attention.out", (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 8, 32))

    def mlp(value: torch.Tensor) -> torch.Tensor:
        return linear("mlp.down", F.gelu(linear("mlp.up", value), approximate="tanh"))

    if parallel == "no":
        after = x + attention(norm("attention_norm", x))
        expected = after + mlp(norm("mlp_norm", after))
    else:
        mlp_norm = "attention_norm" if parallel == "one_norm" else "mlp_norm"
        expected = x + mlp(norm(mlp_norm, x)) + attention(norm("attention_norm", x))
    assert torch.allclose(block(x, BlockContext()), expected, atol=1e-5)


def test_gated_silu_is_silu_of_the_first_half_times_the_second() -> None:
    mlp = MLP(8, 12, "silu", gated=True, bias=False, dropout=0.0)
    x = torch.randn(3, 8)
    gate, up = mlp.up.weight[:12], mlp.up.weight[12:]
    gated = x @ gate.T
    expected = (gated * gated.sigmoid() * (x @ up.T)) @ mlp.down.weight.T
    assert torch.allclose(mlp(x), expected, atol=1e-6)


def test_gelu_kinds_differ() -> None:
    x = torch.linspace(-3, 3, 50).view(-1, 1)
    exact, tanh = (MLP(1, 1, kind, bias=False, dropout=0.0) for kind in ("gelu", "gelu_tanh"))
    tanh.load_state_dict(exact.state_dict())
    assert (exact(x) - tanh(x)).abs().max() > 0
    assert torch.allclose(exact(x), tanh(x), atol=2e-3)


def test_rms_norm_sums_in_fp32() -> None:
    """bf16 input whose squares overflow nothing but lose all precision when summed in bf16."""
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    norm = build_norm("rmsnorm", 4096, eps=1e-5, bias=True).bfloat16()
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    assert torch.allclose(norm(x).float(), torch.ones(1, 4096), atol=4e-3)


def test_layer_norm_without_bias() -> None:
    assert [name for name, _ in build_norm("layernorm", 8, eps=1e-5, bias=False).named_parameters()] == ["weight"]


def rotation_of(positions: torch.Tensor, head_width: int) -> Rotation:
    return build_rotation(positions, head_width, RotarySettings(), length=positions.shape[-1])


def test_rotation_depends_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16).double()

    def score(at: int, seen: int) -> float:
        turned_q = rotate(q.float(), rotation_of(torch.tensor([at]), 16))
        turned_k = rotate(k.float(), rotation_of(torch.tensor([seen]), 16))
        return float((turned_q * turned_k).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-4)
    assert score(0, 0) == pytest.approx(float((q * k).sum()), abs=1e-5)


def test_rotation_turns_the_pairs_half_a_head_apart() -> None:
    x = torch.zeros(1, 1, 1, 8)
    x[..., 1] = 1.0  # pairs with number 1 + 8/2
    angle = 5 / 10000 ** (2 / 8)
    y = rotate(x, rotation_of(torch.tensor([5]), 8))[0, 0, 0]
    assert y[1] == pytest.approx(math.cos(angle))
    assert y[5] == pytest.approx(math.sin(angle))
    assert y.count_nonzero() == 2


def test_rotation_keeps_dtype_and_its_own_precision() -> None:
    rotation = rotation_of(torch.tensor([[0, 100_000], [3, 4]]), 8)
    assert rotation.cos.dtype == torch.float32
    assert rotation.cos.shape == (2, 2, 1, 4)
    assert rotation.cos[0, 1, 0, 0] == pytest.approx(math.cos(100_000), abs=1e-3)
    assert rotate(torch.randn(2, 2, 3, 8).bfloat16(), rotation).dtype == torch.bfloat16


def test_positions_restart_where_the_batch_says() -> None:
    embedding = Embedding(16, 4, num_positions=8, dropout=0.0)
    for table in embedding.parameters():
        torch.nn.init.normal_(table)
    tokens = torch.full((1, 4), 3)
    plain = embedding(Batch(tokens, tokens))
    restarted = embedding(Batch(tokens, tokens, positions_BT=torch.tensor([[0, 1, 0, 1]])))
    assert torch.equal(plain[:, :2], restarted[:, 2:])
    assert not torch.equal(plain[:, 2:], restarted[:, 2:])
    assert positions_of(Batch(tokens, tokens)).tolist() == [0, 1, 2, 3]


def test_head_takes_any_leading_dims_and_pads_with_minus_infinity() -> None:
    head = Head(4, 5, 8)
    hidden = torch.randn(2, 3, 4)
    logits = head(hidden)
    assert torch.allclose(logits[..., :5], hidden @ head.weight[:5].T, atol=1e-6)
    assert (logits[..., 5:] == -math.inf).all()
    assert torch.equal(head(hidden[0]), logits[0])
    probability = logits.softmax(-1)
    probability[..., 2].log().sum().backward()
    assert head.weight.grad is not None
    assert (head.weight.grad[5:] == 0).all()
    assert head.weight.grad.isfinite().all()
