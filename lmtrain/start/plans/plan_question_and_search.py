"""`lmtrain plan` without its printing: the command line as a Question, and the search for its best layouts.

A question has a run, a machine, a number of devices and fixed settings; what the command line leaves open is assumed,
and the assumption is reported. The result has the ranking, the scaling curve and the costs. Torch-free.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.compose_run_settings import compose_plain, group_choices
from lmtrain.config.name_suggestions import number_meant
from lmtrain.config.parse_and_apply_overrides import override_key, parse_overrides
from lmtrain.config.settings_base import Problem, show
from lmtrain.config.settings_file import located_problems
from lmtrain.config.typed_words import typed_words
from lmtrain.errors import (
    LayoutError,
    LmtrainError,
    SettingsError,
    UsageError,
    example,
    fill_in,
    leave_out,
    own,
    settings_error,
    spelling_hint,
    way,
)
from lmtrain.placement.batch_rampup_settings import rampup_problems
from lmtrain.placement.layout_option_ways import option_word, parse_sizes, ways_in_layout_option
from lmtrain.placement.parallel_settings import (
    MAX_PROCESSES,
    ParallelSettings,
    batch_problems,
    check_layout,
    layout_problems,
)
from lmtrain.plan.calibrate_to_measured_steps import machine_cost_model
from lmtrain.plan.cost_model.hardware_figures import Hardware
from lmtrain.plan.cost_model.step_time_and_energy import dollars
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun
from lmtrain.plan.search.legal_layouts import FixedSettings, legal_layouts, most_gpus_that_share
from lmtrain.plan.search.order_layouts_by_speed import SHARDING_COLUMNS, CostModel, LayoutLimits, RankedLayouts
from lmtrain.plan.search.predict_layout_cost import (
    CurvePoint,
    LayoutResult,
    ScalingInputs,
    best_by_pp_and_tp,
    price_layouts,
    results_at,
    scaling_curve,
    too_large_results,
    why_slower,
)
from lmtrain.start.init_from_settings_and_import import compose_settings
from lmtrain.train.layouts.dry_run_speed_and_memory import planned_run
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.preflight import check_checkpoint_size
from lmtrain.train.step_and_save_durations import Durations, young_daly_s
from lmtrain.units import format_count, parse_count

PLAN_WORDS = ("hardware", "gpus", "tokens")
USUAL_TOKENS = 4 * 2**20  # tokens of a batch if none is given, as is usual for models of some billion weights
USUAL_VOCAB = {"gpt": 50257, "bert": 30522}  # GPT-2's and BERT's, assumed if the tokenizer is not known
_OTHER_VOCABS = (32_000, 128_256)
_LAYOUT_KEYS = [entry.name for entry in fields(ParallelSettings) if entry.name not in ("timeout_s", "auto")]
Span = tuple[float, float]  # (lowest, highest)
_FASTEST_SAVE_S = 1.0  # the shortest interruption of training by a save: less is hard to measure
_NUM_TOO_LARGE = 3


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """An assumption about a setting that was not given: its text, and the runs with alternative values."""

    text: str
    alternatives: Sequence[PlannedRun] = ()


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question to the planner: a run, a machine, a number of GPUs, and the settings that the user has fixed."""

    config: RunConfig
    run: PlannedRun
    hardware: Hardware
    gpus: int
    fixed: FixedSettings
    tokens: int | None
    assumed: tuple[Assumption, ...]
    has_layout: bool = False  # True if the config has a layout itself, which the plan's settings have to override


