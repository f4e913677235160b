"""Which sample stands at which position of a run in stages, written from docs/explanation/stages.md alone.

It computes position by position, with whole numbers of Python, and imports nothing of lmtrain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

_MASK, _GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Source:
    """The content of a dataset: the digits that name it, and its documents, which all have equally many tokens."""

    digits: str
    num_documents: int
    tokens_each: int

    def num_samples(self, documents: int, seq_len: int) -> int:
        """Return the number of samples of concatenated text that the first `documents` documents make."""
        return (documents * self.tokens_each - 1) // seq_len


@dataclass(frozen=True)
class Part:
    """A source as a stage reads it."""

    source: Source
    share: int = 1
    restart: bool = False


@dataclass(frozen=True)
class Stage:
    """A stage: `length` counts what `unit` says, and `held_out` is the share of the documents kept for validation."""

    parts: tuple[Part, ...]
    unit: str
    length: int
    seq_len: int
    batch: int
    rampup: tuple[int, int, int] | None = None  # start, increment, samples
    held_out: float = 0.0
    train_on_held_out: bool = False
    is_blend: bool = True  # False: a single dataset


@dataclass
class Twin:
    """A run: for each stage, `ids[stage]` has a stream's place in the stage's list and its sample, by position."""

    seed: int
    ids: list[list[tuple[int, int]]] = field(default_factory=list)
    keys: list[list[str]] = field(default_factory=list)  # of the streams of each stage
    ends: list[tuple[int, int]] = field(default_factory=list)  # (step, position) after each stage
    batches: list[int] = field(default_factory=list)  # of each step of the run
    reads: dict[str, list[int]] = field(default_factory=dict)  # stream -> its samples in the order of reading

    def run(self, stages: Sequence[Stage]) -> Twin:
        """Train the stages."""
        seeds: dict[str, int] = {}
        counts: dict[str, int] = {}
        ends_of_training: dict[str, int] = {}
        mixture: tuple[tuple[str, int], ...] = ()
        given: list[int] = []
        started: list[int] = []
        turn = 0
        plan: list[tuple[int, int]] = []  # (batch, samples since the plan began up to which it is used)
        plan_read, batch_before = 0, 0
        for number, stage in enumerate(stages):
            # documents
            keys: list[str] = []
            sizes = []
            for part in stage.parts:
                source = part.source
                trained = source.num_documents - round(source.num_documents * stage.held_out)
                if not stage.train_on_held_out:
                    trained = min(trained, ends_of_training.get(source.digits, trained))
                key = f"{source.digits} {stage.seq_len} concatenate documents 0-{trained}"
                again = sum(other.partition(" #")[0] == key for other in keys)
                keys.append(f"{key} #{again + 1}" if again else key)
                sizes.append(source.num_samples(trained, stage.seq_len))
            for part, key in zip(stage.parts, keys, strict=True):
                trained = int(key.partition(" #")[0].rpartition("-")[2])
                if trained < part.source.num_documents:
                    digits = part.source.digits
                    ends_of_training[digits] = min(trained, ends_of_training.get(digits, trained))
            # the mixture
            now = tuple((key, part.share) for key, part in zip(keys, stage.parts, strict=True))
            if now != mixture or any(part.restart for part in stage.parts):
                for d, (part, key) in enumerate(zip(stage.parts, keys, strict=True)):
                    if key not in seeds and not mixture:
                        seeds[key] = mix(self.seed) + 1 + d if stage.is_blend else self.seed
                    elif key not in seeds:
                        first_digits = int(hashlib.sha256(key.encode()).hexdigest()[:16], 16)
                        seeds[key] = mix(mix(self.seed) ^ first_digits)
                    if key not in counts or part.restart:
                        counts[key], self.reads[key] = 0, []
                mixture, turn = now, 0
                given, started = [0] * len(keys), [counts[key] for key in keys]
            # the batch plan
            if number == 0 or stage.rampup is not None or stage.batch != batch_before:
                plan, plan_read, batch_before = ramp_up(stage.batch, stage.rampup), 0, stage.batch
            samples = -(-stage.length // stage.seq_len) if stage.unit == "tokens" else stage.length
            # steps
            ids: list[tuple[int, int]] = []
            steps = 0
            while steps < stage.length if stage.unit == "steps" else len(ids) < samples or not steps:
                batch = next(size for size, until in plan if plan_read < until)
                for _ in range(batch):
                    d = turn_of([part.share for part in stage.parts], given, turn)
                    k = started[d] + given[d]
                    sample = sample_of(seeds[keys[d]], k, sizes[d])
                    ids.append((d, sample))
                    self.reads[keys[d]].append(sample)
                    given[d], turn, counts[keys[d]] = given[d] + 1, turn + 1, k + 1
                plan_read, steps = plan_read + batch, steps + 1
                self.batches.append(batch)
            self.ids.append(ids)
            self.keys.append(keys)
            self.ends.append((len(self.batches), sum(self.batches)))
        return self


def ramp_up(batch: int, rampup: tuple[int, int, int] | None) -> list[tuple[int, int]]:
    """Return the batch sizes of a plan, each with the number of samples up to which it is used."""
    if rampup is None:
        return [(batch, 10**18)]
    start, increment, samples = rampup
    sizes = list(range(start, batch, increment))
    return [(size, samples * i // len(sizes)) for i, size in enumerate(sizes, 1)] + [(batch, 10**18)]


def turn_of(shares: Sequence[int], given: Sequence[int], q: int) -> int:
    """Return which stream position q of a mixture takes."""
    total = sum(shares)
    may = [d for d, (k, w) in enumerate(zip(given, shares, strict=True)) if k * total // w <= q]
    return min(may, key=lambda d: (-(-(given[d] + 1) * total // shares[d]), d))


def sample_of(seed: int, k: int, n: int) -> int:
    """Return which of a stream's n samples is the k-th that a run reads of it."""
    epoch, i = divmod(k, n)
    c = mix(mix(seed) + epoch * _GOLDEN)
    b = max(3, -(-(n - 1).bit_length() // 2))
    while True:
        left, right = i >> b, i & ((1 << b) - 1)
        for r in range(1, 7):
            m = right ^ mix(c + r * _GOLDEN)
            m ^= m >> 30
            m = m * 0xBF58476D1CE4E5B9 & _MASK
            m ^= m >> 27
            m = m * 0x94D049BB133111EB & _MASK
            left, right = right, left ^ (m >> (64 - b))
        i = left << b | right
        if i < n:
            return i


def mix(v: int) -> int:
    """Scramble a whole number of 64 bits."""
    v &= _MASK
    v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    v = (v ^ (v >> 27)) * 0x94D049BB133111EB & _MASK
    return v ^ (v >> 31)
