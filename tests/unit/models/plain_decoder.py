"""A decoder written out plainly, in fp64: what each word of GPTSettings means.

It shares no code with lmtrain's model, and takes its weights by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lmtrain.models.gpt_settings import GPTSettings

Weights = Mapping[str, Tensor]


def plain_logits(s: GPTSettings, weights: Weights, tokens_BT: Tensor) -> Tensor:
    """Return the logits [B, T, V] of the true vocabulary, in fp64."""
    w = {name: weight.double() for name, weight in weights.items()}
    x = w["embedding.token.weight"][tokens_BT] * s.embedding_scale
    if s.positions == "learned":
        x = x + w["embedding.position.weight"][: tokens_BT.shape[1]]
    for layer in range(s.num_layers):
        x = _block(s, {name.removeprefix(f"blocks.{layer}."): weight for name, weight in w.items()}, x, layer)
    if s.norm_order != "post":
        x = _norm(s, w, "norm", x)
    logits = x @ (w["embedding.token.weight"] if s.tied else w["head.weight"]).T
    logits = (logits + w.get("head.bias", 0.0))[..., : s.shape.vocab_size] * s.logit_scale
    return logits if s.logit_cap is None else s.logit_cap * torch.tanh(logits / s.logit_cap)


def _block(s: GPTSettings, w: Weights, x: Tensor, layer: int) -> Tensor:
    if s.parallel_block != "no":
        attention = _attention(s, w, _norm(s, w, "attention_norm", x), layer)
        mlp = _mlp(s, w, _norm(s, w, "attention_norm" if s.parallel_block == "one_norm" else "mlp_norm", x))
        return x + s.residual_scale * attention + s.residual_scale * mlp
    for name in ("attention", "mlp"):
        y = _norm(s, w, f"{name}_norm", x) if s.norm_order in ("pre", "sandwich") else x
        y = _attention(s, w, y, layer) if name == "attention" else _mlp(s, w, y)
        y = _norm(s, w, f"{name}_out_norm", y) if s.norm_order in ("branch", "sandwich") else y
        x = x + s.residual_scale * y
        x = _norm(s, w, f"{name}_norm", x) if s.norm_order == "post" else x
    return x


def _norm(s: GPTSettings, w: Weights, name: str, x: Tensor) -> Tensor:
    """A norm by `s.norm`, whose epsilon is added to the variance or the mean of squares."""
    if s.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + s.norm_eps).sqrt()
    return _weighted(s, w, name, x) + w.get(f"{name}.bias", 0.0)


def _weighted(s: GPTSettings, w: Weights, name: str, x: Tensor) -> Tensor:
    if s.norm_weight == "none":
        return x
    return x * (w[f"{name}.weight"] + (1.0 if s.norm_weight == "from_zero" else 0.0))


def _linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def _mlp(s: GPTSettings, w: Weights, x: Tensor) -> Tensor:
    hidden = _linear(w, "mlp.up", x)
    if s.gated:
        return _linear(w, "mlp.down", _activated(s, hidden[..., : s.ffn]) * hidden[..., s.ffn :])
    return _linear(w, "mlp.down", _activated(s, hidden))


def _activated(s: GPTSettings, x: Tensor) -> Tensor:
    match s.activation:
        case "gelu":
            return x * (1 + torch.erf(x / math.sqrt(2))) / 2
        case "gelu_tanh":
            return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
        case "silu":
            return x / (1 + torch.exp(-x))
        case "relu":
            return torch.where(x > 0, x, 0.0)
        case "relu2":
            return torch.where(x > 0, x * x, 0.0)


def _attention(s: GPTSettings, w: Weights, x: Tensor, layer: int) -> Tensor:
    """Head by head; head h reads the key-value head h // (heads / key-value heads)."""
    qkv, width, length = _linear(w, "attention.qkv", x), s.head, x.shape[1]
    queries, keys = s.num_heads * width, s.kv_heads * width
    q, k, v = qkv[..., :queries], qkv[..., queries : queries + keys], qkv[..., queries + keys :]
    if s.qk_norm == "whole":
        q, k = (_rms_weighted(s, w, name, y) for name, y in (("attention.q_norm", q), ("attention.k_norm", k)))
    letter = _letter(s, layer)
    last = (s.window or 0) if letter in "wW" else length  # how many tokens a token reads, itself included
    may_read = torch.tensor([[0 <= i - j < last for j in range(length)] for i in range(length)])
    outputs = []
    for head in range(s.num_heads):
        group = head // (s.num_heads // s.kv_heads)
        q_head, k_head, v_head = (
            part[..., n * width : (n + 1) * width] for part, n in ((q, head), (k, group), (v, group))
        )
        if s.qk_norm == "head":
            q_head = _rms_weighted(s, w, "attention.q_norm", q_head)
            k_head = _rms_weighted(s, w, "attention.k_norm", k_head)
        if letter in "wf" and s.positions == "rotary":
            q_head, k_head = _turned(s, q_head, letter == "w"), _turned(s, k_head, letter == "w")
        scores = q_head @ k_head.transpose(1, 2) * (width**-0.5 if s.attention_scale is None else s.attention_scale)
        if s.attention_cap is not None:
            scores = s.attention_cap * torch.tanh(scores / s.attention_cap)
        outputs.append(torch.softmax(scores.masked_fill(~may_read, -math.inf), -1) @ v_head)
    return _linear(w, "attention.out", torch.cat(outputs, -1))