def read_question(overrides: Sequence[str], layout: str | None, config_dir: Path | None, name: str) -> Question:
    """Return what `lmtrain plan` was asked: the run, machine and number of GPUs that its arguments `overrides`
    describe, and the sizes fixed by `layout`, the value of --layout. Batch, vocabulary size and precision are assumed
    if they are not given. `name` is the config NAME.yaml to compose from. Raise UsageError or SettingsError on wrong
    arguments.
    """
    plan_words, rest = _split_plan_words(overrides)
    # because: the code below looks for single words, so repeated keys are refused first
    with located_problems(rest):
        parse_overrides(rest, group_choices(config_dir))
    typed = typed_words(rest)
    machine, experiment = plan_words.get("hardware"), typed.get("experiment") or None
    has_no_machine = machine is None and experiment is None
    if has_no_machine and "gpus" not in plan_words:
        raise SettingsError([_NO_GPUS, _no_hardware(config_dir)], "things")
    gpus = _parse_gpus(plan_words.get("gpus"))
    if has_no_machine:
        raise UsageError(_no_hardware(config_dir))
    rest += _words_of_machine(machine, config_dir) if machine is not None else []
    if "tokens" in plan_words:
        rest.append(f"train.tokens={plan_words['tokens']}")
    rest = [word for word in rest if word != "parallel=auto"]  # because: a plan chooses the layout anyway
    if layout_group := next((word for word in rest if override_key(word) == "parallel"), None):
        raise UsageError(
            f"{layout_group} chooses a whole layout, but a plan searches for layouts. {leave_out('parallel')}, or give "
            "single sizes, as in parallel.tp=N."
        )
    sizes = [word for word in rest if word.lstrip("+").startswith("parallel.")]
    fixed: dict[str, Any] = dict(_parse_layout_word(word.lstrip("+").removeprefix("parallel.")) for word in sizes)
    words = [word for word in rest if word not in sizes]
    composed = compose_settings(words, config_dir=config_dir, name=name, rewrite=partial(_fill_in, config_dir))
    assert composed.hardware is not None  # because: `_fill_in` raises if there is none
    # because: a layout is planned for one batch and one length, and most of the time is spent in the longest stage
    stage = max(composed.stage_configs, key=lambda stage: stage.num_tokens)
    given = composed.stages[stage.stage_name].train if composed.stages else {}
    keys = {*typed, *(f"train.{key}" for key in given)}
    config, assumed = stage, []
    if stage.stage_name:
        text = f"the plan is for the stage {stage.stage_name}, which has the most tokens"
        assumed.append(Assumption(text=f"{text}; `lmtrain pretrain --dry-run` shows all stages"))
    if "train.global_batch" not in keys and experiment is None:
        config, batch = _assume_batch(config, gpus * (config.train.micro_batch if "train.micro_batch" in keys else 1))
        assumed.append(batch)
    run = _run_with_vocab_size(config)
    if not config.model.shape.vocab_size:
        vocabs = [replace(run, model=replace(run.model, vocab_size=n)) for n in _OTHER_VOCABS]  # type: ignore[call-arg]
        text = f"model.vocab_size is the tokenizer's: {run.shape.vocab_size:,} tokens"
        assumed.append(Assumption(text=text, alternatives=vocabs))
    if _is_precision_open(typed):
        text = f"precision is not given: {config.precision.kind}, the fastest that {composed.hardware.name} has"
        assumed.append(Assumption(text=text))
    fixed |= {"micro_batch": config.train.micro_batch} if "train.micro_batch" in keys else {}
    fixed |= {"recompute": config.recompute} if any(key.partition(".")[0] == "recompute" for key in keys) else {}
    has_length = experiment is not None or "train.steps" in keys or bool(stage.stage_name)
    steps = config.train.steps if has_length else None
    question = Question(
        config=config, run=run, hardware=composed.hardware, gpus=gpus, fixed=fixed, assumed=tuple(assumed),
        tokens=config.train.tokens or (steps and steps * run.global_batch * run.shape.seq_len),
        has_layout=experiment is not None or composed.parallel != ParallelSettings(),
    )  # fmt: skip
    return question if layout is None else replace(question, fixed=_fix_layout(question, layout))


