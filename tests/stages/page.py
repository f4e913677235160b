"""What docs/explanation/stages.md says of a run: its samples, batches and rates, and what a start may change.

Written from that page and from what the settings say of themselves. Plain Python, one step after another; it imports
nothing of lmtrain.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import gcd, lcm

from tests.unit.train.stage_order_twin import mix, ramp_up, sample_of, turn_of

REFUSED_SETTINGS, REFUSED_PAST = 2, 65  # exit codes
RampUp = tuple[int, int, int]  # start, increment, samples


@dataclass(frozen=True)
class Source:
    """A content: the digits that name it, and its documents of equally many tokens."""

    digits: str
    documents: tuple[tuple[int, ...], ...]

    @property
    def tokens_each(self) -> int:
        return len(self.documents[0])

    def num_samples(self, documents: int, seq_len: int, packing: str) -> int:
        if packing == "document":
            return documents * -(-(self.tokens_each - 1) // seq_len)
        return (documents * self.tokens_each - 1) // seq_len

    def sample(self, number: int, seq_len: int, packing: str) -> tuple[list[int], list[int]]:
        """Return the tokens and the labels of a sample; -100 is the label of padding, and 0 its token."""
        if packing == "document":
            document, part = divmod(number, -(-(self.tokens_each - 1) // seq_len))
            text = self.documents[document][part * seq_len : (part + 1) * seq_len + 1]
        else:
            flat = [token for document in self.documents for token in document]
            text = tuple(flat[number * seq_len : (number + 1) * seq_len + 1])
        pads = seq_len + 1 - len(text)
        return [*text[:-1], *[0] * pads], [*text[1:], *[-100] * pads]


@dataclass(frozen=True)
class Part:
    """A dataset of a stage's data: its path, its share as `amount` of `unit` (weight, tokens, epochs)."""

    path: str
    unit: str = "weight"
    amount: int = 1
    restart: bool = False


@dataclass(frozen=True)
class Data:
    parts: tuple[Part, ...]
    is_blend: bool = True  # False: a single dataset
    held_out: float = 0.0
    packing: str = "concatenate"
    train_on_held_out: bool = False


@dataclass(frozen=True)
class Schedule:
    kind: str
    warmup: int = 0
    min_ratio: float = 0.0
    decay_fraction: float = 0.0
    decay: str = "linear"

    def factor(self, s: int, n: int, read: Sequence[int] | None = None) -> float:
        """Return the factor of step `s` of a span of `n` steps; in tokens if `read` has those of its first steps."""
        if s < self.warmup:
            return (s + 1) / self.warmup if read is None else read[s + 1] / read[self.warmup]
        least = max(self.warmup, 1 if self.kind == "inverse_sqrt" else 0)
        w = self.warmup
        if read is not None:
            s, n, w, least = read[s], read[n], read[w], read[least]
        x, m = (s - w) / (n - w), self.min_ratio
        match self.kind:
            case "linear":
                return m + (1 - m) * (1 - x)
            case "cosine":
                return m + (1 - m) * (1 + math.cos(math.pi * x)) / 2
            case "inverse_sqrt":
                return max(m, math.sqrt(least / max(least, s)))
            case "wsd":
                e = n - round(self.decay_fraction * n)
                if s <= e:
                    return 1.0
                y = (s - e) / (n - e)
                fall = {"linear": 1 - y, "sqrt": 1 - math.sqrt(y), "cosine": (1 + math.cos(math.pi * y)) / 2}
                return m + (1 - m) * fall[self.decay]
        return 1.0

    def fits(self, n: int) -> bool:
        return self.warmup < n and self.warmup <= n - round(self.decay_fraction * n)


