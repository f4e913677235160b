"""The bare twins of a training benchmark: the same model in plain torch, with nothing around it, and peers' models.

bf16 weights, fp32 masters, each block compiled, SDPA, fused AdamW, random tokens that already lie on the device.
nanoGPT's and torchtitan's models come from checkouts, by path. Called by one_run.py in a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], None]
MASKED = 0.15  # of BERT's tokens are predicted


@dataclass(frozen=True, kw_only=True)
class Shape:
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn_width: int
    vocab: int
    seq_len: int
    causal: bool
    rotary: bool
    rms: bool
    gated: bool
    bias: bool
    tied: bool
    post_norm: bool
    dropout: float
    micro_batch: int
    global_batch: int
    steps: int
    compiled: bool


class Block(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s, self.head_width = s, s.width // s.heads
        self.norm1, self.norm2 = _norm(s), _norm(s)
        self.qkv = nn.Linear(s.width, (s.heads + 2 * s.kv_heads) * self.head_width, bias=s.bias)
        self.out = nn.Linear(s.width, s.width, bias=s.bias)
        self.up = nn.Linear(s.width, s.ffn_width * (1 + s.gated), bias=s.bias)
        self.down = nn.Linear(s.ffn_width, s.width, bias=s.bias)

    def forward(self, x: Tensor, turn: Tensor | None) -> Tensor:
        if self.s.post_norm:
            x = self.norm1(x + self.attend(x, turn))
            y: Tensor = self.norm2(x + self.think(x))
            return y
        x = x + self.attend(self.norm1(x), turn)
        return x + self.think(self.norm2(x))

    def attend(self, x: Tensor, turn: Tensor | None) -> Tensor:
        s, (b, t, d) = self.s, x.shape
        sizes = [d, s.kv_heads * self.head_width, s.kv_heads * self.head_width]
        q, k, v = (y.view(b, t, -1, self.head_width).transpose(1, 2) for y in self.qkv(x).split(sizes, -1))
        if turn is not None:
            q, k = turned(q, turn), turned(k, turn)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=s.causal, enable_gqa=s.heads != s.kv_heads, dropout_p=s.dropout
        )
        return F.dropout(self.out(y.transpose(1, 2).reshape(b, t, d)), s.dropout)

    def think(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.s.gated:
            gate, up = up.chunk(2, -1)
            up = F.silu(gate) * up
        else:
            up = F.gelu(up, approximate="tanh" if self.s.causal else "none")
        return F.dropout(self.down(up), self.s.dropout)


class Bare(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s, self.tokens = s, nn.Embedding(s.vocab, s.width)
        self.positions = None if s.rotary else nn.Embedding(s.seq_len, s.width)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = None if s.post_norm else _norm(s)
        self.head = nn.Linear(s.width, s.vocab, bias=False)
        if s.tied:
            self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.ndim >= 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * s.layers))
        self.register_buffer("turn", _turns(s) if s.rotary else None, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.turn)
        y: Tensor = self.head(x if self.norm is None else self.norm(x))
        return y


def _norm(s: Shape) -> nn.Module:
    return nn.RMSNorm(s.width, eps=1e-5) if s.rms else nn.LayerNorm(s.width, bias=s.bias)


def _turns(s: Shape) -> Tensor:
    """[2, T, K/2] in fp32: cosines and sines."""
    pairs = torch.arange(0, s.width // s.heads, 2, dtype=torch.float32)
    angles = torch.arange(s.seq_len)[:, None] / 10000.0 ** (pairs / (s.width // s.heads))
    return torch.stack((angles.cos(), angles.sin()))


def turned(x: Tensor, turn: Tensor) -> Tensor:
    cos, sin = turn
    left, right = x.float().chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).type_as(x)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def bare(s: Shape, device: torch.device, dtype: torch.dtype) -> Step:
    with device:
        model = Bare(s)
    return _with_masters(model, model.blocks, s, device, dtype)


def titan(s: Shape, device: torch.device, dtype: torch.dtype, path: str) -> Step:
    """torchtitan 0.2's LLaMA from a checkout, in the bare loop: without its trainer, which needs more packages."""
    model_file = titan_model(Path(path))
    settings = model_file.TransformerModelArgs(
        dim=s.width, n_layers=s.layers, n_heads=s.heads, n_kv_heads=s.kv_heads, vocab_size=s.vocab,
        multiple_of=64, ffn_dim_multiplier=s.ffn_width / (8 * s.width // 3), max_seq_len=s.seq_len,
    )  # fmt: skip
    with device:
        model = model_file.Transformer(settings)
        with torch.no_grad():
            model.init_weights(device)
    return _with_masters(model, model.layers.values(), s, device, dtype)


def titan_model(path: Path) -> Any:
    """The module of the model alone: the packages above it import the trainer's dependencies."""
    source = path / "torchtitan"
    for name in ("", "components", "models", "models.llama3", "models.llama3.model", "protocols", "tools"):
        module = ModuleType(".".join(filter(None, ("torchtitan", name))))
        module.__path__ = [str(source.joinpath(*name.split(".")))]
        sys.modules[module.__name__] = module
    # because: only annotations name these
    _stand_in("torchtitan.config", "JobConfig")
    _stand_in("torchtitan.components.tokenizer", "BaseTokenizer", "HuggingFaceTokenizer")
    _stand_in("torchtitan.protocols.train_spec", "ModelProtocol")
    protocol = importlib.import_module("torchtitan.protocols.model")
    sys.modules["torchtitan.protocols.train_spec"].ModelProtocol = protocol.ModelProtocol  # type: ignore[attr-defined]
    return importlib.import_module("torchtitan.models.llama3.model.model")


def _stand_in(name: str, *classes: str) -> None:
    module = ModuleType(name)
    for one in classes:
        setattr(module, one, type(one, (), {}))
    sys.modules[name] = module


def nanogpt(s: Shape, device: torch.device, dtype: torch.dtype, path: str) -> Step:
    """nanoGPT's model from a checkout: fp32 weights under autocast, the whole model compiled, as its train.py does."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(path) / "load_model.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.GPTConfig(
        block_size=s.seq_len, vocab_size=s.vocab, n_layer=s.layers, n_head=s.heads, n_embd=s.width, dropout=0.0,
        bias=True,
    )  # fmt: skip
    model = module.GPT(config).to(device)
    optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), device.type)
    run: Any = torch.compile(model) if s.compiled else model
    tokens, labels, count = _batch(s, device)

    def step() -> None:
        for _ in range(count):
            with torch.amp.autocast(device_type=device.type, dtype=dtype):
                _, loss = run(tokens, labels)
            torch.autograd.backward(loss / count)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _batch(s: Shape, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Tokens, labels, and how many times they are taken in a step."""
    tokens = torch.randint(s.vocab, (s.micro_batch, s.seq_len + 1), device=device)
    labels = tokens[:, 1:].contiguous()
    if not s.causal:
        labels = labels.masked_fill(torch.rand(labels.shape, device=device) >= MASKED, -100)
    return tokens[:, :-1].contiguous(), labels, s.global_batch // s.micro_batch


def _with_masters(model: nn.Module, blocks: Any, s: Shape, device: torch.device, dtype: torch.dtype) -> Step:
    masters = [nn.Parameter(p.detach().clone().float()) for p in model.parameters()]
    for p in model.parameters():  # because: `model.to` would round angles too
        p.data = p.data.to(dtype)
    weights: list[Tensor] = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    loss_fn: Any = loss_of
    if s.compiled:
        for block in blocks:
            block.compile(dynamic=False)
        loss_fn = torch.compile(loss_of, dynamic=False)
    tokens, labels, count = _batch(s, device)

    def step() -> None:
        for _ in range(count):
            torch.autograd.backward(loss_fn(model(tokens), labels) / count)
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, list[Tensor](masters))
        for master in masters:
            master.grad = None

    return step


def timed(step: Step, steps: int, device: torch.device) -> list[float]:
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds
