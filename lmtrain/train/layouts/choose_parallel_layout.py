"""The layout of a run for the given number of processes: the nearest legal one (--elastic) or the planner's best.

Called by the command line before anything depends on the layout, on every process; all processes compute the same
result. Batches and their order stay. RunConfig decides what is legal; this module has no rules of its own. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.checkpoint.find_and_prune import latest_checkpoint
from lmtrain.config.settings_base import show
from lmtrain.errors import LayoutError, LmtrainError, leave_out, way
from lmtrain.layout import divisors, format_choices
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.batch_rampup_settings import RampUpSettings
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.plan.calibrate_to_measured_steps import machine_cost_model
from lmtrain.plan.cost_model.hardware_figures import Hardware
from lmtrain.plan.run_estimates.rank_memory_by_purpose import count_rank_bytes, fullest_rank
from lmtrain.plan.run_estimates.simulate_pipeline import price_runs
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun
from lmtrain.plan.search.legal_layouts import legal_layouts
from lmtrain.plan.search.order_layouts_by_speed import SHARDING_COLUMNS, LayoutLimits, RankedLayouts, rank_layouts
from lmtrain.runfolder.file_names import CHECKPOINTS
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.train.layouts.dry_run_speed_and_memory import StepForecast, planned_run
from lmtrain.train.run_config import RunConfig, read_run_config
from lmtrain.train.run_stage_settings import StageSettings
from lmtrain.units import format_bytes

_TIE_SHARE = 0.0005
_MAX_TRIED = 50  # layouts that fit one stage of a run and are tried for the others
_NUM_NAMED = 6  # process counts that a message suggests
_DEFAULT_SCHEDULE = "1f1b"
_NEVER_SEARCHED = ("auto", "timeout_s")  # keys of `parallel` that are never searched
_PART_WORDS = {
    "compute": "more work for the busiest rank", "bubble": "a larger bubble", "sharded": "gathering sharded weights",
    "reduce": "summing gradients", "update": "the optimizer", "stragglers": "waiting for the slowest",
}  # fmt: skip


def fixed_layout_settings(config: RunConfig, keys: Collection[str]) -> dict[str, Any]:
    """Return key -> value for the layout settings that the user typed, such as `tp`, `micro_batch` and `recompute`; the
    search for a layout must keep these and may choose all others. `keys` are the dotted keys that were typed, such as
    "parallel.tp".
    """
    typed_keys = {key.removeprefix("parallel.") for key in keys if key.startswith("parallel.")}
    fixed_settings = {key: getattr(config.parallel, key) for key in sorted(typed_keys) if key not in _NEVER_SEARCHED}
    fixed_settings |= {"micro_batch": config.train.micro_batch} if "train.micro_batch" in keys else {}
    has_recompute = any(key.partition(".")[0] == "recompute" for key in keys)
    return fixed_settings | ({"recompute": config.recompute} if has_recompute else {})


def previous_layout(config: RunConfig, fixed_settings: Mapping[str, Any]) -> RunConfig | None:
    """Return `config` with the layout that the run's last start used, so that a resumed run keeps it. Return None if
    the run has no checkpoint yet, or if that layout contradicts `fixed_settings`, which maps keys to the values the
    user typed.
    """
    folder = Path(config.run.dir)
    if latest_checkpoint(folder / CHECKPOINTS) is None:
        return None
    try:
        last_config = read_run_config(folder)
        run = planned_run(last_config, last_config.model)
        values = vars(run.parallel) | {"micro_batch": run.micro_batch, "recompute": run.recompute}
        return _with_layout(config, run) if all(values[key] == value for key, value in fixed_settings.items()) else None
    except LmtrainError:
        return None  # because: the folder belongs to another model, which is reported when its checkpoint is opened


def choose_layout(
    config: RunConfig, model: ModelSettings, num_processes: int, fixed_settings: Mapping[str, Any]
) -> tuple[RunConfig, list[str]]:
    """Return `config` with the layout of `num_processes` processes that has the shortest predicted step time among
    those that fit in memory, and lines of text with the reasons. `fixed_settings` maps layout keys to values that must
    be kept. With training stages, it must fit all of them, and the step time is that of the longest. Raise LayoutError
    if none fits.
    """
    assert config.hardware is not None  # because: RunConfig requires it for parallel.auto
    if config.stages:
        return _choose_for_stages(config, model.shape.vocab_size, num_processes, fixed_settings)
    ranked = _rank(planned_run(config, model), config.hardware, num_processes, fixed_settings)
    best = ranked.best_index
    assert best is not None
    return _with_layout(config, ranked.run_at(best)), list(_reason_lines(ranked, best, num_processes))


def _rank(
    run: PlannedRun, hardware: Hardware, num_processes: int, fixed_settings: Mapping[str, Any]
) -> RankedLayouts:
    """Return all legal layouts of `num_processes` processes for a run, with their predicted step times and memory.
    Layout keys in `fixed_settings` keep their values. Raise LayoutError if no layout is legal, or if none fits in
    memory.
    """
    ranked = rank_layouts(
        legal_layouts(run, num_processes, hardware, fixed_settings), hardware, LayoutLimits(),
        machine_cost_model(hardware),
    )  # fmt: skip
    if not len(ranked.rows):
        raise LayoutError(_no_legal_layout_message(run, num_processes, hardware, fixed_settings))
    if ranked.best_index is None:
        raise LayoutError(_no_fit_message(ranked, num_processes))
    return ranked


def _choose_for_stages(
    config: RunConfig, vocab_size: int, num_processes: int, fixed_settings: Mapping[str, Any]
) -> tuple[RunConfig, list[str]]:
    """Return `config` with a layout that divides the batches of all training stages and fits in memory in each, and
    lines of text with the reasons. It is the fastest such layout for the stage with the most tokens or, if the search
    finds none, for the stage that needs most memory. Raise LayoutError if there is none. `fixed_settings` are as in
    `choose_layout`.
    """
    assert config.hardware is not None
    divisor = math.gcd(*(
        size for stage in config.stage_configs
        for size in stage.batch_plan.sizes_between(stage.first_step, stage.end_step)
    ))  # fmt: skip
    longest = max(config.stage_configs, key=lambda stage: stage.num_tokens)
    largest = max(config.stage_configs, key=lambda stage: _count_bytes(stage, vocab_size))
    for stage, reason in ((longest, "has the most tokens"), (largest, "needs most memory")):
        fixed = {**fixed_settings, **_fixed_by_stage(config.stages[stage.stage_name], stage)}
        # because: the search tries layouts that divide the steps of a ramp-up, and so the batches of the other stages
        rampup = RampUpSettings(start=divisor, increment=divisor, samples=1)
        run = replace(planned_run(stage, stage.model.with_vocab(vocab_size)), rampup=rampup)
        ranked = _rank(run, config.hardware, num_processes, fixed)
        for index in islice(ranked.iter_fitting(ranked.fastest), _MAX_TRIED):
            with suppress(LmtrainError):  # because: a rule of another stage may not allow the layout
                chosen = _with_layout(config, ranked.run_at(index))
                if all(_count_bytes(each, vocab_size) <= ranked.usable_bytes for each in chosen.stage_configs):
                    return chosen, [
                        f"parallel=auto plans for the stage {stage.stage_name}, which {reason}",
                        *_reason_lines(ranked, index, num_processes),
                    ]
    raise LayoutError(
        f"parallel.auto=true finds no layout of {num_processes} processes that divides the batch of every stage and "
        f"fits in {format_bytes(ranked.hardware.memory_bytes)} of hardware={config.hardware.name} in all of them. Give "
        "the stages more similar batches and lengths, or choose parallel.* yourself."
    )


def _count_bytes(stage: RunConfig, vocab_size: int) -> int:
    """Return the bytes that the fullest rank of a stage needs."""
    run = planned_run(stage, stage.model.with_vocab(vocab_size))
    return sum(count_rank_bytes(run, fullest_rank(run)).values())


def _fixed_by_stage(given: StageSettings, stage: RunConfig) -> dict[str, Any]:
    """Return the layout settings that a stage gives for itself, which the search has to keep."""
    fixed = {"micro_batch": stage.train.micro_batch} if "micro_batch" in given.train else {}
    return fixed | ({"recompute": stage.recompute} if given.recompute else {})


def _reason_lines(ranked: RankedLayouts, chosen_index: int, num_processes: int) -> Iterator[str]:
    """Yield lines of text on the chosen layout, the one at `chosen_index` in `ranked`: its predicted step time and
    memory, the next best layout, and how many layouts do not fit in memory.
    """
    expected = StepForecast(float(ranked.seconds[chosen_index]), ranked.cost_model.interval)
    yield (
        f"parallel=auto: {_layout_text(ranked.run_at(chosen_index))}, for {num_processes} of {ranked.hardware.name}: "
        f"a step of {expected.text()}, and {format_bytes(ranked.count_bytes(chosen_index))} "
        f"of {format_bytes(ranked.hardware.memory_bytes)} on the fullest rank"
    )
    candidates = (
        candidate
        for candidate in ranked.iter_fitting(ranked.fastest, SHARDING_COLUMNS)
        if _family_of(ranked, candidate) != _family_of(ranked, chosen_index)
    )
    if (next_index := next(candidates, None)) is not None:
        excess = float(ranked.seconds[next_index] / ranked.seconds[chosen_index] - 1)
        reason = _largest_increase(ranked, chosen_index, next_index) if excess > _TIE_SHARE else ""
        slower = f"{excess:.1%} slower, for {reason}" if reason else "as fast"
        yield f"next best: {_layout_text(ranked.run_at(next_index))}, {slower}"
    if num_too_large := len(ranked.rows) - ranked.num_fitting:
        yield f"{num_too_large:,} of {len(ranked.rows):,} layouts do not fit with {ranked.limits.margin:.0%} to spare"


def _family_of(ranked: RankedLayouts, index: int) -> tuple[float, ...]:
    """Return the values in SHARDING_COLUMNS, such as the sizes of the parallel axes, of the layout at `index`. Layouts
    with equal values are shown as one.
    """
    return tuple(float(ranked.space.column(name, ranked.rows[[index]])[0]) for name in SHARDING_COLUMNS)


def _largest_increase(ranked: RankedLayouts, index: int, slower_index: int) -> str:
    """Return in words the part of the step, such as the bubble, that costs most more time in the layout at
    `slower_index` than in that at `index`.
    """
    time, _ = price_runs([ranked.run_at(index), ranked.run_at(slower_index)], ranked.hardware, ranked.cost_model.time)
    return _PART_WORDS[max(_PART_WORDS, key=lambda name: float(np.diff(getattr(time, name))[0]))]


def _no_legal_layout_message(
    run: PlannedRun, num_processes: int, hardware: Hardware, fixed_settings: Mapping[str, Any]
) -> str:
    """Return the error message for parallel.auto if no layout of this many processes suits the model, the batch and
    `fixed_settings`, which maps keys to the values the user typed. It suggests other numbers of processes.
    """
    nearest_counts = sorted(divisors(run.global_batch, run.global_batch), key=lambda count: abs(count - num_processes))
    nearest_counts = nearest_counts[:_NUM_NAMED]
    counts = sorted(count for count in nearest_counts if len(legal_layouts(run, count, hardware, fixed_settings)))
    fixed_words = [
        f"{'train' if key == 'micro_batch' else 'parallel'}.{key}={show(value)}"
        for key, value in fixed_settings.items() if key != "recompute"
    ]  # fmt: skip
    without_fixed = leave_out(
        *(word.partition("=")[0] for word in fixed_words), shown=f"Leave out {' and '.join(fixed_words)}"
    )
    return (
        f"parallel.auto=true finds no layout of {num_processes} processes"
        f"{' with ' * bool(fixed_words)}{' and '.join(fixed_words)} that takes "
        f"train.global_batch={run.global_batch}, model.num_layers={run.shape.num_layers} and "
        f"model.num_heads={run.shape.num_heads}. "
        + (f"Start {format_choices(counts, _started)} processes." if counts else f"{without_fixed}.")
    )


def _started(num_processes: int) -> str:
    """Return a number of processes to start, as a way out where --nproc starts them."""
    text = str(num_processes)
    return way("--nproc", text, shown=text) if ProcessEnv.detect().takes_nproc else text


def _no_fit_message(ranked: RankedLayouts, num_processes: int) -> str:
    """Return the error message for parallel.auto if every possible layout needs more memory than a device has."""
    smallest = int(np.argmin(ranked.estimated_bytes))
    return (
        f"parallel.auto=true finds no layout of {num_processes} processes that fits in "
        f"{format_bytes(ranked.hardware.memory_bytes)} of hardware={ranked.hardware.name} with "
        f"{ranked.limits.margin:.0%} to spare: the smallest, "
        f"{_layout_text(ranked.run_at(smallest))}, needs {format_bytes(ranked.count_bytes(smallest))}. Start more "
        "processes, or give a smaller model.seq_len or model."
    )


def _layout_text(run: PlannedRun) -> str:
    """Return the layout, schedule, micro-batch size and recompute setting of a run as text, for messages."""
    schedule = [run.parallel.schedule] * (run.parallel.pp > 1)
    return ", ".join([
        run.parallel.layout_text, *schedule, f"train.micro_batch={run.micro_batch}", *run.recompute.settings
    ])  # fmt: skip


def _with_layout(config: RunConfig, run: PlannedRun) -> RunConfig:
    """Return `config` with the parallel settings, micro-batch size and recompute setting of `run`, and parallel.auto
    off.
    """
    return replace(
        config, parallel=replace(run.parallel, auto=False, timeout_s=config.parallel.timeout_s),
        train=replace(config.train, micro_batch=run.micro_batch), recompute=run.recompute,
    )  # fmt: skip


def adapt_to_processes(config: RunConfig, num_processes: int) -> RunConfig:
    """Return `config` unchanged if its layout needs exactly `num_processes` processes, else with the most similar
    layout that does. Raise LayoutError if no layout of so many processes suits the model and the batch.

    Both tp and pp stay if possible, else tp alone, else pp alone. dp_shard stays as near as possible, and dp_replicate
    takes the rest. The micro-batch shrinks only if the number of replicas requires it.
    """
    if config.parallel.layout.world_size == num_processes:
        return config
    if (nearest := _nearest_config(config, num_processes)) is None:
        raise LayoutError(_no_layout_message(config, num_processes))
    return nearest


def adaptation_message(before: RunConfig, after: RunConfig) -> str | None:
    """Return a message on the changes that `adapt_to_processes` made to the config `before`, with the result `after`;
    None if it made none.
    """
    if before == after:
        return None
    old, new = before.parallel, after.parallel
    changes = [new.layout_text]
    for key in ("schedule", "balance"):
        changes += [f"parallel.{key}={getattr(new, key)}"] * (getattr(old, key) != getattr(new, key))
    changes += [f"train.micro_batch={after.train.micro_batch}"] * (before.train.micro_batch != after.train.micro_batch)
    changes += [
        f"stages.{name}.train.micro_batch={stage.train['micro_batch']}"
        for name, stage in after.stages.items() if stage != before.stages[name]
    ]  # fmt: skip
    count = new.layout.world_size
    subject = f"{count} process shares" if count == 1 else f"{count} processes share"
    return (
        f"--elastic: {subject} the work of {old.layout.world_size}: {', '.join(changes)}, where the settings say "
        f"{old.layout_text}. Batches and their order stay the same."
    )


def _nearest_config(config: RunConfig, num_processes: int) -> RunConfig | None:
    """Return `config` with the most similar layout of `num_processes` that passes all checks of RunConfig, or None if
    there is none.
    """
    train = config.train
    for parallel in _legal_layouts(config.parallel, num_processes, config.model.shape.num_layers):
        if train.global_batch % parallel.layout.dp:
            continue  # because: most layouts fail here, and this check is faster than RunConfig's
        stages = {name: _fit_micro_batch(stage, config, parallel.layout.dp) for name, stage in config.stages.items()}
        for size in reversed(divisors(train.micro_batch, train.micro_batch)):
            with suppress(LmtrainError):  # because: the settings' own checks decide
                return replace(config, parallel=parallel, train=replace(train, micro_batch=size), stages=stages)
    return None


def _fit_micro_batch(stage: StageSettings, config: RunConfig, num_replicas: int) -> StageSettings:
    """Return the settings of a training stage with its micro-batch size reduced, where necessary, to a divisor of the
    samples that each of `num_replicas` data-parallel replicas reads in a step. Return them unchanged if the stage gives
    no micro-batch size, or if its global batch cannot be divided among the replicas.
    """
    size, batch = (stage.train.get(key) for key in ("micro_batch", "global_batch"))
    batch = config.train.global_batch if batch is None else batch
    if size is None or batch % num_replicas:
        return stage
    return replace(stage, train=stage.train | {"micro_batch": math.gcd(size, batch // num_replicas)})


def _legal_layouts(configured: ParallelSettings, num_processes: int, num_layers: int) -> Iterator[ParallelSettings]:
    """Yield the parallel settings of each layout for `num_processes` that ParallelSettings accepts, most similar to
    `configured` first. Whether a layout suits the batch and the model is not checked here.
    """
    candidates = [
        (pp, tp, dp_shard, num_processes // pp // tp // dp_shard, schedule, vp)
        for pp in _divisors(num_processes)
        for tp in _divisors(num_processes // pp)
        for dp_shard in _divisors(num_processes // pp // tp)
        for schedule, vp in _schedule_choices(configured, pp, num_layers)
    ]
    for pp, tp, dp_shard, dp_replicate, schedule, vp in sorted(
        candidates, key=lambda candidate: _layout_distance(configured, *candidate)
    ):
        for zero in dict.fromkeys((configured.zero, 1)):
            try:
                yield replace(
                    configured, pp=pp, tp=tp, dp_shard=dp_shard, dp_replicate=dp_replicate, schedule=schedule, vp=vp,
                    zero=zero, balance=configured.balance if pp > 1 else "layers",
                )  # fmt: skip
                break
            except LmtrainError:
                continue


def _schedule_choices(configured: ParallelSettings, pp: int, num_layers: int) -> Iterator[tuple[str, int]]:
    """Yield (pipeline schedule, stages per rank) for a layout with `pp` pipeline ranks: the configured schedule with
    each number of stages per rank that it allows, then "1f1b" with one.
    """
    if pp > 1 and configured.schedule != _DEFAULT_SCHEDULE:
        counts = range(1, num_layers // pp + 1)
        yield from ((configured.schedule, vp) for vp in counts if configured.pipeline.allows(vp))
    yield _DEFAULT_SCHEDULE, 1


def _layout_distance(
    configured: ParallelSettings, pp: int, tp: int, dp_shard: int, dp_replicate: int, schedule: str, vp: int
) -> tuple[float, ...]:
    """Return a sort key that is smaller the more similar a layout (pp, tp and so on) is to the `configured` one.
    Layouts that keep tp come first, and among these those that keep pp.

    Ties go to layouts that split the model further, which need less memory.
    """
    axes = (
        (tp, configured.tp),
        (pp, configured.pp),
        (vp, configured.vp),
        (dp_shard, configured.dp_shard),
        (dp_replicate, configured.dp_replicate),
    )
    distances = [number for size, target in axes for number in (max(size, target) / min(size, target), -size)]
    return (tp != configured.tp, pp != configured.pp, *distances[:4], schedule != configured.schedule, *distances[4:])


def _no_layout_message(config: RunConfig, num_processes: int) -> str:
    """Return the error message for --elastic if no layout of `num_processes` suits the model and the batch. It suggests
    numbers of processes that do.
    """
    layout, full = config.parallel.layout, config.train.global_batch
    counts = sorted(
        (layout.tp * layout.pp * dp for dp in _divisors(full)), key=lambda count: abs(count - num_processes)
    )
    legal = [count for count in counts[: 2 * _NUM_NAMED] if _nearest_config(config, count) is not None]
    shape, choices = config.model.shape, format_choices(sorted(legal[:_NUM_NAMED]), _started)
    return (
        f"{num_processes} processes were started with --elastic, and no layout of them takes train.global_batch={full}"
        f", model.num_layers={shape.num_layers} and model.num_heads={shape.num_heads}. "
        f"Start {choices}, which can keep parallel.tp={layout.tp} and parallel.pp={layout.pp}."
    )


def _divisors(value: int) -> list[int]:
    return divisors(value, value)
