"""The parallel settings: sizes of the axes, and the checks of a layout against a model and its batches. Torch-free.

Called when a run's settings are checked, and by the planner, which searches for layouts that pass these checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.settings_base import PLUGIN_WAY_OUT, Facts, Problem, Settings, kinds, problem_if, setting
from lmtrain.errors import SettingsError, leave_out, own, settings_error, spelling_hint, way
from lmtrain.layout import Layout, divisors, format_choices
from lmtrain.models.model_settings import ModelSettings
from lmtrain.schedules.pipeline_schedule import PipelineSchedule, schedule_named
from lmtrain.spec import ModelShape

MAX_PROCESSES = 1 << 17  # because: the placement of each process is computed before any process starts
MAX_TIMEOUT_S = 10_000_000
MAX_STAGE_MICROBATCHES = 1 << 16  # because: the whole schedule, action by action, is computed before the run begins
AXES = ("pp", "vp", "dp_replicate", "dp_shard", "tp")
KEYS = (*AXES, "zero", "schedule", "balance")
ONE_PROCESS = "one process"  # the layout of a single process, as results and tables show it


@dataclass(frozen=True, kw_only=True)
class ParallelSettings(Settings):
    field_facts: ClassVar[Facts] = Facts(chosen_at_start=True)

    auto: bool = False  # the planner chooses the settings below, the micro-batch and recompute
    pp: int = 1
    vp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    # ZeRO level, what dp_shard shards: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights
    zero: int = field(default=1, metadata={"meant": {"true": "1", "false": "0", "none": "0", "null": "0"}})
    sequence_parallel: bool = True
    schedule: str = field(default="1f1b", metadata={"kinds": PipelineSchedule})  # with pp: the pipeline schedule
    balance: Literal["layers", "cost"] = "layers"  # with pp: the quantity that is equal over stages
    timeout_s: float = setting(default=600.0, affects="nothing")

    def problems(self) -> Iterator[Problem]:
        yield from self.checked(*(self.at_least(1, axis) for axis in AXES))
        known = kinds(PipelineSchedule)
        unknown = self.schedule not in known
        if unknown:
            way_out = f"{spelling_hint(self.schedule, known, own)} {PLUGIN_WAY_OUT}"
            yield Problem("schedule", self.schedule, "is not a pipeline schedule", way_out)
        if not self.auto:  # because: with `auto` each setting is a separate condition for the planner
            yield from () if unknown else self._schedule_problems()
            zero, shard = self.zero, self.dp_shard
            replicas = way(".dp_shard=1", f".dp_replicate={self.dp_replicate * max(shard, 1)}")
            yield from self.checked(
                (zero == 0 and shard > 1, "zero", f"shards nothing, but dp_shard={shard} asks for {shard} shards",
                 f"Use {way('.zero=1')}, or {replicas}."),
                (zero in (2, 3) and shard == 1, "zero",
                 "has nothing to shard over, since dp_shard=1", f"Use {own(1)}, or {way('.dp_shard=2')} or more."),
            )  # fmt: skip
        sizes = {axis: size for axis in AXES if axis != "vp" and (size := getattr(self, axis)) > 1}
        yield from self.checked(
            (not 0 <= self.zero <= 3, "zero", "is not a ZeRO level", f"Use {format_choices([0, 1, 2, 3], own)}."),
            self.above_0("timeout_s", f"Use {own(600)}."),
            self.at_most(MAX_TIMEOUT_S, "timeout_s", f"Use {own(600)}."),
            (math.prod(sizes.values()) > MAX_PROCESSES, max(sizes, key=lambda axis: sizes[axis], default="dp_shard"),
             f"makes {math.prod(sizes.values())} processes; at most {MAX_PROCESSES} are allowed",
             "Give a smaller one."),
        )  # fmt: skip

    def _schedule_problems(self) -> Iterator[Problem]:
        if self.pp == 1:
            way_out = f"Use {own(1)}, or {way('.pp=2')}."
            yield from self.problem_if(self.vp > 1, "vp", "needs a pipeline, and pp=1 has none", way_out)
            return
        schedule = self.pipeline
        other = f"{way('.schedule=interleaved')} for more stages a rank"
        if self.vp == 1:
            other = f"{way('.schedule=1f1b')} for one stage a rank"
        yield from self.checked(
            (not schedule.allows(self.vp), "vp",
             f"does not fit parallel.schedule={self.schedule}, which {schedule.rule}",
             f"Use {way(f'.vp={schedule.chunks}')}, or {other}."),
            (schedule.splits_backward and self.zero == 3, "zero",
             f"releases the weights that the second half of schedule={self.schedule}'s backward needs",
             f"Use {own(2)} or {own(1)}."),
        )  # fmt: skip

    @property
    def layout_text(self) -> str:
        """The sizes of the axes as text, such as "dp_shard 4 x tp 2, zero 1"."""
        sizes = " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1) or ONE_PROCESS
        return sizes + (f", zero {self.zero}" if self.layout.dp > 1 else "")

    @property
    def pipeline(self) -> PipelineSchedule:
        return schedule_named(self.schedule)

    @property
    def splits_backward(self) -> bool:
        """True if the gradients of inputs and of weights are computed in separate actions."""
        return self.pp > 1 and self.pipeline.splits_backward

    @property
    def layout(self) -> Layout:
        return Layout(self.pp, self.vp, self.dp_replicate, self.dp_shard, self.tp)


def layout_problems(
    shape: ModelShape, parallel: ParallelSettings, *, uses_dropout: bool, compiles: bool
) -> Iterator[Problem]:
    """Yield the reasons why a model of this shape cannot use the layout; heads and columns are never split."""
    for problem in _problems_of(shape, parallel, uses_dropout, compiles):
        yield replace(problem, of_layout=True)


def _problems_of(
    shape: ModelShape, parallel: ParallelSettings, uses_dropout: bool, compiles: bool
) -> Iterator[Problem]:
    tp, stages = parallel.tp, parallel.pp * parallel.vp
    for key, given, usual in (("schedule", parallel.schedule, "1f1b"), ("balance", parallel.balance, "layers")):
        yield from problem_if(
            parallel.pp == 1 and given != usual, f"parallel.{key}", given,
            "only applies to a pipeline, and parallel.pp=1 has none",
            f"Use {way('parallel.pp=2')} or {leave_out(shown='leave it out')}.",
        )
    yield from problem_if(
        stages > shape.num_layers, "parallel.pp", parallel.pp,
        f"x vp={parallel.vp} makes {stages} stages, more than model.num_layers={shape.num_layers}",
        _fewer_stages(shape.num_layers, parallel),
    )
    if compiles and (why_not := why_not_compiled(parallel, uses_dropout=uses_dropout)):
        yield why_not
    if tp > 1:
        yield from _tp_problem(shape, tp, parallel.sequence_parallel)


def _fewer_stages(num_layers: int, parallel: ParallelSettings) -> str:
    """Return the sentence with the settings of a pipeline that has no more stages than the model has layers."""
    most = num_layers // parallel.vp
    if most > 1:
        # because: "or less" includes pp=1, which has no stages, no schedule and no balance
        any_less = parallel.vp == 1 and (parallel.schedule, parallel.balance) == ("1f1b", "layers")
        return f"Use {way(f'parallel.pp={most}')}{' or less' * any_less}."
    words = [f"parallel.pp={min(parallel.pp, num_layers)}", *["parallel.vp=1"] * (parallel.vp > 1)]
    is_pipeline = num_layers > 1
    words += ["parallel.schedule=1f1b"] * (parallel.schedule != "1f1b" and not (
        is_pipeline and parallel.pipeline.allows(1)
    ))  # fmt: skip
    words += ["parallel.balance=layers"] * (parallel.balance != "layers" and not is_pipeline)
    return f"Use {way(*words)}."


def _tp_problem(shape: ModelShape, tp: int, sequence_parallel: bool) -> Iterator[Problem]:
    """Yield one Problem if a model of this shape cannot be split over `tp` tensor-parallel ranks; it lists all sizes
    that do not fit, and the degrees that fit all of them.
    """
    uneven = [f"model.{key}={size}" for key in ("num_heads", "ffn_width") if (size := getattr(shape, key)) % tp]
    if sequence_parallel and shape.seq_len % tp:
        uneven.append(f"model.seq_len={shape.seq_len}, which parallel.sequence_parallel splits")
    rules = [f"does not divide {format_choices(uneven)}"] if uneven else []
    keys = shape.num_kv_heads
    if keys != shape.num_heads and keys % tp and tp % keys:
        rules.append(f"neither divides model.num_kv_heads={keys} nor is a multiple of it")
    fitting = tp_sizes(shape)
    even = [size for size in fitting if not sequence_parallel or shape.seq_len % size == 0]
    others = [size for size in fitting if size not in even]
    unsplit = [way(f"parallel.tp={size}", "parallel.sequence_parallel=false") for size in others]
    or_others = f", or {format_choices(unsplit)}" if others else ""
    yield from problem_if(
        bool(rules), "parallel.tp", tp, " and ".join(rules), f"Use {format_choices(even, own)}{or_others}."
    )


def tp_sizes(shape: ModelShape) -> list[int]:
    """Return the numbers of tensor-parallel ranks over which a model can be split. Keys and values of fewer heads than
    ranks are held in copies.
    """
    keys = shape.num_kv_heads
    return [tp for tp in divisors(shape.num_heads) if shape.ffn_width % tp == 0 and (keys % tp == 0 or tp % keys == 0)]


def whole_backward_schedule(parallel: ParallelSettings) -> str:
    """Return the name of a pipeline schedule that runs a block's backward as a whole and has as many stages a rank as
    `parallel`.
    """
    return "1f1b" if parallel.vp == 1 else "interleaved"


def why_not_compiled(parallel: ParallelSettings, *, uses_dropout: bool) -> Problem | None:
    """Return the setting of this layout that makes torch.compile of the transformer blocks impossible, as a Problem
    with a message; None if the blocks can be compiled. `uses_dropout` is True if the model has dropout.
    """
    if parallel.splits_backward:
        return Problem(
            "parallel.schedule", parallel.schedule,
            "runs a block's backward in two halves, which a compiled block cannot do",
            f"Use {own(whole_backward_schedule(parallel))}, or {way('compute.compile=false')}.",
        )
    if parallel.tp > 1 and uses_dropout and not parallel.sequence_parallel:
        return Problem(
            "parallel.sequence_parallel", False,
            "leaves attention's dropout to random numbers that compute.compile cannot trace",
            f"Use {own('true')}, {way('compute.compile=false')} or no dropout.",
        )
    return None


def batch_problems(layout: Layout, global_batch: int, micro_batch: int) -> Iterator[Problem]:
    """Yield a Problem with a message if `global_batch` samples cannot be divided equally over the layout's
    data-parallel ranks into micro-batches of `micro_batch` samples, or if the pipeline has too many micro-batches x
    stages in a step.
    """
    dp, stages = layout.dp, layout.pp * layout.vp
    if global_batch % dp != 0:
        rule, way_out = f"cannot be shared by dp={dp} copies of the model", "or as many copies as divide it."
        yield Problem("train.global_batch", global_batch, rule, f"Use {own(-(-global_batch // dp) * dp)}, {way_out}")
        return
    if global_batch % (micro_batch * dp) != 0:
        rule = f"x {dp} data-parallel copies does not divide train.global_batch={global_batch}"
        way_out = f"Use {format_choices(divisors(max(global_batch // dp, 1)), own)}."
        yield Problem("train.micro_batch", micro_batch, rule, way_out)
        return
    microbatches = global_batch // (micro_batch * dp)
    if layout.pp > 1 and stages * microbatches > MAX_STAGE_MICROBATCHES:
        rule = f"makes {microbatches} microbatches x {stages} stages in a step; the product must be at most "
        way_out = "Give a larger train.micro_batch, or more copies of the model (parallel.dp_shard)."
        yield Problem("parallel.pp", layout.pp, f"{rule}{MAX_STAGE_MICROBATCHES}", way_out)


def parse_layout(text: str, previous: ParallelSettings | None = None) -> ParallelSettings:
    """Parse a parallel layout such as `tp=2,pp=4` (dp means dp_shard) and return it as settings; sizes that the text
    does not name are 1. Other settings, such as timeout_s, are copied from `previous`, or get their defaults without
    it.

    Raise SettingsError on an unknown or repeated axis.
    """
    others = previous.to_dict() if previous else {}
    values: dict[str, Any] = {key: value for key, value in others.items() if key not in KEYS}
    for word in text.split(","):
        key, equals, value = (part.strip() for part in word.partition("="))
        key = {"dp": "dp_shard"}.get(key, key)
        if not equals or key in values or key not in KEYS:
            raise SettingsError([f"{word!r} in --to={text} {_rule_of_word(word, text, repeats=key in values)}"])
        values[key] = int(value) if value.isdecimal() else value
    if values.get("vp", 1) != 1:
        values.setdefault("schedule", "interleaved")  # because: other schedules with vp > 1 must be named explicitly
    return build_settings(ParallelSettings, values, "parallel")


def _rule_of_word(word: str, text: str, *, repeats: bool) -> str:
    """Return what is wrong with a word of the layout `text` that repeats an axis or is no axis with its size."""
    key, equals, _ = word.partition("=")

    def mark(name: str) -> str:
        return way(f"--to={text.replace(word, word.replace(key, name))}", shown=name) if equals else name

    rule = "repeats an axis." if repeats else f"is not an axis and size. {spelling_hint(key.strip(), KEYS, mark)}"
    return f"{rule} Give axes and sizes, as in tp=N,pp=N,dp_shard=N."


def check_layout(model: ModelSettings, parallel: ParallelSettings) -> None:
    """Raise one SettingsError or LayoutError that lists all reasons why a model with these settings cannot be split by
    this layout. Dropout and torch.compile are not considered.
    """
    problems = layout_problems(model.shape, parallel, uses_dropout=False, compiles=False)
    if texts := [problem.text() for problem in problems]:
        raise settings_error(texts)
