"""What a case gave, made whole from its ranks, and where it differs from what one process gave.

Called by the tests and by replay, in the process that has the pool. References are computed once.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.layouts.cases import Case
from tests.layouts.workers import Pool

FP32_GRADIENT = 1e-5  # of the gradient's norm
FP32_LOSS = 1e-5
LONG_LOSS = 1e-3  # over 100 steps
HALF = 2.0  # times the error that one process shows against fp32
# because: errors of a mean over thousands of tokens cancel by accident; the largest of ten shows how large they are
REFERENCE_STEPS = 10


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    gradients: dict[str, Tensor]
    quarrels: list[str]  # ranks that should hold the same numbers and do not


def run(pool: Pool, case: Case, *, steps: int = 3, bug: str | None = None) -> Outcome:
    # because: a first compilation takes each process some ten seconds, and they share few cores
    timeout_s = (300.0 if case.compile else 90.0) + steps
    with tempfile.TemporaryDirectory() as folder:
        results = pool.run(
            "tests.layouts.training:train", case.num_processes,
            {"name": case.name, "folder": folder, "steps": steps, "bug": bug}, timeout_s=timeout_s,
        )  # fmt: skip
        gradients, quarrels = assemble([result["pieces"] for result in results], Path(folder))
    first = results[0]
    for key in ("losses", "norms", "skipped"):
        for rank, result in enumerate(results):
            if repr(result[key]) != repr(first[key]):
                quarrels.append(f"{key} of rank {rank} are {result[key]} and those of rank 0 {first[key]}")
    return Outcome(first["losses"], first["norms"], first["skipped"], gradients, quarrels)


def assemble(ranks: list[list[dict[str, Any]]], folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Whole tensors from every rank's pieces. Numbers that several ranks hold must be the same to the bit."""
    whole: dict[str, Tensor] = {}
    quarrels = []
    for rank, pieces in enumerate(ranks):
        blocks = load_file(folder / f"{rank}.safetensors")
        for i, piece in enumerate(pieces):
            name, block = piece["name"].removeprefix("grad."), blocks[str(i)]
            target = whole.setdefault(name, torch.full(piece["global_shape"], math.nan))
            part = target[tuple(slice(o, o + n) for o, n in zip(piece["offset"], block.shape, strict=True))]
            known = ~part.isnan()
            if not torch.equal(part[known], block[known]):
                apart = (part[known] - block[known]).abs().max().item()
                quarrels.append(f"{name}: rank {rank} differs by {apart:.1e} from another that holds the same numbers")
            part.copy_(block)
    quarrels += [f"{name} has numbers that no rank holds, or NaN" for name, t in whole.items() if t.isnan().any()]
    return whole, quarrels


@dataclass
class References:
    """One process's outcomes, by case."""

    pool: Pool
    known: dict[tuple[str, int], Outcome] = field(default_factory=dict)

    def of(self, case: Case, steps: int = REFERENCE_STEPS) -> Outcome:
        key = (case.reference.name, steps)
        if key not in self.known:
            self.known[key] = run(self.pool, case.reference, steps=steps)
        return self.known[key]

    def exact(self, case: Case) -> Outcome:
        return self.of(replace(case, precision="fp32"))


def check(case: Case, found: Outcome, references: References) -> list[str]:
    """What is wrong with 3 steps of a case; empty where it equals one process."""
    one, exact = references.of(case), references.exact(case)
    wrong = list(found.quarrels)
    if any(found.skipped + one.skipped):
        wrong.append(f"skipped {found.skipped}, and one process {one.skipped}")
    if found.gradients.keys() != one.gradients.keys():
        return [*wrong, f"gradients of {sorted(found.gradients.keys() ^ one.gradients.keys())} on one side only"]
    for what, value, limit in errors(case, found, one, exact):
        if not value <= limit:  # NaN is wrong too
            wrong.append(f"{what}: {value:.2e}, and {limit:.2e} is allowed")
    return wrong


def errors(case: Case, found: Outcome, one: Outcome, exact: Outcome) -> list[tuple[str, float, float]]:
    """(what, how far it is off, how far it may be): losses, norms, and each gradient relative to its norm."""
    rows = []
    half = case.precision != "fp32"
    for what, tolerance in (("losses", FP32_LOSS), ("norms", FP32_GRADIENT)):
        values, ones, exacts = (getattr(outcome, what) for outcome in (found, one, exact))
        shown = max(abs(a - b) / b for a, b in zip(ones, exacts, strict=True))
        for step, (value, right) in enumerate(zip(values, exacts, strict=False), 1):
            rows.append((f"{what}[{step}]", abs(value - right) / right, HALF * shown if half else tolerance))
    distances = {n: distance(case, n, found.gradients[n], g) for n, g in exact.gradients.items()}
    own = {n: distance(case, n, one.gradients[n], g) for n, g in exact.gradients.items()}
    total = math.sqrt(sum(d**2 for d in own.values()) / len(own))
    for name, value in distances.items():
        rows.append((f"gradient of {name}", value, HALF * max(own[name], total) if half else FP32_GRADIENT))
    return rows


def distance(case: Case, name: str, found: Tensor, right: Tensor) -> float:
    """Of the gradient's norm. A key bias shifts all scores of a query alike: its gradient is 0, its noise is not."""
    if name.endswith("qkv.bias"):
        shape = case.model_settings.shape
        queries, keys = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
        keep = torch.ones_like(right, dtype=torch.bool)
        keep[queries : queries + keys] = False
        found, right = found[keep], right[keep]
    return float((found - right).norm() / right.norm())