def _rms_weighted(s: GPTSettings, w: Weights, name: str, x: Tensor) -> Tensor:
    return _weighted(s, w, name, x / (x.square().mean(-1, keepdim=True) + s.norm_eps).sqrt())


def _letter(s: GPTSettings, layer: int) -> str:
    if s.layer_pattern is None:
        return "f" if s.window is None else "w"
    return (s.layer_pattern * s.num_layers)[layer]


def _turned(s: GPTSettings, x: Tensor, is_local: bool) -> Tensor:
    """Queries or keys [B, T, K] of a head: number i and number i + R/2 of its first R are turned together."""
    half = int(s.head * s.rotary_share) // 2
    frequencies, factor = rotary_frequencies(s, x.shape[1], is_local)
    angles = torch.tensor([[position * f for f in frequencies] for position in range(x.shape[1])], dtype=x.dtype)
    cos, sin = factor * torch.cos(angles), factor * torch.sin(angles)
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), -1)


def rotary_frequencies(s: GPTSettings, length: int, is_local: bool) -> tuple[list[float], float]:
    """Return the angle by which each pair is turned from one position to the next, and the factor of cosines and sines,
    of texts of `length` tokens in layers with a window (`is_local`) or without.
    """
    own = is_local and s.local_rotary_base is not None
    base = (s.local_rotary_base or 0.0) if own else s.rotary_base
    width = int(s.head * s.rotary_share)
    plain = [base ** (-2 * i / width) for i in range(width // 2)]
    if own or s.rotary_scaling == "none":
        return plain, 1.0
    factor, original = s.rotary_factor, s.rotary_original_len or 0
    match s.rotary_scaling:
        case "linear":
            return [f / factor for f in plain], 1.0
        case "llama3":
            return [_llama3(s, f) for f in plain], 1.0
        case "yarn":
            return [_yarn(s, f, i, width) for i, f in enumerate(plain)], s.rotary_attention_factor or (
                0.1 * math.log(factor) + 1
            )
        case "longrope":
            divisors = (s.rotary_long_factors if length > original else s.rotary_short_factors) or ()
            attention = s.rotary_attention_factor or math.sqrt(1 + math.log(factor) / math.log(original))
            return [f / divisor for f, divisor in zip(plain, divisors, strict=True)], attention
    raise AssertionError(s.rotary_scaling)


def _llama3(s: GPTSettings, frequency: float) -> float:
    turns = (s.rotary_original_len or 0) * frequency / (2 * math.pi)  # over the original length
    share = (turns - s.rotary_low_factor) / (s.rotary_high_factor - s.rotary_low_factor)
    share = min(max(share, 0.0), 1.0)
    return (1 - share) * frequency / s.rotary_factor + share * frequency


def _yarn(s: GPTSettings, frequency: float, i: int, width: int) -> float:
    def pair(turns: float) -> float:
        return width * math.log((s.rotary_original_len or 0) / (2 * math.pi * turns)) / (2 * math.log(s.rotary_base))

    first, last = pair(s.rotary_beta_fast), pair(s.rotary_beta_slow)
    if s.rotary_rounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0.0), min(last, width - 1.0)
    share = min(max((i - first) / (last - first), 0.0), 1.0)
    return (1 - share) * frequency + share * frequency / s.rotary_factor
