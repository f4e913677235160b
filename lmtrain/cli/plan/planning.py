"""The words of `lmtrain plan` as a question, and the question answered.

Which run, on which machine, how many devices, and what is given; what the words leave open is assumed, and said. Then
the ranking, the curve, and what a budget costs, as facts for a screen or a page. Called by the verb. Torch-free.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import yaml

from lmtrain.cli.keys.settings_reference import config_file
from lmtrain.config.base import Problem, show
from lmtrain.config.build import build_settings
from lmtrain.config.compose import compose, group_choices
from lmtrain.config.overrides import parse_overrides
from lmtrain.config.yaml_file import read_yaml
from lmtrain.errors import LayoutError, LmtrainError, UsageError, settings_error, spelling_hint
from lmtrain.layout import divisors
from lmtrain.placement.parallel_settings import (
    MAX_PROCESSES,
    ParallelSettings,
    batch_problems,
    layout_problems,
    rampup_problems,
)
from lmtrain.plan.calibrate import machine_prices
from lmtrain.plan.price.hardware import Hardware
from lmtrain.plan.price.step_time import dollars
from lmtrain.plan.run_model.planned_run import PlannedRun
from lmtrain.plan.search.layout_result import (
    CurveInputs,
    CurvePoint,
    LayoutResult,
    best_by_pp_and_tp,
    price_layouts,
    results_at,
    scaling_curve,
    too_large_results,
    why_slower,
)
from lmtrain.plan.search.layout_space import FixedSettings
from lmtrain.plan.search.ranking import FAMILY_COLUMNS, Limits, Prices, RankedLayouts
from lmtrain.train.before.preflight import check_checkpoint_size
from lmtrain.train.config import RunConfig
from lmtrain.train.durations import Durations, young_daly_s
from lmtrain.train.layouts.dry_run import planned_run
from lmtrain.train.layouts.layout_table import layout_words
from lmtrain.units import format_count, parse_count

OWN = ("hardware", "gpus", "tokens")
USUAL_TOKENS = 4 * 2**20  # of a batch, where none is given: what models of some billion weights are trained with
USUAL_VOCAB = {"gpt": 50257, "bert": 30522}  # GPT-2's and BERT's, where the tokenizer is not known
_OTHER_VOCABS = (32_000, 128_256)
_OF_PARALLEL = [name for name in get_type_hints(ParallelSettings) if name not in ("timeout_s", "auto", "room")]
Span = tuple[float, float]
_FASTEST_SAVE_S = 1.0  # for which training is held up: less is hard to measure
_LEAST_FIT = 3


@dataclass(frozen=True, kw_only=True)
class Open:
    """Something that was not given: what is assumed, and the runs that other values would make."""

    said: str
    others: Mapping[str, PlannedRun]


@dataclass(frozen=True, kw_only=True)
class Question:
    config: RunConfig
    run: PlannedRun
    hardware: Hardware
    gpus: int
    fixed: FixedSettings
    tokens: int | None
    assumed: tuple[Open, ...]
    has_layout: bool = False  # whether the config has a layout besides, which this one has to overrule


def asked(words: Sequence[str], layout: str | None, config_dir: Path | None, name: str) -> Question:
    own, rest = _own(words)
    parse_overrides(
        rest, group_choices(config_dir)
    )  # because: parts of a word are looked for below, and none may stand twice
    gpus = _gpus(own.get("gpus"))
    recipe = _value(rest, "experiment")
    machine = own.get("hardware") or (recipe and _chosen_by(recipe, "hardware", config_dir))
    hardware = hardware_of(machine, [word for word in rest if word.startswith("hardware.")], config_dir)
    rest = [word for word in rest if word != "parallel=auto"]  # because: that is what a plan does
    if whole := next((word for word in rest if word.lstrip("+~").partition("=")[0] == "parallel"), None):
        raise UsageError(f"{whole} chooses a whole layout, which is searched. Give sizes, as in parallel.tp=8.")
    given = [word for word in rest if word.lstrip("+").startswith("parallel.")]
    fixed: dict[str, Any] = dict(_one(word.lstrip("+").removeprefix("parallel.")) for word in given)
    rest = [word for word in rest if word not in given and not word.startswith("hardware.")]
    keys = {word.lstrip("+~").partition("=")[0] for word in rest}
    fills = dict(_fills(rest, keys, hardware, config_dir, own.get("tokens")))
    composed = compose(RunConfig, [*rest, *fills.values()], config_dir=config_dir, name=name)
    config = replace(composed, hardware=hardware)  # whether it can be priced there is judged with all else
    shares = gpus * (config.train.micro_batch if "train.micro_batch" in keys else 1)
    config, assumed = _batch(config, shares, "train.global_batch" not in keys and recipe is None)
    run, vocab = _vocab(config)
    assumed = [*assumed, *vocab]
    if "precision" in fills:
        assumed.append(Open(
            said=f"precision is not given: {config.precision.kind}, the fastest that {hardware.name} has", others={}
        ))  # fmt: skip
    fixed |= {"micro_batch": config.train.micro_batch} if "train.micro_batch" in keys else {}
    fixed |= {"recompute": config.recompute} if any(key.partition(".")[0] == "recompute" for key in keys) else {}
    steps = config.train.steps if recipe is not None or "train.steps" in keys else None
    question = Question(
        config=config, run=run, hardware=hardware, gpus=gpus, fixed=fixed, assumed=tuple(assumed),
        tokens=config.train.tokens or (steps and steps * run.global_batch * run.shape.seq_len),
        has_layout=recipe is not None or composed.parallel != ParallelSettings(),
    )  # fmt: skip
    return question if layout is None else replace(question, fixed=_whole(question, layout))


def _own(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    own, rest = dict[str, str](), list[str]()
    for word in words:
        key, sign, value = word.partition("=")
        near = difflib.get_close_matches(key, OWN, n=1, cutoff=0.7)
        if key in OWN and sign and value:
            if key in own:
                raise UsageError(f"{word} says again what {key}={own[key]} has said. Leave one of them out.")
            own[key] = value
        elif near and "." not in key and key not in group_choices():
            raise UsageError(f"{word} is not a word of a plan. Did you mean {near[0]}={value or 'VALUE'}?")
        else:
            rest.append(word)
    return own, rest


def _gpus(text: str | None) -> int:
    if text is None:
        raise UsageError("gpus is not given, and a plan is for a number of devices. Add gpus=1024, or another number.")
    try:
        count = parse_count(text)
    except ValueError:
        raise UsageError(f"gpus={text} is not a number of devices. Use gpus=1024, or another number.") from None
    if not 1 <= count <= MAX_PROCESSES:
        raise UsageError(
            f"gpus={text} must be from 1 to {MAX_PROCESSES}. Use gpus={min(max(count, 1), MAX_PROCESSES)}."
        )
    return count


def hardware_of(name: str | None, changes: Sequence[str], config_dir: Path | None) -> Hardware:
    """Return a machine of conf/hardware or of the user's folder; `changes` are words such as hardware.power_W=350."""
    choices = group_choices(config_dir).get("hardware", [])
    if name is None:
        raise UsageError(f"hardware is not given, and times are a machine's. Use one of {', '.join(choices)}.")
    path = config_file("hardware", name, config_dir)
    if path is None or name not in choices:
        same = [choice for choice in choices if choice.partition("_")[0] == name.partition("_")[0]]
        near = f"Did you mean {' or '.join(same)}?" if same else spelling_hint(name, choices)
        raise UsageError(
            f"hardware={name} is not a machine of conf/hardware. {near} --config-dir DIR finds one of your own in "
            f"DIR/hardware/{name}.yaml."
        )
    values: Any = read_yaml(path).data
    for key, value in (_pair(word.removeprefix("hardware.")) for word in changes):
        group, dot, entry = key.partition(".")
        if dot and isinstance(values.setdefault(group, {}), dict):  # of peak_tflops, or of factors
            values[group][entry] = yaml.safe_load(value)
        else:
            values[key] = yaml.safe_load(value)
    return build_settings(Hardware, values | {"name": name}, "hardware")


