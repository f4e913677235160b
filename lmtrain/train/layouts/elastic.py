"""Settings for as many processes as there are: the nearest legal layout, with the same batches in the same order.

Called by the command line for --elastic, on every process, which all find the same. What is legal is what RunConfig
takes: no rule stands here. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lmtrain.errors import LayoutError, LmtrainError
from lmtrain.layout import divisors, words
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.schedules.pipeline_schedule import schedule_named
from lmtrain.train.config import RunConfig
from lmtrain.train.layouts.layout_table import layout_words

_NUM_NAMED = 6  # numbers of processes, in a message
_PLAIN = "1f1b"


def fit(config: RunConfig, num_processes: int) -> RunConfig:
    """The same settings where they are for so many processes; else with the nearest legal layout, or a refusal.

    tp and pp stay if they can; else tp, else pp. dp_shard stays as near as can be, and dp_replicate takes the rest.
    The microbatch is smaller only where the copies of the model leave no other.
    """
    if config.parallel.layout.world_size == num_processes:
        return config
    found = _nearest(config, num_processes)
    if found is None:
        raise LayoutError(_refusal(config, num_processes))
    return found


def change_words(before: RunConfig, after: RunConfig) -> str | None:
    """What `fit` has changed, for people; None where nothing."""
    if before == after:
        return None
    old, new = before.parallel, after.parallel
    said = [layout_words(new)]
    said += [
        f"parallel.{key}={getattr(new, key)}"
        for key in ("schedule", "balance")
        if getattr(old, key) != getattr(new, key)
    ]
    said += [f"train.micro_batch={after.train.micro_batch}"] * (before.train.micro_batch != after.train.micro_batch)
    count = new.layout.world_size
    here = f"{count} process shares" if count == 1 else f"{count} processes share"
    return (
        f"--elastic: {here} the work of {old.layout.world_size}: {', '.join(said)}, where the settings say "
        f"{layout_words(old)}. Batches and their order stay the same."
    )


def _nearest(config: RunConfig, num_processes: int) -> RunConfig | None:
    train = config.train
    for parallel in _layouts(config.parallel, num_processes, config.model.shape.num_layers):
        if train.global_batch % parallel.layout.dp:
            continue  # because: most fail here, and RunConfig takes longer to say so
        for size in reversed(divisors(train.micro_batch, train.micro_batch)):
            try:
                return replace(config, parallel=parallel, train=replace(train, micro_batch=size))
            except LmtrainError:
                continue
    return None


def _layouts(asked: ParallelSettings, num_processes: int, num_layers: int) -> Iterator[ParallelSettings]:
    """All that share the work among so many and are legal by themselves, nearest first."""
    found = []
    for pp in _divisors(num_processes):
        for tp in _divisors(num_processes // pp):
            for dp_shard in _divisors(num_processes // pp // tp):
                dp_replicate = num_processes // pp // tp // dp_shard
                for schedule, vp in _chunks(asked, pp, num_layers):
                    found.append((pp, tp, dp_shard, dp_replicate, schedule, vp))
    for pp, tp, dp_shard, dp_replicate, schedule, vp in sorted(found, key=lambda one: _distance(asked, *one)):
        for zero in dict.fromkeys((asked.zero, 1)):
            try:
                yield replace(
                    asked, pp=pp, tp=tp, dp_shard=dp_shard, dp_replicate=dp_replicate, schedule=schedule, vp=vp,
                    zero=zero, balance=asked.balance if pp > 1 else "layers",
                )  # fmt: skip
                break
            except LmtrainError:
                continue


def _chunks(asked: ParallelSettings, pp: int, num_layers: int) -> Iterator[tuple[str, int]]:
    """Pipeline schedules with their stages a rank: the one that was asked for, and the plain one."""
    if pp > 1 and asked.schedule != _PLAIN:
        schedule = schedule_named(asked.schedule)
        yield from ((asked.schedule, vp) for vp in range(1, num_layers // pp + 1) if schedule.allows(vp))
    yield _PLAIN, 1


def _distance(
    asked: ParallelSettings, pp: int, tp: int, dp_shard: int, dp_replicate: int, schedule: str, vp: int
) -> tuple[float, ...]:
    """What is given up last comes first. Of two layouts that are as far, the one of more cuts needs less memory."""
    axes = (
        (tp, asked.tp),
        (pp, asked.pp),
        (vp, asked.vp),
        (dp_shard, asked.dp_shard),
        (dp_replicate, asked.dp_replicate),
    )
    far = [number for size, wanted in axes for number in (max(size, wanted) / min(size, wanted), -size)]
    return (tp != asked.tp, pp != asked.pp, *far[:4], schedule != asked.schedule, *far[4:])


def _refusal(config: RunConfig, num_processes: int) -> str:
    layout, full = config.parallel.layout, config.train.global_batch
    counts = [layout.tp * layout.pp * dp for dp in _divisors(full)]
    near = sorted(counts, key=lambda count: abs(count - num_processes))
    legal = [count for count in near[: 2 * _NUM_NAMED] if _nearest(config, count) is not None][:_NUM_NAMED]
    shape = config.model.shape
    return (
        f"{num_processes} processes were started with --elastic, and no layout of them takes train.global_batch={full}"
        f", model.num_layers={shape.num_layers} and model.num_heads={shape.num_heads}. Start {words(sorted(legal))}, "
        f"which can keep parallel.tp={layout.tp} and parallel.pp={layout.pp}."
    )


def _divisors(value: int) -> list[int]:
    return divisors(value, value)
