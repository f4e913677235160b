"""What a case gave, made whole from its ranks, and where it differs from what one process gave.

Called by the tests and by replay, in the process that has the pool. References are computed once.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.layouts.cases import Case
from tests.layouts.workers import Pool

STEPS = 3  # because: the third one's loss and norm show the second update, which moments of the first go into
FP32_GRADIENT = 1e-5  # of the gradient's norm
FP32_LOSS = 1e-5
LONG_LOSS = 1e-3  # over 100 steps
HALF = 2.0  # times the error that one process shows against fp32


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    gradients: dict[str, Tensor]
    quarrels: list[str]  # ranks that should hold the same numbers and do not
    held_bytes: list[list[int]]  # of each rank's GPU, after each step


def run(pool: Pool, case: Case, *, steps: int = STEPS, bug: str | None = None) -> Outcome:
    # because: a first compilation takes each process some ten seconds, and they share few cores
    timeout_s = (600.0 if case.compile else 300.0) + 4 * steps
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
    held = [result["held_bytes"] for result in results]
    return Outcome(first["losses"], first["norms"], first["skipped"], gradients, quarrels, held)


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
    samples: dict[str, list[float]] = field(default_factory=dict)
    checked: dict[str, list[str]] = field(default_factory=dict)

    def of(self, case: Case, steps: int = STEPS) -> Outcome:
        key = (case.reference.name, steps)
        if key not in self.known:
            self.known[key] = run(self.pool, case.reference, steps=steps)
        return self.known[key]

    def wrong(self, case: Case) -> list[str]:
        """What `check` says of the case as it is, run once."""
        if case.name not in self.checked:
            self.checked[case.name] = check(case, run(self.pool, case), self)
        return self.checked[case.name]

    def exact(self, case: Case) -> Outcome:
        return self.of(replace(case, precision="fp32"))

    def loss_error(self, case: Case) -> float:
        """How far one process's loss is off fp32, relative: three standard errors of the mean over samples.

        because: a mean of thousands of errors may be right by accident, so its own error says little of their size; and
        of a thousand losses compared, a few are beyond two standard errors by chance.
        """
        half, exact = (self._samples(replace(case, precision=p).reference) for p in (case.precision, "fp32"))
        off = [a - b for a, b in zip(half, exact, strict=True)]
        mean = sum(off) / len(off)
        return 3 * math.sqrt(sum((one - mean) ** 2 for one in off)) / sum(exact)

    def _samples(self, case: Case) -> list[float]:
        if case.name not in self.samples:
            (self.samples[case.name],) = self.pool.run("tests.layouts.training:sample_losses", 1, {"name": case.name})
        return self.samples[case.name]


def check(case: Case, found: Outcome, references: References) -> list[str]:
    """Return the differences between the steps of a case and those of one process; none if they are equal."""
    one = references.of(case)
    wrong = list(found.quarrels)
    if any(found.skipped + one.skipped):
        wrong.append(f"skipped {found.skipped}, and one process {one.skipped}")
    if found.gradients.keys() != one.gradients.keys():
        return [*wrong, f"gradients of {sorted(found.gradients.keys() ^ one.gradients.keys())} on one side only"]
    for what, value, limit in errors(case, found, references):
        if not value <= limit:  # NaN is wrong too
            wrong.append(f"{what}: {value:.2e}, and {limit:.2e} is allowed")
    return wrong


def errors(case: Case, found: Outcome, references: References) -> list[tuple[str, float, float]]:
    """(what, how far it is off, how far it may be): losses, norms, and each gradient relative to its norm."""
    one, exact, half = references.of(case), references.exact(case), case.precision != "fp32"
    distances, own = (
        {name: distance(case, name, outcome.gradients[name], right) for name, right in exact.gradients.items()}
        for outcome in (found, one)
    )
    norms = whole_distance(one, exact) if half else 0.0
    shown = {"losses": references.loss_error(case), "norms": norms} if half else {}
    rows = []
    for what, tolerance in (("losses", FP32_LOSS), ("norms", FP32_GRADIENT)):
        values, ones, exacts = (getattr(outcome, what) for outcome in (found, one, exact))
        for step, (value, right) in enumerate(zip(values, exacts, strict=True), 1):
            # because: weights have the errors of the gradients before, and a loss those of what the weights changed
            moved = norms * (max(exacts) - min(exacts)) / right if what == "losses" and step > 1 else 0.0
            limit = HALF * max(step * shown[what], moved, *map(relative, ones, exacts)) if half else tolerance
            rows.append((f"{what}[{step}]", relative(value, right), limit))
    for name, value in distances.items():
        # because: a bias of few numbers may be right by accident too
        limit = HALF * max(own[name], median(own.values())) if half else FP32_GRADIENT
        rows.append((f"gradient of {name}", value, limit))
    return rows


def relative(value: float, right: float) -> float:
    return abs(value - right) / right


def whole_distance(found: Outcome, right: Outcome) -> float:
    """Of all gradients as one vector, of its norm: the norms cannot differ by more."""
    off = sum(float((found.gradients[name] - g).norm() ** 2) for name, g in right.gradients.items())
    return math.sqrt(off / sum(float(g.norm() ** 2) for g in right.gradients.values()))


def distance(case: Case, name: str, found: Tensor, right: Tensor) -> float:
    """Return the difference as a share of the gradient's norm. A key bias shifts all scores of a query alike, so its
    gradient is noise around 0 unless keys are turned or normalized, or scores have a cap.
    """
    settings = case.model_settings
    words = [getattr(settings, word, None) for word in ("positions", "qk_norm", "attention_cap")]
    if name.endswith("qkv.bias") and words in ([None, None, None], ["learned", "none", None]):
        shape = settings.shape
        queries, keys = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
        keep = torch.ones_like(right, dtype=torch.bool)
        keep[queries : queries + keys] = False
        found, right = found[keep], right[keep]
    return float((found - right).norm() / right.norm())