def _value(words: Sequence[str], key: str) -> str | None:
    return next((word.partition("=")[2] for word in words if word.startswith(f"{key}=")), None)


def _chosen_by(recipe: str, group: str, config_dir: Path | None) -> str | None:
    """Return an experiment's choice in a group, or None."""
    path = config_file("experiment", recipe, config_dir)
    tree: Any = read_yaml(path).data if path else {}
    chosen = [item for item in tree.get("defaults", []) if isinstance(item, dict)]
    return next((str(name) for item in chosen for key, name in item.items() if key.endswith(f"/{group}")), None)


def _fills(
    words: Sequence[str], keys: set[str], hardware: Hardware, config_dir: Path | None, tokens: str | None
) -> Iterator[tuple[str, str]]:
    """Words for what a run must have and a plan does not read, or assumes."""
    recipe = "experiment" in keys
    if tokens is not None:
        yield "tokens", f"train.tokens={tokens}"
        if "train.steps" not in keys:
            yield "steps", "train.steps=null"
    yield from _data_fills(words, keys, config_dir)
    if "train.micro_batch" in keys and "train.global_batch" not in keys and not recipe:
        micro = next(word.partition("=")[2] for word in words if word.lstrip("+").startswith("train.micro_batch="))
        if micro.isdecimal() and int(micro):
            yield "batch", f"train.global_batch={micro}"  # until it is known how long samples are
    if "schedule.warmup_steps" not in keys:  # because: how long it is, and the run, changes no time of a step
        yield "warmup", "schedule.warmup_steps=0"
    if "train.micro_batch" not in keys:
        yield "micro", "train.micro_batch=1"
    if recipe:  # because: its layout is one of those that are searched, and need not go with this batch
        usual = ParallelSettings()
        yield from ((name, f"parallel.{name}={show(getattr(usual, name))}") for name in _OF_PARALLEL)
    if not any(key.partition(".")[0] == "precision" for key in keys) and not recipe:
        yield "precision", f"precision={max(('bf16', 'fp16', 'fp32'), key=hardware.peak)}"


