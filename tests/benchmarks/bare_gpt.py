"""The bare twin of a training benchmark: the same GPT in plain torch, with nothing around it.

bf16 weights, fp32 masters, each block compiled, SDPA, fused AdamW, random tokens that already lie on the device.
Run by train_speed.py in a process of its own; prints one JSON line with the seconds of each step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            y.view(b, t, self.heads, d // self.heads).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(d, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        z: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return z


class BareGPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocab: int, seq_len: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for p in self.parameters():
            if p.ndim >= 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def bare(shape: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[float]:
    with device:
        model = BareGPT(shape.layers, shape.width, shape.heads, shape.vocab, shape.seq_len)
    masters = [nn.Parameter(p.detach().clone().float()) for p in model.parameters()]
    model.to(dtype)
    weights: list[Tensor] = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for block in model.blocks:
        block.compile(dynamic=False)
    loss_fn = torch.compile(loss_of, dynamic=False)
    tokens = torch.randint(shape.vocab, (shape.micro_batch, shape.seq_len + 1), device=device)
    count = shape.global_batch // shape.micro_batch

    def step() -> None:
        for _ in range(count):
            torch.autograd.backward(loss_fn(model(tokens[:, :-1]), tokens[:, 1:].contiguous()) / count)
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, list[Tensor](masters))
        for master in masters:
            master.grad = None

    return timed(step, shape.steps, device)


def nanogpt(shape: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[float]:
    """nanoGPT's model from a checkout: fp32 weights under autocast, the whole model compiled, as its train.py does."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(shape.nanogpt) / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.GPTConfig(
        block_size=shape.seq_len, vocab_size=shape.vocab, n_layer=shape.layers, n_head=shape.heads,
        n_embd=shape.width, dropout=0.0, bias=True,
    )  # fmt: skip
    model = module.GPT(config).to(device)
    optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), device.type)
    compiled: Any = torch.compile(model)
    tokens = torch.randint(shape.vocab, (shape.micro_batch, shape.seq_len + 1), device=device)
    count = shape.global_batch // shape.micro_batch

    def step() -> None:
        for _ in range(count):
            with torch.amp.autocast(device_type=device.type, dtype=dtype):
                _, loss = compiled(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            torch.autograd.backward(loss / count)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step, shape.steps, device)


def timed(step: Any, steps: int, device: torch.device) -> list[float]:
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nanogpt")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name in ("layers", "width", "heads", "vocab", "seq_len", "micro_batch", "global_batch", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    run = nanogpt if arguments.nanogpt else bare
    print(json.dumps(run(arguments, torch.device(arguments.device), torch.bfloat16)))