@dataclass(frozen=True)
class Stage:
    """The settings of a stage; None leaves one to the run. A stage without `sets_rampup` goes on with that before."""

    name: str
    unit: str
    length: int
    data: Data | None = None
    seq_len: int | None = None
    batch: int | None = None
    sets_rampup: bool = False
    rampup: RampUp | None = None
    lr: float | None = None
    weight_decay: float | None = None
    clip: float | None = None
    schedule: Schedule | None = None
    stop_after: bool = False


@dataclass(frozen=True)
class Average:
    decay: float
    every: int = 1
    since: int = 0


@dataclass(frozen=True)
class Settings:
    """The settings typed for a start. Without stages the run has `steps` steps."""

    data: Data
    schedule: Schedule
    stages: tuple[Stage, ...] = ()
    steps: int = 0
    seed: int = 1
    seq_len: int = 4
    batch: int = 4
    rampup: RampUp | None = None
    lr: float = 0.01
    weight_decay: float = 0.1
    clip: float = 1.0
    average: Average | None = None

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        return self.stages or (Stage("", "steps", self.steps),)


@dataclass
class Planned:
    """A stage as it is trained."""

    stage: Stage
    data: Data
    seq_len: int
    batch: int
    rampup: RampUp | None
    lr: float
    weight_decay: float
    clip: float
    first: int
    begins_plan: int  # the step at which its batch plan began
    end: int = 0
    ids: list[list[tuple[int, int]]] = field(default_factory=list)  # of each step: place of a stream, its sample
    sizes: list[int] = field(default_factory=list)  # of its streams, in samples

    @property
    def facts(self) -> tuple[object, ...]:
        """Return the settings that may not change once the stage is behind; contents are compared apart."""
        shares = [(part.unit, part.amount, part.restart) for part in self.data.parts]
        return (
            self.end, self.lr, self.weight_decay, self.clip, self.batch, self.rampup, self.seq_len,
            self.stage.schedule, shares, replace(self.data, parts=()),
        )  # fmt: skip


class Misfit(Exception):
    """Settings that no run can have."""