def _data_fills(words: Sequence[str], keys: set[str], config_dir: Path | None) -> Iterator[tuple[str, str]]:
    recipe, model = _value(words, "experiment"), _value(words, "model")
    kind = _value(words, "data") or (recipe and _chosen_by(recipe, "data", config_dir))
    if "data" not in keys:
        file = config_file("model", model, config_dir) if model else None
        if file and read_yaml(file).data.get("kind") == "bert":
            yield "data", "data=masked"
    if "data.path" not in keys and kind != "blend":
        yield "path", "data.path=none"


def _batch(config: RunConfig, shares: int, is_open: bool) -> tuple[RunConfig, list[Open]]:
    """Return a config whose batch is a multiple of `shares`, and the runs of a smaller and a larger batch."""
    if not is_open:
        return config, []

    def with_batch(samples: float) -> RunConfig:
        return replace(config, train=replace(config.train, global_batch=max(round(samples / shares), 1) * shares))

    usual = with_batch(USUAL_TOKENS / config.seq_len)
    batch = usual.train.global_batch
    runs = dict[str, PlannedRun]()
    for factor in (0.25, 4):
        with suppress(LmtrainError):  # because: what is given may not go with other batches than the usual one
            if (one := with_batch(batch * factor)).train.global_batch != batch:
                runs[f"{one.train.global_batch:,}"] = _known(one)[0]
    said = f"train.global_batch is not given: {batch:,} samples, {format_count(batch * config.seq_len)} tokens a step"
    return usual, [Open(said=said, others=runs)]


def _vocab(config: RunConfig) -> tuple[PlannedRun, list[Open]]:
    run, was_open = _known(config)
    if not was_open:
        return run, []
    others = {f"{n:,}": replace(run, model=replace(run.model, vocab_size=n)) for n in _OTHER_VOCABS}  # type: ignore[call-arg]
    return run, [Open(said=f"model.vocab_size is the tokenizer's: {run.shape.vocab_size:,} tokens", others=others)]


