"""Updates of a tiny GPT by a bare loop in fp64: a plain forward, AdamW and an average, written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lmtrain.models.gpt import build
from lmtrain.models.gpt_settings import GPTSettings
from tests.stages.page import Average, Source
from tests.unit.models.first_weights import start
from tests.unit.models.plain_decoder import plain_logits

BETAS, EPS = (0.9, 0.95), 1e-4
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """A step: the (source, sample) of each sample that it trains on, and the optimizer's numbers."""

    samples: tuple[tuple[Source, int], ...]
    seq_len: int
    packing: str
    lr: float
    weight_decay: float
    clip: float

    @property
    def rows(self) -> list[tuple[list[int], list[int]]]:
        """The tokens and labels of each sample."""
        return [source.sample(k, self.seq_len, self.packing) for source, k in self.samples]

    @property
    def num_tokens(self) -> int:
        """The number of tokens without padding."""
        return sum(label >= 0 for _, labels in self.rows for label in labels)


@dataclass(frozen=True)
class Weights:
    """Weights, moments and average after some steps; never changed in place."""

    settings: GPTSettings
    weights: Tensors
    first: Tensors
    second: Tensors
    updates: int = 0
    average: Tensors = field(default_factory=dict)  # empty: none

    def begin(self, average: Average | None, step: int) -> Weights:
        """Return the state with which a start at this step begins, whose settings keep this average."""
        if average is None or step < average.since:
            return replace(self, average={})
        return self if self.average else replace(self, average=self.weights)

    def train(self, step: Step, average: Average | None, number: int) -> Weights:
        """Return the state after this step, which is the run's `number`-th, from 1."""
        weights = {name: weight.clone().requires_grad_() for name, weight in self.weights.items()}
        tokens, labels = (torch.tensor([row[i] for row in step.rows]) for i in (0, 1))
        logits = plain_logits(self.settings, weights, tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        factor, count = min(1.0, step.clip / float(norm)), self.updates + 1
        after, first, second = Tensors(), Tensors(), Tensors()
        for name, gradient in gradients.items():
            gradient = gradient * factor
            first[name] = BETAS[0] * self.first[name] + (1 - BETAS[0]) * gradient
            second[name] = BETAS[1] * self.second[name] + (1 - BETAS[1]) * gradient**2
            kept = self.weights[name] * (1 - step.lr * step.weight_decay * (gradient.ndim >= 2))
            root = (second[name] / (1 - BETAS[1] ** count)).sqrt()
            after[name] = kept - step.lr * first[name] / (1 - BETAS[0] ** count) / (root + EPS)
        mean = self.average
        if average is not None and not mean and number >= average.since:
            mean = after
        elif average is not None and mean and number % average.every == 0:
            mean = {name: old + (1 - average.decay) * (after[name] - old) for name, old in mean.items()}
        return Weights(self.settings, after, first, second, count, mean)


def first_weights(settings: GPTSettings, seed: int) -> Weights:
    model = build(settings)
    start(model, seed)
    weights = {name: weight.detach().double() for name, weight in model.named_parameters()}
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    return Weights(settings, weights, zeros, dict(zeros))


def largest_difference(found: Tensors, expected: Tensors, names: Sequence[str]) -> float:
    return max(float((found[name].double() - expected[name]).abs().max()) for name in names)
