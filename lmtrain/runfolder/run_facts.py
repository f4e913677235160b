"""What a run is at a step: its stage, batch, length, data, tokens, rate, starts, borders, state, parameters and speed.

This is the only source of these facts: for the panel and the tables at the start of training, for `lmtrain inspect`,
`runs`, `report` and `watch`, the exported model card and the Python interface. The settings come as a `Plan`, which the
classes of lmtrain/train/run_config.py are, and what was trained from rows of metrics.jsonl or from a checkpoint.
Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from lmtrain.units import format_count

SPEED_WINDOW_STEPS = 50  # tokens/s are measured over so many steps, or all since the start or the border if fewer
SPEED_WINDOW = f"over {SPEED_WINDOW_STEPS} steps"
_SHOWN_PATHS = 8  # datasets of a blend that are named; the others are counted
Row = Mapping[str, Any]


class Plan(Protocol):
    """The settings of a run, or of one of its stages, as far as facts need them. Steps are counted from 0."""

    @property
    def stage_name(self) -> str: ...
    @property
    def first_step(self) -> int: ...
    @property
    def end_step(self) -> int: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def batch_plan(self) -> Any: ...
    @property
    def data(self) -> Any: ...
    @property
    def schedule(self) -> Any: ...
    @property
    def model(self) -> Any: ...
    @property
    def stage_configs(self) -> Sequence[Plan]: ...
    def learning_rate(self, step: int) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a run as its settings plan it, or the whole of a run without stages. Steps are counted from 1."""

    name: str  # "" in a run without stages
    number: int  # from 1
    num_stages: int  # of the run
    first_step: int
    last_step: int
    tokens: int  # that it reads, padding included
    batch_sizes: tuple[int, ...]  # in samples, ascending; several if the batch grows
    seq_len: int
    data: str  # the datasets, with their weights if there are several
    schedule: str  # the kind of the learning-rate schedule
    lr_first: float  # of its first step
    lr_last: float

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step + 1

    @property
    def text(self) -> str:
        """The stage in words, such as "decay, 2 of 3, steps 21 to 30"."""
        return f"{self.name}, {self.number} of {self.num_stages}, steps {self.first_step:,} to {self.last_step:,}"

    def cells(self) -> dict[str, str]:
        """Return a row of a table of stages, column title -> text; a title that begins with "<" is left-aligned."""
        rates = dict.fromkeys(f"{rate:.3g}" for rate in (self.lr_first, self.lr_last))
        return {
            "<stage": self.name, "steps": f"{self.first_step:,} to {self.last_step:,}",
            "tokens": format_count(self.tokens), "batch": " to ".join(map(str, self.batch_sizes[:: max(
                len(self.batch_sizes) - 1, 1)])), "sequence": f"{self.seq_len:,}",
            "learning rate": " to ".join(rates), "<schedule": self.schedule, "<data": self.data,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts of a run at a step. One is None if it is not recorded, or if this version cannot read the settings."""

    step: int  # the steps that are done
    steps: int | None  # of the whole run
    state: str  # as `run_state` gives it; "checkpoint" or "merged" for a checkpoint
    stage: Stage | None  # in which the newest step was trained, or the next one if that has begun
    stages: tuple[Stage, ...]  # one without a name if the run has no stages
    stage_name: str  # as the rows have it; "" in a run without stages
    batch: int | None  # samples of the newest step, or of the stage's first if it has trained none yet
    tokens: int | None  # read so far, without padding
    lr: float | None  # the learning rate of the newest step
    starts: int  # of the run so far
    parameters: int | None  # without the rows that pad the vocabulary
    embedding_parameters: int | None  # those of them that are embeddings
    padded_parameters: int | None  # with them, as ranks hold them
    tokens_per_s: float | None  # over the last SPEED_WINDOW_STEPS steps

    @property
    def borders(self) -> list[int]:
        """The steps after which one stage gives way to the next."""
        return [stage.last_step for stage in self.stages[:-1]]

    @property
    def seq_len(self) -> int | None:
        return self.stage.seq_len if self.stage else None

    @property
    def data(self) -> str | None:
        return self.stage.data if self.stage else None

    @property
    def named_stages(self) -> tuple[Stage, ...]:
        """The stages; () in a run without."""
        return tuple(stage for stage in self.stages if stage.name)

    @property
    def parameters_text(self) -> str:
        return parameters_text(self.parameters, self.padded_parameters)

    @property
    def embeddings_text(self) -> str:
        """The number of parameters in embeddings, to add to a description of the model; "" if it is not known."""
        return "" if self.embedding_parameters is None else f"; {format_count(self.embedding_parameters)} in embeddings"

    @property
    def batch_text(self) -> str:
        """The samples of a step and their length in words; "" if they are not known."""
        return "" if self.batch is None else f"{self.batch:,} samples of {self.seq_len:,} tokens"

    @property
    def speed_text(self) -> str:
        """The tokens per second in words, with the steps over which they are measured; "" if they are not known."""
        return "" if self.tokens_per_s is None else f"{format_count(self.tokens_per_s)} tokens/s {SPEED_WINDOW}"

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON data, under the names that the numbers have in metrics.jsonl. `stage` is the name of
        the stage, None in a run without.
        """
        return {
            "step": self.step, "steps": self.steps, "state": self.state, "stage": self.stage_name or None,
            "batch": self.batch, "seq_len": self.seq_len, "data": self.data, "tokens": self.tokens, "lr": self.lr,
            "starts": self.starts, "borders": self.borders, "parameters": self.parameters,
            "embedding_parameters": self.embedding_parameters, "padded_parameters": self.padded_parameters,
            "tokens_per_s": self.tokens_per_s,
            "stages": [asdict(stage) for stage in self.named_stages],
        }  # fmt: skip


def parameters_text(parameters: int | None, padded: int | None) -> str:
    """Return a number of parameters in words, with that of a padded vocabulary if it reads otherwise; "" if not known.
    """
    if parameters is None:
        return ""
    alone, with_padding = format_count(parameters), format_count(parameters if padded is None else padded)
    return f"{alone} parameters" + (f", {with_padding} with padding" if with_padding != alone else "")


def padded_parameters(model: Any) -> int:
    """Return the number of parameters of a model with the rows that pad its vocabulary. `model` has its settings."""
    return sum(map(math.prod, model.weights().values()))


def stages_of(plan: Plan) -> tuple[Stage, ...]:
    """Return the stages of a run as its settings plan them; one without a name for a run without stages."""
    return tuple(
        Stage(
            name=stage.stage_name, number=number, num_stages=len(plan.stage_configs), first_step=stage.first_step + 1,
            last_step=stage.end_step, tokens=stage.num_tokens,
            batch_sizes=tuple(stage.batch_plan.sizes_between(stage.first_step, stage.end_step)),
            seq_len=stage.seq_len, data=data_text(stage.data.to_dict()), schedule=stage.schedule.kind,
            lr_first=stage.learning_rate(stage.first_step), lr_last=stage.learning_rate(stage.end_step - 1),
        )
        for number, stage in enumerate(plan.stage_configs, 1)
    )  # fmt: skip


def data_text(data: Mapping[str, Any]) -> str:
    """Return the paths of the datasets in some settings of data as text; several have their weights, the largest weight
    first.
    """
    if data.get("path"):
        return str(data["path"])
    parts = sorted(data.get("datasets") or (), key=lambda part: -(part.get("weight") or 0))
    shown = [f"{part['path']} {part['weight']:g}" if part.get("weight") else str(part["path"]) for part in parts]
    more = [f"{len(shown) - _SHOWN_PATHS:,} more"] if len(shown) > _SHOWN_PATHS else []
    return ", ".join([*shown[:_SHOWN_PATHS], *more])


def facts_at(
    plan: Plan | None, step: int, *, state: str, stage_name: str | None = None, starts: int = 1,
    tokens: int | None = None, lr: float | None = None, tokens_per_s: float | None = None, steps: int | None = None,
) -> RunFacts:  # fmt: skip
    """Return what a run is after `step` steps. `plan` has its settings, None if they cannot be read. `stage_name` is
    the stage that it is in; without it, that of the last one of these steps. Numbers that are not recorded are None.
    """
    stages = stages_of(plan) if plan is not None else ()
    stage = next((each for each in stages if each.name == stage_name), None) or next(
        (each for each in stages if step <= each.last_step), stages[-1] if stages else None
    )
    newest = min(max(step, stage.first_step), stage.last_step) - 1 if stage else 0
    model = plan.model if plan is not None else None
    return RunFacts(
        step=step, steps=plan.total_steps if plan is not None else steps, state=state, stage=stage, stages=stages,
        stage_name=stage.name if stage else stage_name or "",
        batch=plan.batch_plan.range_of(newest)[1] if plan is not None else None, tokens=tokens, lr=lr, starts=starts,
        parameters=model.num_parameters if model is not None else None,
        embedding_parameters=model.num_embedding_parameters if model is not None else None,
        padded_parameters=padded_parameters(model) if model is not None else None,
        tokens_per_s=tokens_per_s,
    )  # fmt: skip


def facts_of_rows(plan: Plan | None, rows: Sequence[Row], state: str, *, steps: int | None = None) -> RunFacts:
    """Return what a run is by `rows`, the newest rows of its metrics without those that a restart made obsolete.
    `steps` is the recorded number of steps of the run, for settings that cannot be read.
    """
    newest, step_row = rows[-1] if rows else {}, next((row for row in rows[::-1] if row["event"] == "step"), {})
    counted = next((row["tokens"] for row in rows[::-1] if type(row.get("tokens")) is int), 0 if plan else None)
    return facts_at(
        plan, newest.get("step", 0), state=state, stage_name=newest.get("stage"),
        starts=max((row["attempt"] for row in rows if type(row.get("attempt")) is int), default=0), tokens=counted,
        lr=finite_or_none(step_row.get("lr")), tokens_per_s=finite_or_none(step_row.get("tokens_per_s")), steps=steps,
    )  # fmt: skip


def facts_of_checkpoint(plan: Plan | None, state: Mapping[str, Any]) -> RunFacts:
    """Return what a run was when it saved a checkpoint. `state` is the state in the checkpoint's manifest, and `plan`
    has the settings in it.
    """
    step, kind = int(state["step"]), "merged" if state.get("merged") is not None else "checkpoint"
    stages = plan.stage_configs if plan is not None and step else ()
    trained = next((stage for stage in stages if step <= stage.end_step), None)
    return facts_at(
        plan, step, state=kind, starts=int(state.get("attempt", 1)), tokens=state.get("tokens"),
        lr=trained.learning_rate(step - 1) if trained is not None else None,
    )  # fmt: skip


def finite_or_none(value: Any) -> Any:
    """Return the value if it is a finite number, else None, since JSON has no NaN."""
    return value if type(value) in (int, float) and math.isfinite(value) else None