def _known(config: RunConfig) -> tuple[PlannedRun, bool]:
    """Return a run with a vocabulary size, and whether the size was assumed."""
    if config.model.shape.vocab_size:
        return planned_run(config, config.model), False
    return planned_run(config, config.model.with_vocab(USUAL_VOCAB.get(config.model.kind, USUAL_VOCAB["gpt"]))), True


def _one(word: str) -> tuple[str, Any]:
    """Return a key of `parallel` and its value, judged by itself; whether it fits the others is for their rules."""
    key, text = _pair(word)
    if key not in _OF_PARALLEL:
        raise UsageError(f"parallel.{key}={text} is not of a layout. {spelling_hint(key, _OF_PARALLEL)}")
    judged = build_settings(ParallelSettings, {key: yaml.safe_load(text), "auto": True}, "parallel")
    return key, getattr(judged, key)


def _pair(word: str) -> tuple[str, str]:
    key, sign, value = word.partition("=")
    if not sign or not value:
        raise UsageError(f"{word} gives no value. Use {key}=VALUE, as in tp=8.")
    return key, value


def _whole(question: Question, layout: str) -> FixedSettings:
    """--layout: what it does not name is as usual; copies fill the devices."""
    fixed = dict(question.fixed)
    for item in filter(None, layout.split(",")):
        key, text = _pair(item.strip().removeprefix("parallel."))
        if key in ("micro_batch", "recompute"):
            word = "train.micro_batch" if key == "micro_batch" else key
            raise UsageError(f"--layout {item} is not of a layout. Add {word}={text} beside it.")
        value = _one(f"{key}={text}")[1]
        if fixed.setdefault(key, value) != value:
            raise UsageError(
                f"--layout {layout} has {key}={text}, and {key}={show(fixed[key])} is given too. Leave one of them out."
            )
    sizes = {key: value for key, value in fixed.items() if key in _OF_PARALLEL}
    cut = math.prod(sizes.get(key, 1) for key in ("pp", "tp", "dp_replicate"))
    sizes.setdefault("dp_shard", max(question.gpus // cut, 1))
    parallel = build_settings(ParallelSettings, sizes, "parallel")
    if (size := parallel.layout.world_size) != question.gpus:
        raise UsageError(
            f"--layout {layout} is of {size} devices, and gpus={question.gpus}. "
            f"Use gpus={size}, or sizes that multiply to {question.gpus}."
        )
    parts = {
        "model": question.run.model, "compute": question.run.compute, "parallel": parallel,
        "train": question.config.train, "recompute": question.run.recompute,
    }  # fmt: skip
    if problems := list(RunConfig.problems_across(parts)):
        raise settings_error([problem.text() for problem in problems])
    check_checkpoint_size(replace(question.config, parallel=parallel), question.run.model)
    return fixed | {name: getattr(parallel, name) for name in _OF_PARALLEL}


def on_nodes_of(question: Question, gpus: int) -> Question:
    """Return the question for nodes of `gpus` devices, each device with as much network bandwidth as before."""
    hardware = question.hardware
    nic = hardware.nic_GBps * gpus / hardware.gpus_per_node
    return replace(question, hardware=replace(hardware, gpus_per_node=gpus, nic_GBps=nic))


def nothing_legal(question: Question) -> LmtrainError:
    """Return why no layout is legal: rules that the given sizes break, or else sizes that would work."""
    if problems := [problem.text() for problem in _never(question)]:
        return settings_error(problems)
    shape, gpus, batch = question.run.shape, question.gpus, question.run.global_batch
    beside = ", ".join(f"{key}={show(value)}" for key, value in question.fixed.items() if key in _OF_PARALLEL)
    batches, sizes = -(-batch // gpus) * gpus, max(n for n in divisors(batch, batch) if n <= gpus)
    ways = [f"train.global_batch={batches}"] * (batches != batch) + [f"gpus={sizes}"] * (sizes != gpus)
    ways = ["Use " + ", or ".join(ways)] * bool(ways) + ["leave some of the layout open"] * bool(beside)
    way_out = ", or ".join(ways) or "use fewer GPUs"
    return settings_error([
        f"gpus={gpus} has no legal layout{f' with {beside}' if beside else ''} for train.global_batch={batch}, "
        f"model.num_layers={shape.num_layers} and model.num_heads={shape.num_heads}. {way_out[0].upper()}{way_out[1:]}."
    ])  # fmt: skip


def _never(question: Question) -> Iterator[Problem]:
    """Rules that are against what is given, whatever is chosen beside it."""
    run, fixed = question.run, question.fixed
    given = {key: fixed[key] for key in ("pp", "dp_replicate", "dp_shard", "tp") if key in fixed}
    parallel = ParallelSettings(**given, sequence_parallel=fixed.get("sequence_parallel", False))
    layout, micro = parallel.layout, fixed.get("micro_batch", 1)
    yield from layout_problems(run.shape, parallel, uses_dropout=run.model.uses_dropout, compiles=False)
    if question.gpus % layout.world_size:
        sizes = " x ".join(f"{key}={size}" for key, size in given.items())
        rule = f"is no multiple of {sizes}{f' = {layout.world_size}' * (len(given) > 1)}"
        enough = -(-question.gpus // layout.world_size) * layout.world_size
        way_out = f"Use gpus={enough}, or sizes that divide {question.gpus}."
        yield Problem("gpus", question.gpus, rule, way_out, of_layout=True)
    yield from batch_problems(layout, run.global_batch, micro)
    if run.rampup is not None:
        yield from rampup_problems(layout, run.rampup, micro)


# ---- the answer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    question: Question
    ranked: RankedLayouts
    best: list[LayoutResult]
    too_large: list[LayoutResult]
    points: list[CurvePoint]
    cells: dict[tuple[int, int], LayoutResult | float]
    ranges: list[tuple[str, Span | None]]  # what is assumed, and tokens/s with other values
    by: str = "time"
    hourly: float | None = None  # dollars of a device

    @property
    def first(self) -> LayoutResult | None:
        return self.best[0] if self.best else None

    def rates(self, answer: LayoutResult) -> tuple[float, float]:
        """Tokens a second, from the slowest to the fastest that is to be expected, open questions included."""
        rates = [answer.tokens_per_step / seconds for seconds in answer.interval_s]
        if answer is self.first:
            rates += [rate for _, span in self.ranges for rate in span or ()]
        return min(rates), max(rates)

    def duration(self, answer: LayoutResult) -> tuple[float, float, float] | None:
        """Seconds of all tokens, as expected, at best and at worst."""
        tokens = self.question.tokens
        if tokens is None:
            return None
        slow, fast = self.rates(answer)
        return tokens / answer.tokens_per_s, tokens / fast, tokens / slow

    def dollars(self, answer: LayoutResult) -> tuple[float, ...] | None:
        duration = self.duration(answer)
        if duration is None or self.hourly is None:
            return None
        return tuple(dollars(seconds, answer.gpus, self.hourly) for seconds in duration)

    @property
    def save_every(self) -> tuple[float, float] | None:
        """Seconds between saves, by Young and Daly, for a fast save and for one to a slow disk."""
        between, model = self.question.config.run.time_between_failures, self.question.run.model
        if between is None:
            return None
        slow = Durations(model.num_parameters // self.question.gpus).save_s
        return young_daly_s(_FASTEST_SAVE_S, between), young_daly_s(max(slow, _FASTEST_SAVE_S), between)

    def facts(self) -> dict[str, Any]:
        question, ranked = self.question, self.ranked
        return {
            "model": question.run.model.to_dict(), "hardware": question.hardware.name,
            "unchecked_hardware": question.hardware.unchecked, "gpus": question.gpus,
            "global_batch": question.run.global_batch, "seq_len": question.run.shape.seq_len, "tokens": question.tokens,
            "assumed": [{"what": said, "tokens_per_s": span} for said, span in self.ranges],
            "layouts": {"legal": len(ranked.space), "priced": len(ranked.rows), "fitting": ranked.num_fitting},
            "interval": ranked.prices.interval, "joules_are": "unverified", "by": self.by,
            "best": [self._facts(one) for one in self.best],
            "does_not_fit": [one.facts() | {"over_bytes": self.over(one)} for one in self.too_large],
            "curve": [one.facts() for one in self.points],
            "save_every_s": self.save_every,
        }  # fmt: skip

    def _facts(self, answer: LayoutResult) -> dict[str, Any]:
        assert self.first is not None  # because: it is first among these
        return answer.facts() | {
            "words": layout_words(answer.run.parallel), "duration_s": self.duration(answer),
            "dollars": self.dollars(answer), "slower": answer.seconds / self.first.seconds - 1,
            "why_slower": None if answer is self.first else why_slower(answer, self.first),
        }  # fmt: skip

    def over(self, answer: LayoutResult) -> float:
        """Bytes too many."""
        return answer.total_bytes - self.ranked.usable_bytes


def find(
    question: Question, *, top: int, every: bool, by: str, doublings: int, grow_batch: bool, margin: float,
    switch: int, hourly: float | None,
) -> Found:  # fmt: skip
    study = CurveInputs(
        run=question.run, hardware=question.hardware, limits=Limits(margin=margin, switch=switch),
        prices=machine_prices(question.hardware),
        fixed_settings=question.fixed, objective=by,
        batch_per_gpu=question.run.global_batch / question.gpus if grow_batch else 0.0,
    )  # fmt: skip
    ranked = study.rank_layouts(question.gpus)
    if not len(ranked.space):
        raise nothing_legal(question)
    if not len(ranked.smallest):
        raise LayoutError(_beyond_switch(ranked))
    best = results_at(
        ranked, islice(ranked.iter_fitting(study.best_first(ranked), () if every else FAMILY_COLUMNS), top)
    )
    ranges = list(_ranges(question, study.prices, best[:1]))
    sizes = [gpus for at in range(doublings + 1) if (gpus := question.gpus << at) <= MAX_PROCESSES]
    points = list(scaling_curve(study, ranked, sizes)) if doublings else []
    return Found(
        question, ranked, best, list(too_large_results(ranked, _LEAST_FIT)), points, best_by_pp_and_tp(ranked), ranges,
        by, hourly,
    )  # fmt: skip


def _beyond_switch(ranked: RankedLayouts) -> str:
    node, space = ranked.hardware.gpus_per_node, ranked.space
    least = int(np.min(space.column("shard", ranked.rows) * space.column("tp", ranked.rows)))
    return (
        f"--nodes-per-switch {ranked.limits.switch // node} leaves none of {len(space):,} legal layouts: in each of "
        f"them {least} GPUs or more share weights (dp_shard x tp), and {node} are a node. Use --nodes-per-switch "
        f"{-(-least // node)}, or leave dp_shard and dp_replicate open."
    )


def _ranges(question: Question, prices: Prices, best: list[LayoutResult]) -> Iterator[tuple[str, Span | None]]:
    """Yield each assumption with the range of tokens per second that other values would give the best layout."""
    for one in question.assumed:
        others = [_in_layout(run, best[0].run) for run in one.others.values()] if best else []
        every = [*best, *price_layouts(others, question.hardware, prices)]
        rates = [answer.tokens_per_step / seconds for answer in every for seconds in answer.interval_s]
        yield one.said, (min(rates), max(rates)) if others else None


def _in_layout(run: PlannedRun, of: PlannedRun) -> PlannedRun:
    """Another run in the same layout, with microbatches that divide its batch."""
    micro = max(math.gcd(of.micro_batch, run.global_batch // of.parallel.layout.dp), 1)
    return replace(run, parallel=of.parallel, recompute=of.recompute, micro_batch=micro)
