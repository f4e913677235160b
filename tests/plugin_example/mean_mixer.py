"""A decoder without attention: each token sees the running mean of what came before it, through two gates.

It shares nothing with the house's stack but the head: parts, names and blocks are its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.batch import Batch
from lmtrain.models.initial_weights import apply_ties
from lmtrain.models.layers.output_heads import Head
from lmtrain.spec import Cuts, ModelShape, Start, Tie
from tests.plugin_example.mean_mixer_settings import MeanMixerSettings


def build(settings: MeanMixerSettings) -> MeanMixer:
    return MeanMixer(settings)


class MixBlock(nn.Module):
    def __init__(self, s: MeanMixerSettings) -> None:
        super().__init__()
        self.mix_norm, self.mlp_norm = nn.RMSNorm(s.width), nn.RMSNorm(s.width)
        self.mix = nn.Linear(s.width, 3 * s.width, bias=s.bias)
        self.out = nn.Linear(s.width, s.width, bias=s.bias)
        self.up = nn.Linear(s.width, s.ffn_width, bias=s.bias)
        self.down = nn.Linear(s.ffn_width, s.width, bias=s.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, value, own = self.mix(self.mix_norm(x_BTD)).chunk(3, dim=-1)
        seen_T1 = torch.arange(1, value.shape[1] + 1, device=value.device).unsqueeze(-1)
        mixed_BTD = gate.sigmoid() * (value.cumsum(1) / seen_T1) + own.tanh() * value
        x_BTD = x_BTD + self.out(mixed_BTD)
        y_BTD: Tensor = x_BTD + self.down(F.gelu(self.up(self.mlp_norm(x_BTD))))
        return y_BTD


class MeanMixer(nn.Module):
    def __init__(self, settings: MeanMixerSettings) -> None:
        super().__init__()
        s = self.settings = settings
        # because: nn.Embedding's own first values are slow to make without memory
        table = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
            torch.zeros(s.padded_vocab_size, s.width), freeze=False
        )
        self.tokens: nn.Module | None = table
        self.blocks = nn.ModuleDict({str(layer): MixBlock(s) for layer in range(s.num_layers)})
        self.last_norm: nn.Module | None = nn.RMSNorm(s.width)
        self.scores: nn.Module | None = Head(s.width, s.vocab_size or 0, s.padded_vocab_size)
        apply_ties(self)

    @property
    def shape(self) -> ModelShape:
        return self.settings.shape

    def forward(self, batch: Batch, hidden_BTD: Tensor | None = None) -> Tensor:
        x_BTD = hidden_BTD if self.tokens is None else self.tokens(batch.tokens_BT)
        for block in self.blocks.values():
            x_BTD = block(x_BTD)
        assert x_BTD is not None
        return x_BTD if self.last_norm is None else self.last_norm(x_BTD)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden if self.scores is None else self.scores(hidden)

    def cut(self, layers: range, *, first: bool, last: bool) -> None:
        self.tokens = self.tokens if first else None
        self.last_norm, self.scores = (self.last_norm, self.scores) if last else (None, None)
        self.blocks = nn.ModuleDict({name: block for name, block in self.blocks.items() if int(name) in layers})

    def ties(self) -> tuple[Tie, ...]:
        return self.settings.ties()

    def cuts(self) -> Cuts:
        return {name: self.settings.cut_of(name) for name, _ in self.named_parameters(remove_duplicate=False)}

    def starts(self) -> dict[str, Start]:
        return {name: self._start(name) for name, _ in self.named_parameters(remove_duplicate=False)}

    def _start(self, name: str) -> Start:
        if name.endswith("norm.weight"):
            return Start(mean=1.0)
        if name.endswith("bias"):
            return Start()
        of_tokens = name in ("tokens.weight", "scores.weight")
        return Start(std=0.05, num_rows=self.settings.vocab_size if of_tokens else None)