def _split_plan_words(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split the arguments of `lmtrain plan` into those that `pretrain` does not have (gpus=, hardware=, tokens=),
    returned as key -> value, and the rest, which are overrides of run settings. Raise a UsageError if one of these
    three is repeated or misspelled.
    """
    plan_words, rest = dict[str, str](), list[str]()
    for word in overrides:
        key, sign, value = word.partition("=")
        similar = difflib.get_close_matches(key, PLAN_WORDS, n=1, cutoff=0.7)
        if key.startswith("hardware_"):
            similar = [f"hardware.{key.removeprefix('hardware_')}"]
        if key in PLAN_WORDS and sign and value:
            if key in plan_words:
                ways = f"{way(f'{key}={plan_words[key]}')} or {way(word)} alone"
                raise UsageError(f"{word} and {key}={plan_words[key]} were both given. Use {ways}.")
            plan_words[key] = value
        elif similar and "." not in key and key not in group_choices():
            meant = way(f"{similar[0]}={value}", instead_of=key) if value else f"{similar[0]}=VALUE"
            raise UsageError(f"{word} is not an argument of a plan. Did you mean {meant}?")
        else:
            rest.append(word)
    return plan_words, rest


_NO_GPUS = f"gpus is not given; a plan needs the number of GPUs. Give {fill_in('gpus=COUNT')}."


def _no_hardware(config_dir: Path | None) -> str:
    """Return the problem that no machine is given."""
    names = ", ".join(group_choices(config_dir).get("hardware", []))
    named = f"{fill_in('hardware=NAME')}, one of {names}; hardware.memory_GiB=N gives it another memory."
    return f"hardware is not given; a plan needs a machine. Give {named}"


def _parse_gpus(text: str | None) -> int:
    """Return the number of GPUs from `text`, the value of the argument gpus=COUNT. Raise a UsageError if it is None
    (not given), no number or out of range.
    """
    if text is None:
        raise UsageError(_NO_GPUS)
    try:
        count = parse_count(text)
    except ValueError:
        meant = number_meant(text) or ""
        way_out = f"Use {own(meant)}." if meant.isdecimal() else f"Give a number, such as {example(1024)}."
        raise UsageError(f"gpus={text} is not a number of devices. {way_out}") from None
    if not 1 <= count <= MAX_PROCESSES:
        nearest = way(f"gpus={min(max(count, 1), MAX_PROCESSES)}")
        raise UsageError(f"gpus={text} must be from 1 to {MAX_PROCESSES}. Use {nearest}.")
    return count


def load_hardware(name: str | None, overrides: Sequence[str], config_dir: Path | None) -> Hardware:
    """Return the machine NAME of conf/hardware or of `config_dir`/hardware, changed by overrides such as
    hardware.power_W=350. Raise a UsageError if `name` is None or unknown, SettingsError if a value is wrong.
    """
    if name is None:
        raise UsageError(_no_hardware(config_dir))
    tree = compose_plain([*_words_of_machine(name, config_dir), *overrides], config_dir=config_dir)
    return build_settings(Hardware, tree["hardware"], "hardware")


def _words_of_machine(name: str, config_dir: Path | None) -> list[str]:
    """Return the overrides that choose the machine NAME of conf/hardware or of `config_dir`/hardware, under that name
    whatever its file says. Raise a UsageError if there is none.
    """
    choices = group_choices(config_dir).get("hardware", [])
    if memory := re.fullmatch(r"(\d+) ?(g|gb|gib)", name, re.IGNORECASE):
        chosen = fill_in("hardware=NAME", f"hardware.memory_GiB={memory[1]}")
        raise UsageError(f"hardware={name} is a memory, and no machine. Give {chosen}, one of {', '.join(choices)}.")
    if name not in choices:
        same_family = [choice for choice in choices if choice.partition("_")[0] == name.partition("_")[0]]
        hint = f"Did you mean {' or '.join(map(own, same_family))}?" if same_family else (
            spelling_hint(name, choices, own)
        )  # fmt: skip
        raise UsageError(
            f"hardware={name} is not a machine of conf/hardware. {hint} To use your own machine, give --config-dir DIR "
            f"and write DIR/hardware/{name}.yaml with the keys that `lmtrain config show hardware l40s` prints."
        )
    return [f"hardware={name}", f"hardware.name={name}"]


def _fill_in(config_dir: Path | None, tree: dict[str, Any], typed: Mapping[str, str]) -> dict[str, str]:
    """Fill in, in `tree`, nested dicts of settings, what a plan leaves open: what has no effect on it, and what it
    assumes. `typed` maps each typed key to its text. Return it with the keys that are filled in. Raise a UsageError if
    `tree` has no machine.
    """
    if not (tree.get("hardware") or {}).get("name"):
        raise UsageError(_no_hardware(config_dir))
    typed, train = dict(typed), tree["train"]
    # because: the warmup does not change the time of a step
    filled: dict[str, Any] = {} if "schedule.warmup_steps" in typed else {"schedule.warmup_steps": 0}
    micro = train.get("micro_batch")
    if "train.micro_batch" not in typed:
        filled["train.micro_batch"] = 1
    elif isinstance(micro, int) and micro > 0 and "train.global_batch" not in typed and "experiment" not in typed:
        filled["train.global_batch"] = micro  # until `_assume_batch` knows the sequence length
    if not {"data.path", "data.text"} & typed.keys() and tree["data"].get("kind") != "blend":
        filled["data.path"] = "none"
    if "experiment" in typed:  # because: its layout is one of those searched, and may not fit this batch
        tree["parallel"] = {}
    elif _is_precision_open(typed):
        with suppress(LmtrainError):  # because: a wrong machine is refused with everything else
            hardware: Hardware = build_settings(Hardware, tree["hardware"], "hardware")
            tree["precision"] = {"kind": max(("bf16", "fp16", "fp32"), key=hardware.peak)}
    for key, value in filled.items():
        group, _, name = key.partition(".")
        tree[group][name], typed[key] = value, show(value)
    return typed


def _is_precision_open(typed: Mapping[str, str]) -> bool:
    """Return whether a plan chooses the precision, as neither the typed keys nor an experiment do."""
    return "experiment" not in typed and not any(key.partition(".")[0] == "precision" for key in typed)


def _assume_batch(config: RunConfig, multiple: int) -> tuple[RunConfig, Assumption]:
    """Return `config` with a global batch of about 4M tokens, rounded to a multiple of `multiple` samples, and the
    assumption: its text, and as alternatives the run with a quarter and with four times that batch.
    """

    def with_batch(samples: float) -> RunConfig:
        return replace(config, train=replace(config.train, global_batch=max(round(samples / multiple), 1) * multiple))

    assumed = with_batch(USUAL_TOKENS / config.seq_len)
    batch = assumed.train.global_batch
    runs = []
    for factor in (0.25, 4):
        with suppress(LmtrainError):  # because: the given settings may not fit other batches
            if (other := with_batch(batch * factor)).train.global_batch != batch:
                runs.append(_run_with_vocab_size(other))
    text = f"train.global_batch is not given: {batch:,} samples, {format_count(batch * config.seq_len)} tokens a step"
    return assumed, Assumption(text=text, alternatives=runs)


def _run_with_vocab_size(config: RunConfig) -> PlannedRun:
    """Return the run to plan. If the settings leave the size of the vocabulary to the tokenizer, it is GPT-2's or
    BERT's.
    """
    usual = USUAL_VOCAB.get(config.model.kind, USUAL_VOCAB["gpt"])
    return planned_run(config, config.model if config.model.shape.vocab_size else config.model.with_vocab(usual))


def _parse_layout_word(word: str) -> tuple[str, Any]:
    """Return (key, value) of a parallel setting written as text: "tp=8" -> ("tp", 8). Raise a UsageError on an unknown
    key, SettingsError on a wrong value.
    """
    key, text = _split_pair(word)
    if key not in _LAYOUT_KEYS:
        hint = spelling_hint(
            key, _LAYOUT_KEYS, lambda known: way(f"parallel.{known}={text}", instead_of=f"parallel.{key}", shown=known)
        )
        raise SettingsError([f"parallel.{word}: a layout has no size called {key}. {hint}"])
    checked = build_settings(ParallelSettings, {key: yaml.safe_load(text), "auto": True}, "parallel")
    return key, getattr(checked, key)


def _split_pair(word: str) -> tuple[str, str]:
    """Split a text KEY=VALUE into key and value. Raise a UsageError if the value is missing."""
    key, sign, value = word.partition("=")
    if not sign or not value:
        raise UsageError(f"The argument {word} has no value. Give {key}=VALUE.")
    return key, value


def _fix_layout(question: Question, layout: str) -> FixedSettings:
    """Return the question's fixed settings with a whole layout added, from `layout`, the value of --layout such as
    "tp=8,pp=4". Other sizes get their defaults, except dp_shard, which is chosen so that all GPUs are used. Raise
    UsageError or SettingsError if the layout is not possible.
    """
    fixed = dict(question.fixed)
    for item in filter(None, layout.split(",")):
        key, text = _split_pair(item.strip().removeprefix("parallel."))
        if key in ("micro_batch", "recompute"):
            word = f"{'train.micro_batch' if key == 'micro_batch' else key}={text}"
            rest = {name: size for name, size in parse_sizes(layout).items() if name != key}
            moved = way(word, *([option_word("--layout", rest)] * bool(rest)), instead_of="--layout", shown=word)
            raise UsageError(
                f"--layout takes only the sizes of a layout, and {item} is not one of them. Leave it out of --layout "
                f"and add {moved} as an argument of its own."
            )
        with ways_in_layout_option("--layout", layout, takes_settings=True):
            value = _parse_layout_word(f"{key}={text}")[1]
        if fixed.setdefault(key, value) != value:
            changed = parse_sizes(layout) | {key: show(fixed[key])}
            ways = [leave_out(f"parallel.{key}", shown="Leave the latter out")] if key in question.fixed else []
            ways.append(way(option_word("--layout", changed)))
            raise UsageError(
                f"--layout {layout} has {key}={text}, but {key}={show(fixed[key])} was given too. "
                f"{', or use '.join(ways) if len(ways) > 1 else f'Use {ways[0]}'}."
            )
    sizes = {key: value for key, value in fixed.items() if key in _LAYOUT_KEYS}
    num_parts = math.prod(sizes.get(key, 1) for key in ("pp", "tp", "dp_replicate"))
    sizes.setdefault("dp_shard", max(question.gpus // num_parts, 1))
    with ways_in_layout_option("--layout", layout, takes_settings=True):
        parallel = build_settings(ParallelSettings, sizes, "parallel")
        check_layout(question.run.model, parallel)  # because: GPUs that fit a wrong layout would be refused next
    if (size := parallel.layout.world_size) != question.gpus:
        raise UsageError(
            f"--layout {layout} needs {size} GPUs, but gpus={question.gpus} was given. "
            f"Use {way(f'gpus={size}')}, or sizes that multiply to {question.gpus}."
        )
    settings = {
        "model": question.run.model, "compute": question.run.compute, "parallel": parallel,
        "train": question.config.train, "recompute": question.run.recompute,
    }  # fmt: skip
    with ways_in_layout_option("--layout", layout, takes_settings=True):
        if problems := list(RunConfig.problems_across(settings)):
            raise settings_error([problem.text() for problem in problems])
    check_checkpoint_size(replace(question.config, parallel=parallel), question.run.model)
    return fixed | {name: getattr(parallel, name) for name in _LAYOUT_KEYS}


def with_gpus_per_node(question: Question, gpus: int) -> Question:
    """Return the question with `gpus` GPUs in each node of its machine. The network bandwidth of a node is scaled, so
    that it stays the same per GPU.
    """
    hardware = question.hardware
    nic = hardware.nic_GBps * gpus / hardware.gpus_per_node
    return replace(question, hardware=replace(hardware, gpus_per_node=gpus, nic_GBps=nic))


def keeps_activations(question: Question) -> bool:
    """Return whether the user has fixed a kind of recompute other than full, which needs the least memory."""
    return getattr(question.fixed.get("recompute"), "kind", "full") != "full"


def no_legal_layout_error(question: Question) -> LmtrainError:
    """Return the error to raise if a search has found no legal layout. Its message says which rules the sizes fixed by
    the user break, or else which batch size or number of GPUs would work.
    """
    if (error := error_of_fixed_sizes(question)) is not None:
        return error
    shape, gpus, batch = question.run.shape, question.gpus, question.run.global_batch
    given_sizes = ", ".join(f"{key}={show(value)}" for key, value in question.fixed.items() if key in _LAYOUT_KEYS)
    words = [way(word) for word, other in _larger_batch_or_fewer_gpus(question) if _has_layout(other)]
    keys = [key for key in question.fixed if key in _LAYOUT_KEYS and _has_layout(_without(question, key))]
    way_out = "Leave some of the layout open" if given_sizes else "Use fewer GPUs"
    if words or keys:
        without = " or ".join(leave_out(f"parallel.{key}", shown=f"parallel.{key}") for key in keys)
        way_out = f"Use {', or '.join(words)}" if words else f"Leave {without} out"
    return settings_error([
        f"gpus={gpus} has no legal layout{f' with {given_sizes}' if given_sizes else ''} for "
        f"train.global_batch={batch}, model.num_layers={shape.num_layers} and model.num_heads={shape.num_heads}. "
        f"{way_out}."
    ])  # fmt: skip


def _larger_batch_or_fewer_gpus(question: Question) -> Iterator[tuple[str, Question]]:
    """Yield (word to type, the question with it) for the next larger batch, and the number of GPUs, that may work."""
    gpus, batch = question.gpus, question.run.global_batch
    multiple = gpus * question.fixed.get("micro_batch", 1)
    parts = math.prod(question.fixed.get(key, 1) for key in ("pp", "dp_replicate", "dp_shard", "tp"))
    larger_batch = -(-batch // multiple) * multiple
    if larger_batch != batch:
        larger = replace(question.run, global_batch=larger_batch)
        yield f"train.global_batch={larger_batch}", replace(question, run=larger)
    fewer_gpus = most_gpus_that_share(batch, gpus, parts)
    if fewer_gpus != gpus:
        yield f"gpus={fewer_gpus}", replace(question, gpus=fewer_gpus)


def _has_layout(question: Question) -> bool:
    return len(legal_layouts(question.run, question.gpus, question.hardware, question.fixed)) > 0


def _without(question: Question, key: str) -> Question:
    return replace(question, fixed={name: value for name, value in question.fixed.items() if name != key})


def error_of_layout(question: Question) -> LmtrainError | None:
    """Return the error of a question in which sizes are fixed and that no layout answers; None if one does, or if all
    is open, which takes long to search.
    """
    is_fixed = any(key in _LAYOUT_KEYS for key in question.fixed)
    return None if not is_fixed or _has_layout(question) else no_legal_layout_error(question)


def error_of_fixed_sizes(question: Question) -> LmtrainError | None:
    """Return the error of sizes that the user fixed and that no choice of the others can help; None if there are none.
    """
    problems = [problem.text() for problem in _problems_of_fixed_sizes(question)]
    return settings_error(problems) if problems else None


def _problems_of_fixed_sizes(question: Question) -> Iterator[Problem]:
    """Yield a problem for each layout rule that the sizes fixed by the user break on their own, so that no choice of
    the other sizes can help.
    """
    run, fixed = question.run, question.fixed
    given_sizes = {key: fixed[key] for key in ("pp", "dp_replicate", "dp_shard", "tp") if key in fixed}
    parallel = ParallelSettings(**given_sizes, sequence_parallel=fixed.get("sequence_parallel", False))
    layout, micro = parallel.layout, fixed.get("micro_batch", 1)
    wrong = [*layout_problems(run.shape, parallel, uses_dropout=run.model.uses_dropout, compiles=False)]
    yield from wrong
    if wrong:
        return  # because: GPUs and a batch that fit a wrong layout would be refused next
    if question.gpus % layout.world_size:
        sizes = " x ".join(f"{key}={size}" for key, size in given_sizes.items())
        rule = f"is no multiple of {sizes}{f' = {layout.world_size}' * (len(given_sizes) > 1)}"
        next_multiple = -(-question.gpus // layout.world_size) * layout.world_size
        way_out = f"Use {own(next_multiple)}, or sizes that divide {question.gpus}."
        yield Problem("gpus", question.gpus, rule, way_out, of_layout=True)
    yield from batch_problems(layout, run.global_batch, micro)
    if run.rampup is not None:
        yield from rampup_problems(layout, run.rampup, micro, run.global_batch)


# ---- the result ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanResult:
    """The answer to a question: the best layouts, some that are too large, and the scaling curve."""

    question: Question
    ranked: RankedLayouts
    best: list[LayoutResult]
    too_large: list[LayoutResult]
    points: list[CurvePoint]  # the scaling curve, one point for each number of GPUs
    cells: dict[tuple[int, int], LayoutResult | float]  # (pp, tp) -> its best layout, or the bytes that it needs
    ranges: list[tuple[str, Span | None]]  # assumption -> range of tokens/s with other values
    by: str = "time"  # the objective: "time" or "joules"
    dollars_per_gpu_hour: float | None = None  # None if --price is not given

    @property
    def first(self) -> LayoutResult | None:
        return self.best[0] if self.best else None

    def token_rates(self, layout: LayoutResult) -> tuple[float, float]:
        """Return the lowest and highest tokens per second expected of a layout: its 80% interval, which for the best
        layout is widened to cover the other values of all assumptions.
        """
        rates = [layout.tokens_per_step / seconds for seconds in layout.interval_s]
        if layout is self.first:
            rates += [rate for _, span in self.ranges for rate in span or ()]
        return min(rates), max(rates)

    def duration(self, layout: LayoutResult) -> tuple[float, float, float] | None:
        """Return the seconds to train on all the run's tokens, as (expected, shortest, longest); None if their number
        is not given.
        """
        tokens = self.question.tokens
        if tokens is None:
            return None
        slow, fast = self.token_rates(layout)
        return tokens / layout.tokens_per_s, tokens / fast, tokens / slow

    def dollars(self, layout: LayoutResult) -> tuple[float, ...] | None:
        """Return the price of all the run's tokens in dollars, as (expected, lowest, highest); None if the number of
        tokens or --price is not given.
        """
        duration = self.duration(layout)
        if duration is None or self.dollars_per_gpu_hour is None:
            return None
        return tuple(dollars(seconds, layout.gpus, self.dollars_per_gpu_hour) for seconds in duration)

    @property
    def save_interval_s(self) -> tuple[float, float] | None:
        """The interval between checkpoints, in seconds, that loses the least time to saves and failures (Young's and
        Daly's formula): (if a save takes one second, if it goes to a slow disk). None if run.time_between_failures is
        not set.
        """
        between, model = self.question.config.run.time_between_failures, self.question.run.model
        if between is None:
            return None
        slow = Durations(model.num_parameters // self.question.gpus).save_s
        return young_daly_s(_FASTEST_SAVE_S, between), young_daly_s(max(slow, _FASTEST_SAVE_S), between)

    def facts(self) -> dict[str, Any]:
        """Return the whole result as a JSON-ready dict, for --json."""
        question, ranked = self.question, self.ranked
        return {
            "model": question.run.model.to_dict(), "hardware": question.hardware.name,
            "unchecked_hardware": question.hardware.unchecked, "gpus": question.gpus,
            "global_batch": question.run.global_batch, "seq_len": question.run.shape.seq_len, "tokens": question.tokens,
            "assumed": [{"what": text, "tokens_per_s": span} for text, span in self.ranges],
            "layouts": {"legal": len(ranked.space), "priced": len(ranked.rows), "fitting": ranked.num_fitting},
            "interval": ranked.cost_model.interval, "joules_are": "unverified", "by": self.by,
            "best": [self._layout_facts(layout) for layout in self.best],
            "does_not_fit": [layout.to_dict() | {"over_bytes": self.excess_bytes(layout)} for layout in self.too_large],
            "curve": [layout.to_dict() for layout in self.points],
            "save_every_s": self.save_interval_s,
        }  # fmt: skip

    def _layout_facts(self, layout: LayoutResult) -> dict[str, Any]:
        """Return one of the best layouts as a JSON-ready dict: its settings and prediction, the run's duration and
        price, and by how much and why it is slower than the best.
        """
        assert self.first is not None  # because: `layout` is one of `best`
        return layout.to_dict() | {
            "words": layout.run.parallel.layout_text, "duration_s": self.duration(layout),
            "dollars": self.dollars(layout), "slower": layout.seconds / self.first.seconds - 1,
            "why_slower": None if layout is self.first else why_slower(layout, self.first),
        }  # fmt: skip

    def excess_bytes(self, layout: LayoutResult) -> float:
        """Return by how many bytes a layout exceeds the usable memory of a GPU."""
        return layout.total_bytes - self.ranked.usable_bytes


def find_layouts(
    question: Question, *, top: int, every_layout: bool, objective: str, doublings: int, grow_batch: bool,
    margin: float, gpus_per_switch: int, dollars_per_gpu_hour: float | None,
) -> PlanResult:  # fmt: skip
    """Search all legal parallel layouts of the question's run on its GPUs. Return the `top` best by `objective`
    ("time": step time, "joules": energy per token), some fast ones that need too much memory, and the best layout on 2,
    4, ... up to 2**`doublings` times as many GPUs.

    Without `every_layout`, only the best layout of each pp, tp, zero and shard size counts. `margin` is the share of
    memory to keep free, `gpus_per_switch` the number of GPUs below a network switch (0: no limit). With `grow_batch`,
    the batch grows with the GPUs. Raise if no layout is legal.
    """
    inputs = ScalingInputs(
        run=question.run, hardware=question.hardware, limits=LayoutLimits(margin=margin, switch=gpus_per_switch),
        cost_model=machine_cost_model(question.hardware),
        fixed_settings=question.fixed, objective=objective,
        batch_per_gpu=question.run.global_batch / question.gpus if grow_batch else 0.0,
    )  # fmt: skip
    ranked = inputs.rank_layouts(question.gpus)
    if not len(ranked.space):
        raise no_legal_layout_error(question)
    if not len(ranked.smallest):
        raise LayoutError(_describe_switch_limit(ranked))
    best = results_at(
        ranked, islice(ranked.iter_fitting(inputs.best_first(ranked), () if every_layout else SHARDING_COLUMNS), top)
    )
    ranges = list(_assumption_ranges(question, inputs.cost_model, best[:1]))
    sizes = [gpus for doubling in range(doublings + 1) if (gpus := question.gpus << doubling) <= MAX_PROCESSES]
    points = list(scaling_curve(inputs, ranked, sizes)) if doublings else []
    return PlanResult(
        question, ranked, best, list(too_large_results(ranked, _NUM_TOO_LARGE)), points, best_by_pp_and_tp(ranked),
        ranges, objective, dollars_per_gpu_hour,
    )  # fmt: skip


def _describe_switch_limit(ranked: RankedLayouts) -> str:
    """Return the error text for a search in which --nodes-per-switch excludes every legal layout: all share weights
    among more GPUs than one network switch connects.
    """
    node, space = ranked.hardware.gpus_per_node, ranked.space
    min_group = int(np.min(space.column("shard", ranked.rows) * space.column("tp", ranked.rows)))
    return (
        f"--nodes-per-switch {ranked.limits.switch // node} leaves none of {len(space):,} legal layouts: in each of "
        f"them {min_group} GPUs or more share weights (dp_shard x tp), and a node has {node}. Use "
        f"{way('--nodes-per-switch', str(-(-min_group // node)))}, or leave dp_shard and dp_replicate open."
    )


def _assumption_ranges(
    question: Question, cost_model: CostModel, best: list[LayoutResult]
) -> Iterator[tuple[str, Span | None]]:
    """Yield (text, range) for each assumption of the question. The range is the (lowest, highest) tokens per second of
    the best layout over the assumption's other values; None if it has none or `best` is empty. `best` holds the best
    layout or nothing.
    """
    for assumption in question.assumed:
        runs = [_in_layout_of(run, best[0].run) for run in assumption.alternatives] if best else []
        layouts = [*best, *price_layouts(runs, question.hardware, cost_model)]
        rates = [layout.tokens_per_step / seconds for layout in layouts for seconds in layout.interval_s]
        yield assumption.text, (min(rates), max(rates)) if runs else None


def _in_layout_of(run: PlannedRun, other: PlannedRun) -> PlannedRun:
    """Return `run` in the layout of `other`, with micro-batches that divide its batch."""
    micro_batch = max(math.gcd(other.micro_batch, run.global_batch // other.parallel.layout.dp), 1)
    return replace(run, parallel=other.parallel, recompute=other.recompute, micro_batch=micro_batch)
