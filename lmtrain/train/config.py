"""Every setting of a run, and every check across settings. Torch-free: a wrong run is refused at once.

Called by the command line (compose -> RunConfig), by set-up, and by the generated reference. Each component has
checked itself by the time `RunConfig` exists; here are the rules that need two of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lmtrain.checkpoint.checkpoint_settings import CheckpointSettings
from lmtrain.config.base import Problem, Settings, problem_if
from lmtrain.data.batch_plan import BatchPlan
from lmtrain.data.data_settings import DataChoice
from lmtrain.models.model_settings import ModelSettings
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.optim.schedule_settings import ScheduleSettings
from lmtrain.parallel.compute_settings import ComputeSettings
from lmtrain.parallel.precision_settings import PrecisionSettings
from lmtrain.parallel.recompute_settings import NoRecomputeSettings, RecomputeSettings
from lmtrain.placement.batch_rules import batch_problems
from lmtrain.placement.parallel_settings import ParallelSettings, layout_problems
from lmtrain.train.best import best_problems
from lmtrain.train.eval_settings import EvalSettings
from lmtrain.train.train_settings import ObserveSettings, RunSettings, TrainSettings

# What is worked out one by one before a run begins; nothing that is built comes near to any of these.
MAX_PARAMETERS = 10**15
MAX_INCREMENTS = 10_000


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    model: ModelSettings
    data: DataChoice
    optim: OptimSettings
    schedule: ScheduleSettings
    precision: PrecisionSettings
    parallel: ParallelSettings
    recompute: RecomputeSettings = field(default_factory=NoRecomputeSettings)
    compute: ComputeSettings
    train: TrainSettings
    eval: EvalSettings = field(default_factory=EvalSettings)
    checkpoint: CheckpointSettings
    observe: ObserveSettings
    run: RunSettings

    def problems(self) -> Iterator[Problem]:
        yield from self.problems_across({f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def problems_across(cls, parts: Mapping[str, Any]) -> Iterator[Problem]:
        if {"model", "parallel", "compute"} <= parts.keys():
            model, compiles = parts["model"], parts["compute"].compile
            dropout = model.uses_dropout
            yield from layout_problems(model.shape, parts["parallel"], uses_dropout=dropout, compiles=compiles)
        if "model" in parts:
            yield from problem_if(
                parts["model"].num_parameters > MAX_PARAMETERS, "model.width", parts["model"].shape.width,
                f"and the other sizes make {parts['model'].num_parameters:.1e} parameters, and the most are "
                f"{MAX_PARAMETERS:.0e}", "Use a smaller one, or fewer layers, a smaller seq_len or ffn_width.",
            )  # fmt: skip
            for problem in parts["model"].unused():
                yield replace(problem, key=f"model.{problem.key}")
        if {"model", "data"} <= parts.keys():
            yield from _label_problems(parts["model"], parts["data"])
        if {"model", "eval"} <= parts.keys():
            yield from problem_if(
                bool(parts["eval"].tasks) and not parts["model"].shape.causal, "eval.tasks",
                [one.called for one in parts["eval"].tasks],
                f"score what a text goes on with, and model={parts['model'].kind} sees both sides of a word",
                "Leave it out; validation says how well masked words are found.",
            )  # fmt: skip
        if {"train", "data"} <= parts.keys() and parts["train"].valid_interval_steps == 0:
            yield from parts["data"].unvalidated()
        recompute = parts.get("recompute")
        if recompute is not None and "model" in parts:
            for problem in recompute.problems_in_model(parts["model"].shape.num_layers):
                yield replace(problem, key=f"recompute.{problem.key}")
        if recompute is not None and "parallel" in parts:
            yield from recompute.problems_in_layout(parts["parallel"])
        if not {"train", "parallel"} <= parts.keys():
            return
        train: TrainSettings = parts["train"]
        layout = parts["parallel"].layout
        together = train.micro_batch * layout.dp
        yield from batch_problems(layout, train.global_batch, train.micro_batch)
        rampup_problems = list(_rampup_problems(train, together))
        yield from rampup_problems
        if not rampup_problems and {"schedule", "model"} <= parts.keys():
            steps = count_steps(train, parts["model"].shape.seq_len)
            for problem in parts["schedule"].problems_in_run(steps):
                yield replace(problem, key=f"schedule.{problem.key}")
        if not rampup_problems and {"checkpoint", "data", "eval", "model"} <= parts.keys():
            steps = count_steps(train, parts["model"].shape.seq_len)
            yield from best_problems(parts["checkpoint"], parts["data"], train, parts["eval"], steps)

    @property
    def seq_len(self) -> int:
        return self.model.shape.seq_len

    @property
    def batch_plan(self) -> BatchPlan:
        return BatchPlan(self.train.global_batch, self.train.rampup)

    @property
    def total_steps(self) -> int:
        return count_steps(self.train, self.seq_len)


def count_steps(train: TrainSettings, seq_len: int) -> int:
    """Given, or the first number of steps that has consumed `train.tokens`."""
    if train.steps is not None:
        return train.steps
    assert train.tokens is not None
    plan, samples = BatchPlan(train.global_batch, train.rampup), -(-train.tokens // seq_len)
    low, high = 1, -(-samples // min(plan.sizes))
    while low < high:
        middle = (low + high) // 2
        if plan.range_of(middle)[0] >= samples:
            high = middle
        else:
            low = middle + 1
    return low


def _label_problems(model: ModelSettings, data: DataChoice) -> Iterator[Problem]:
    """A model learns what its samples have labels for, all of it and nothing else."""
    wanted, given = model.terms, data.terms
    masked = wanted[0] == "mlm"
    yield from problem_if(
        wanted[0] != given[0], "data.kind", data.kind,
        f"makes samples that a {model.kind} model cannot learn from",
        "Use data=masked, or a causal model." if masked else "Use data=dataset or data=blend, or model=bert_base.",
    )  # fmt: skip
    yield from problem_if(
        wanted[0] == given[0] and wanted != given, "model.pair_head", "pair" in wanted,
        "finds no pairs in data.pairs=none" if "pair" in wanted else "leaves the pairs that data.pairs makes unused",
        f"Use model.pair_head={'false' if 'pair' in wanted else 'true'}, or another data.pairs.",
    )  # fmt: skip


def _rampup_problems(train: TrainSettings, together: int) -> Iterator[Problem]:
    rampup, full = train.rampup, train.global_batch
    if rampup is None:
        return
    for key in ("start", "increment"):
        value = getattr(rampup, key)
        rule = f"is not a multiple of micro_batch x copies = {together}"
        yield from problem_if(value % together != 0, f"train.rampup.{key}", value, rule, f"Use {together}.")
    sizes = (full - rampup.start) // rampup.increment
    rule = f"takes {sizes} increments to train.global_batch={full}, and {MAX_INCREMENTS} are the most"
    yield from problem_if(
        sizes > MAX_INCREMENTS, "train.rampup.increment", rampup.increment, rule, "Use a larger increment."
    )
    rule = f"does not reach train.global_batch={full} in increments of {rampup.increment}"
    wrong = rampup.start > full or (full - rampup.start) % rampup.increment != 0
    way_out = "Use an increment that divides the rest."
    yield from problem_if(wrong, "train.rampup.start", rampup.start, rule, way_out)