def plan(settings: Settings, sources: Mapping[str, Source]) -> list[Planned]:
    """Train the stages on paper. `sources` has the content at each path. Raise Misfit for what is no run."""
    planned: list[Planned] = []
    seeds: dict[str, int] = {}
    counts: dict[str, int] = {}
    trained_documents: dict[str, int] = {}
    mixture: list[tuple[str, int]] = []
    given: list[int] = []
    started: list[int] = []
    turn = step = read = 0  # read: samples since the batch plan began
    sizes_of_plan: list[tuple[int, int]] = []
    if any(part.restart for part in settings.data.parts):
        raise Misfit
    for number, stage in enumerate(settings.all_stages):
        data, seq_len = stage.data or settings.data, stage.seq_len or settings.seq_len
        batch = stage.batch or settings.batch
        rampup = stage.rampup if stage.sets_rampup else settings.rampup if number == 0 else None
        now = Planned(
            stage, data, seq_len, batch, rampup, stage.lr or settings.lr,
            settings.weight_decay if stage.weight_decay is None else stage.weight_decay, stage.clip or settings.clip,
            step, step,
        )  # fmt: skip
        # documents
        keys: list[str] = []
        for part in data.parts:
            source = sources[part.path]
            documents = len(source.documents) - round(len(source.documents) * data.held_out)
            if not data.train_on_held_out:
                documents = min(documents, trained_documents.get(source.digits, documents))
            keys.append(f"{source.digits} {seq_len} {data.packing} documents 0-{documents}")
            now.sizes.append(source.num_samples(documents, seq_len, data.packing))
        if len({*keys}) < len(keys) or (number == 0 and any(part.restart for part in data.parts)):
            raise Misfit
        for key, part in zip(keys, data.parts, strict=True):
            source, documents = sources[part.path], int(key.rpartition("-")[2])
            if documents < len(source.documents):
                trained_documents[source.digits] = min(documents, trained_documents.get(source.digits, documents))
        # the mixture
        shares = whole_shares(data, seq_len, now.sizes)
        if [*zip(keys, shares, strict=True)] != mixture or any(part.restart for part in data.parts):
            for d, (key, part) in enumerate(zip(keys, data.parts, strict=True)):
                if key not in seeds and not mixture:
                    seeds[key] = mix(settings.seed) + 1 + d if data.is_blend else settings.seed
                elif key not in seeds:
                    digits = hashlib.sha256(key.encode()).hexdigest()[:16]
                    seeds[key] = mix(mix(settings.seed) ^ int(digits, 16))
                if key not in counts or part.restart:
                    counts[key] = 0
            mixture, turn = [*zip(keys, shares, strict=True)], 0
            given, started = [0] * len(keys), [counts[key] for key in keys]
        # the batch plan
        if number == 0 or stage.sets_rampup or batch != planned[-1].batch:
            sizes_of_plan, read = ramp_up(batch, rampup), 0
            if rampup is not None and ((batch - rampup[0]) % rampup[1] or rampup[0] >= batch):
                raise Misfit
        else:
            now.begins_plan = planned[-1].begins_plan
        # steps
        samples, wanted = 0, -(-stage.length // seq_len) if stage.unit == "tokens" else stage.length
        while len(now.ids) < stage.length if stage.unit == "steps" else samples < wanted or not now.ids:
            size = next(size for size, until in sizes_of_plan if read < until)
            ids = []
            for _ in range(size):
                d = turn_of(shares, given, turn)
                k = started[d] + given[d]
                ids.append((d, sample_of(seeds[keys[d]], k, now.sizes[d])))
                given[d], turn, counts[keys[d]] = given[d] + 1, turn + 1, k + 1
            now.ids.append(ids)
            read, samples, step = read + size, samples + size, step + 1
        now.end = step
        planned.append(now)
        if stage.schedule is not None and not stage.schedule.fits(now.end - now.first):
            raise Misfit
    span = sum(each.end - each.first for each in planned if each.stage.schedule is None)
    average = settings.average
    if (span and not settings.schedule.fits(span)) or (
        average and (average.since >= step or (average.since // average.every + 1) * average.every > step)
    ):
        raise Misfit
    return planned


def whole_shares(data: Data, seq_len: int, sizes: Sequence[int]) -> list[int]:
    """Return whole numbers in proportion to the weights, in lowest terms."""
    amounts = [
        Fraction(part.amount, seq_len if part.unit == "tokens" else 1) * (size if part.unit == "epochs" else 1)
        for part, size in zip(data.parts, sizes, strict=True)
    ]
    unit = lcm(*(amount.denominator for amount in amounts))
    whole = [int(amount * unit) for amount in amounts]
    return [share // gcd(*whole) for share in whole]


def rates(settings: Settings, planned: Sequence[Planned]) -> list[float]:
    """Return the learning rate of each step."""
    span = [each for each in planned if each.stage.schedule is None]
    in_steps = len({(each.seq_len, each.begins_plan) for each in span}) <= 1
    read = [0]
    for each in span:
        for ids in each.ids:
            read.append(read[-1] + len(ids) * each.seq_len)
    found, s = [], 0
    for each in planned:
        for own in range(each.end - each.first):
            if each.stage.schedule is not None:
                found.append(each.lr * each.stage.schedule.factor(own, each.end - each.first))
            else:
                found.append(each.lr * settings.schedule.factor(s, len(read) - 1, None if in_steps else read))
                s += 1
    return found


def answer(
    settings: Settings, saved: Settings, step: int, sources: Mapping[str, Source], contents: Mapping[str, Source]
) -> int:
    """Return the exit code with which a start with `settings` refuses a checkpoint of this step, which was saved with
    the settings `saved`; 0 if it goes on. `sources` has the content that is at each path now, and `contents` what was
    there when the checkpoint was saved.
    """
    new, old = plan(settings, sources), plan(saved, contents)
    if new[-1].end < step:
        return REFUSED_SETTINGS
    if settings.seed != saved.seed:
        return REFUSED_PAST
    new, old = ([each for each in stages if each.first < step] for stages in (new, old))
    if len(new) != len(old):
        return REFUSED_PAST
    is_at_border = new[-1].end == step
    for number, (here, there) in enumerate(zip(new, old, strict=True)):
        is_behind = number < len(new) - 1 or (is_at_border and is_last_behind(settings, step, sources))
        there = replace(there, end=min(there.end, step))
        if is_behind and (here.facts != there.facts or other_contents(here, there, sources, contents)):
            return REFUSED_PAST
        if not is_behind and (
            # because: a share held out that changes no sample is no other data
            (here.data.is_blend, here.data.packing) != (there.data.is_blend, there.data.packing)
            or here.sizes != there.sizes
            or here.facts[-2] != there.facts[-2]
            or here.seq_len != there.seq_len
            or other_contents(here, there, sources, contents)
        ):
            return REFUSED_PAST
    batches = [[len(ids) for each in stages for ids in each.ids][:step] for stages in (new, old)]
    return 0 if batches[0] == batches[1] else REFUSED_PAST


def is_last_behind(settings: Settings, step: int, sources: Mapping[str, Source]) -> bool:
    """Return True if a stage follows at this step."""
    return plan(settings, sources)[-1].end > step


def branched(
    base: Settings, saved: Settings, step: int, stages: tuple[Stage, ...], sources: Mapping[str, Source]
) -> Settings:  # fmt: skip
    """Return the settings of a branch with these new `stages` from a checkpoint of this step, which was saved with the
    settings `saved`; `base` are those of the run's last start.
    """
    past = [
        replace(
            each.stage, name=each.stage.name or "trunk", unit="steps", length=min(each.end, step) - each.first,
            lr=each.lr, weight_decay=each.weight_decay, clip=each.clip,
        )
        for each in plan(saved, sources) if each.first < step
    ]  # fmt: skip
    return replace(base, stages=(*past, *stages), steps=0)


def decay_stage(saved: Settings, step: int, percent: int, schedule: Schedule, sources: Mapping[str, Source]) -> Stage:
    """Return the stage with which `lmtrain branch` decays a run from this step: with all that holds there."""
    planned = plan(saved, sources)
    there = next(each for each in planned if step <= each.end)
    data = there.stage.data
    if data is not None:
        data = replace(data, parts=tuple(replace(part, restart=False) for part in data.parts))
    rate = rates(saved, planned)[step - 1]
    return replace(
        there.stage, name="decay", unit="steps", length=max(1, round(step * percent / (100 - percent))), data=data,
        sets_rampup=False, rampup=None, lr=float(f"{rate:.6g}"), weight_decay=there.weight_decay, clip=there.clip,
        schedule=schedule, stop_after=False,
    )  # fmt: skip


def merge_shares(mean: str, count: int) -> list[float]:
    """Return the share of each of `count` checkpoints, oldest first, as the page on averages has them."""
    kind, _, number = mean.partition(":")
    if kind == "linear":
        weights = [float(j) for j in range(1, count + 1)]
    elif kind == "ema":
        weights = [(1 - float(number)) * float(number) ** (count - 1 - j) for j in range(count)]
        weights[0] = 1 - sum(weights[1:])
    elif kind == "sqrt":
        # because: the change between j - 1 and j counts 1 - sqrt(j / count), so that the oldest one counts most
        weights = [math.sqrt((j + 1) / count) - math.sqrt(j / count) for j in range(count)]
    else:
        weights = [1.0] * count
    return [weight / sum(weights) for weight in weights]


def other_contents(
    here: Planned, there: Planned, sources: Mapping[str, Source], contents: Mapping[str, Source]
) -> bool:
    pairs = zip(here.data.parts, there.data.parts, strict=True)
    return any(sources[one.path].digits != contents[other.path].digits for one, other in pairs)
