"""The settings of a run, and all checks across settings. Torch-free, so that a wrong run is refused at once.

Called by the command line (compose -> RunConfig), by set-up, and by the generated reference. Each component has
checked itself by the time `RunConfig` exists; rules_between_settings.py has the rules that involve two components.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.checkpoint_settings import CheckpointSettings
from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.settings_base import AdjustedDefault, Problem, Settings, facts_of, kinds, problem_if
from lmtrain.data.batch_size_per_step import BatchPlan
from lmtrain.data.data_settings import DataChoice, DataSettings
from lmtrain.errors import (
    LayoutError,
    LmtrainError,
    SettingsError,
    join_few,
    leave_out,
    own,
    settings_error,
    way,
    within_group,
)
from lmtrain.models.model_settings import POSITIONS, ModelSettings
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.optim.schedule_settings import ScheduleSettings
from lmtrain.parallel.device_and_precision_settings import (
    ComputeSettings,
    NoRecomputeSettings,
    PrecisionSettings,
    RecomputeSettings,
)
from lmtrain.placement.parallel_settings import ParallelSettings, batch_problems
from lmtrain.plan.cost_model.hardware_figures import Hardware
from lmtrain.runfolder.folder_reader import read_settings, read_working_directory
from lmtrain.train.adjust_conflicting_defaults import adjust_defaults, shorten_warm_up
from lmtrain.train.rules_between_settings import (
    RULES,
    length_problems,
    rampup_problems,
    restart_problems,
    text_dataset_prefix,
    within,
)
from lmtrain.train.run_stage_settings import StageSettings, name_problems
from lmtrain.train.train_settings import EvalSettings, ObserveSettings, RunSettings, TrainSettings, count_steps
from lmtrain.units import plural


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
    hardware: Hardware | None = None  # the machine for the planner; null: the planner predicts memory alone
    stages: dict[str, StageSettings] = field(default_factory=dict)  # in order; empty: the same settings throughout

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages:
            # because: the length of the run follows from its stages
            object.__setattr__(self, "train", replace(self.train, steps=self.total_steps, tokens=None))

    def problems(self) -> Iterator[Problem]:
        yield from self.problems_across({f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def problems_across(cls, parts: Mapping[str, Any]) -> Iterator[Problem]:
        if "parallel" in parts and parts["parallel"].auto:
            yield from problem_if(
                parts.get("hardware") is None, "parallel.auto", True,
                "leaves the layout to the planner, which needs a machine, and hardware=null names none",
                f"Add {way('hardware=h100')} or another machine; `lmtrain config list hardware` lists them.",
            )  # fmt: skip
            parts = {name: part for name, part in parts.items() if name != "parallel"}  # not chosen yet
        for names, rule in RULES:
            if all(parts.get(name) is not None for name in names):
                yield from rule(*(parts[name] for name in names))
        is_whole = cls is RunConfig  # because: `plan_stages` checks the rest of a stage, once all stages are known
        if is_whole and "data" in parts:
            yield from restart_problems(parts["data"])
            yield from problem_if(
                parts["data"].train_on_held_out and not parts.get("stages"), "data.train_on_held_out", True,
                "has no effect in a run without stages, in which nothing was held out before",
                f"{leave_out()}, or give it in a stage.",
            )  # fmt: skip
        if not {"train", "parallel"} <= parts.keys():
            return
        train: TrainSettings = parts["train"]
        layout = parts["parallel"].layout
        # because: a ramp-up is judged by the global batch, and the number of steps follows from it
        batch_faults = list(batch_problems(layout, train.global_batch, train.micro_batch))
        rampup_faults = [] if batch_faults and train.rampup else list(rampup_problems(train, layout))
        yield from (*batch_faults, *rampup_faults)
        is_reached = train.rampup is None or not (batch_faults or rampup_faults)
        if is_whole and is_reached and "model" in parts and parts.get("stages") == {}:
            steps = count_steps(train, parts["model"].shape.seq_len)
            if "schedule" in parts:
                yield from within("schedule", parts["schedule"].problems_in_run(steps))
            yield from length_problems(parts, steps)

    @classmethod
    def adjust_defaults(cls, tree: dict[str, Any], typed_values: Mapping[str, str]) -> list[AdjustedDefault]:
        _prepare_stages(tree, typed_values)
        adjusted = list(adjust_defaults(tree, typed_values))
        _set_path_of_text(tree, typed_values)
        return adjusted + _adjust_warm_up_of_stages(tree, typed_values)

    @property
    def seq_len(self) -> int:
        return self.model.shape.seq_len

    @property
    def batch_plan(self) -> BatchPlan:
        """The samples of each step of the run, all stages together."""
        if self.stages:
            return self.stage_configs[-1].batch_plan
        return BatchPlan(self.train.global_batch, self.train.rampup)

    @property
    def total_steps(self) -> int:
        """The number of steps of the run, all stages together."""
        return self.stage_configs[-1].end_step if self.stages else count_steps(self.train, self.seq_len)

    first_step = 0  # the first step of the stage that these settings are for
    stage_name = ""  # "" if the run has no stages
    has_own_schedule = False  # True for a stage with a schedule of its own

    @property
    def stage_number(self) -> int:
        """The number of the stage that these settings are for, from 1; 0 if the run has no stages."""
        return 1 + [stage.stage_name for stage in self.stage_configs].index(self.stage_name) if self.stage_name else 0

    @property
    def end_step(self) -> int:
        """The step after the last one of the stage that these settings are for; without stages, after the run's."""
        return self.total_steps

    @property
    def num_tokens(self) -> int:
        """The number of tokens, padding included, that the run reads, or the stage if these are the settings of one."""
        if self.stages:
            return sum(stage.num_tokens for stage in self.stage_configs)
        first, end = (self.batch_plan.range_of(step)[0] for step in (self.first_step, self.end_step))
        return (end - first) * self.seq_len

    @property
    def stop_at_end(self) -> str | None:
        """The setting because of which the run stops at the end of this stage; None if it goes on."""
        return None

    @cached_property
    def stage_configs(self) -> tuple[RunConfig, ...]:
        """The settings that hold in each stage of the run, in order; these settings themselves if it has no stages."""
        return plan_stages(self) if self.stages else (self,)

    @property
    def border_steps(self) -> tuple[int, ...]:
        """The steps after which one stage of the run gives way to the next: their checkpoints are never removed."""
        return tuple(stage.end_step for stage in self.stage_configs[:-1])

    @cached_property
    def schedule_span(self) -> ScheduleSpan:
        """The run's schedule over the stages that have none of their own."""
        return ScheduleSpan.of(self.schedule, [each for each in self.stage_configs if isinstance(each, StageConfig)])

    def stage_at(self, step: int) -> RunConfig:
        """Return the settings for the step `step`; those of the last stage if the run has ended by then."""
        return next((stage for stage in self.stage_configs if step < stage.end_step), self.stage_configs[-1])

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, which is counted from 0 over the whole run."""
        return self.optim.lr * self.schedule.factor(step, self.total_steps)

    def flops_per_token(self, model: ModelSettings) -> float:
        """Return model FLOPs per token, as MFU counts them; `model` has the tokenizer's vocabulary."""
        return model.shape.flops_per_token(self.seq_len, scored_share=self.data.scored_share(self.seq_len))


@dataclass(frozen=True, kw_only=True)
class StageConfig(RunConfig):
    """The settings that hold in one stage of a run. Steps and samples are counted over the whole run."""

    whole: RunConfig | None = None  # the run's settings; None only while a stage is being checked
    stage_name: str = ""
    has_own_schedule: bool = False
    first_step: int = 0
    batch_start: int = 0  # the step at which this batch plan began, in this stage or in one before it
    plan: BatchPlan = field(default_factory=lambda: BatchPlan(1), compare=False)

    @property
    def _run_config(self) -> RunConfig:
        assert self.whole is not None
        return self.whole

    @property
    def batch_plan(self) -> BatchPlan:
        return self.plan

    @property
    def total_steps(self) -> int:
        return self._run_config.total_steps

    @property
    def stop_at_end(self) -> str | None:
        stops = self._run_config.stages[self.stage_name].stop_after
        return f"stages.{self.stage_name}.stop_after" if stops else None

    @property
    def num_steps(self) -> int:
        """The number of steps of this stage."""
        return count_steps(self.train, self.seq_len)

    @property
    def end_step(self) -> int:
        return self.first_step + self.num_steps

    @property
    def stage_configs(self) -> tuple[RunConfig, ...]:
        return self._run_config.stage_configs

    def learning_rate(self, step: int) -> float:
        if self.has_own_schedule:
            return self.optim.lr * self.schedule.factor(step - self.first_step, self.num_steps)
        return self.optim.lr * self._run_config.schedule_span.factor(self, step)

    def to_dict(self) -> dict[str, Any]:
        """Return the run's settings, as they are recorded, with the vocabulary size that is known by now."""
        settings = self._run_config.to_dict()
        return settings | {"model": settings["model"] | {"vocab_size": self.model.to_dict()["vocab_size"]}}


def plan_stages(config: RunConfig) -> tuple[StageConfig, ...]:
    """Return the settings of each training stage of a run, in order. Raise one error that lists the problems of all
    stages.
    """
    settings = {key: value for key, value in config.to_dict().items() if key != "stages"}
    problems, stages = [problem.text() for problem in name_problems(config.stages)], list[StageConfig]()
    plan, first_step, batch_start = BatchPlan(1), 0, 0
    for name, given in config.stages.items():
        try:
            problems += [_in_stage(name, given, problem.text()) for problem in _position_problems(config, given)]
            stage = build_settings(StageConfig, _stage_tree(config, settings, given, is_first=not stages))
            batch, rampup = stage.train.global_batch, stage.train.rampup
            if not stages:
                plan = BatchPlan(batch, rampup)
            elif "rampup" in given.train or batch != stages[-1].train.global_batch:
                plan, batch_start = plan.continued(first_step, batch, rampup), first_step
            steps = given.steps or plan.steps_for(given.samples or -(-(given.tokens or 1) // stage.seq_len), first_step)
            stage = replace(
                stage, train=replace(stage.train, steps=steps, tokens=None), whole=config, stage_name=name,
                has_own_schedule=bool(given.schedule), first_step=first_step, batch_start=batch_start, plan=plan,
            )  # fmt: skip
            problems += [_in_stage(name, given, problem.text()) for problem in _problems_of_stage(stage)]
        except (SettingsError, LayoutError) as error:
            problems += [type(text)(_in_stage(name, given, text)) for text in error.marked_problems]
            continue
        stages.append(stage)
        first_step += steps
    problems = problems or [problem.text() for problem in _problems_of_all_stages(config, stages)]
    if problems:
        raise settings_error([*dict.fromkeys(problems)])
    return tuple(stages)


def _stage_tree(
    config: RunConfig, settings: Mapping[str, Any], given: StageSettings, *, is_first: bool
) -> dict[str, Any]:
    """Return the settings of a training stage as nested dicts: the run's `settings`, overridden by those that the stage
    gives. Only the first stage (`is_first`) takes over the run's batch-size ramp-up, and a table of learned positions
    keeps at least the rows that it has in the run's model. The number of steps is set later.
    """
    tree = given.apply(settings)
    rampup = tree["train"]["rampup"] if is_first else given.train.get("rampup")
    tree["train"] = tree["train"] | {"steps": 1, "tokens": None, "rampup": rampup}  # the number of steps is set later
    # because: a length of another type is refused when the tree is checked
    if (rows := _num_position_rows(config)) is not None and isinstance(length := given.model.get("seq_len"), int):
        tree["model"] = tree["model"] | {"num_positions": max(rows, length)}
    return tree


def _num_position_rows(config: RunConfig) -> int | None:
    """Return the number of rows of the model's table of learned positions, None if it has none."""
    table = config.model.weights().get(POSITIONS)
    return None if table is None else table[0]


def _position_problems(config: RunConfig, given: StageSettings) -> Iterator[Problem]:
    """Yield a problem if a stage has longer sequences than the run's model has learned positions."""
    rows, seq_len = _num_position_rows(config), given.model.get("seq_len")
    if rows is not None and isinstance(seq_len, int):
        has_weights = config.checkpoint.init_from is not None or config.checkpoint.resume not in ("auto", "none")
        larger = way(f"model.num_positions={seq_len}")
        new_run = f"model.num_positions={seq_len} or model.positions=rotary are for a new run, from its first step on"
        way_out = f"{larger}, a larger table from the model's first step on, or {own(rows)} or less."
        yield from problem_if(
            seq_len > rows, "model.seq_len", seq_len,
            f"is longer than the model's table of {rows} learned positions, which cannot grow in a run",
            f"Use {rows} or less; {new_run}." if has_weights else f"Use {way_out}",
        )  # fmt: skip


def _in_stage(name: str, given: StageSettings, text: str) -> str:
    """Return `text`, an error message that begins with `KEY=`, as one on the stage `name`: `stages.NAME.KEY=...` if the
    stage itself gives the key, else "In the stage NAME, KEY=...". So are the keys of its ways.
    """

    def is_given(key: str) -> bool:
        group, _, rest = key.partition(".")
        values = given.overrides().get(group, {})
        return bool(values) if not rest else rest.partition(".")[0].partition("[")[0] in values

    moved = within_group(f"stages.{name}", text, applies=is_given)
    is_own = is_given(text.partition("=")[0])
    return moved if is_own else f"In the stage {name}, {moved.removeprefix(f'stages.{name}.')}"


def _problems_of_stage(stage: StageConfig) -> Iterator[Problem]:
    """Yield a problem for each setting of a training stage that does not suit its place in the run: batch sizes, a
    schedule of its own, and a sample order that depends on the length of the run.
    """
    sizes = stage.plan.sizes_between(stage.first_step, stage.end_step)
    for size in () if stage.parallel.auto else sizes:  # because: the layout is not chosen yet
        yield from batch_problems(stage.parallel.layout, size, stage.train.micro_batch)
    if stage.has_own_schedule:
        for problem in stage.schedule.problems_in_run(stage.num_steps):
            rule = problem.rule.replace("the run's", "the stage's")
            yield replace(problem, key=f"schedule.{problem.key}", rule=rule)
    yield from problem_if(
        stage.data.order == "megatron", "data.order", stage.data.order,
        "depends on the number of samples of the whole run, of which a stage is a part",
        f"Use {way('data.order=own')}, or a run without stages.",
    )  # fmt: skip


def _problems_of_all_stages(config: RunConfig, stages: Sequence[StageConfig]) -> Iterator[Problem]:
    """Yield a problem for each setting that holds for the whole run, such as the schedule or the checkpoint interval,
    and does not suit its `stages` taken together.
    """
    span = ScheduleSpan.of(config.schedule, stages)
    yield from restart_problems(stages[0].data)
    if span.stages:
        yield from within("schedule", config.schedule.problems_in_run(span.num_steps))
    yield from length_problems({f.name: getattr(config, f.name) for f in fields(config)}, stages[-1].end_step)
    yield from problem_if(
        len(stages) > 1 and config.checkpoint.interval_steps is None, "checkpoint.interval_steps", None,
        f"saves no checkpoint, and a run with {len(stages)} stages goes from one to the next by a checkpoint",
        f"Use {way('checkpoint.interval_steps=0')} to save at the end of each stage only.",
    )  # fmt: skip


@dataclass(frozen=True)
class ScheduleSpan:
    """A schedule over several stages laid end to end: those of a run that have no schedule of their own.

    It is measured in steps where all stages read equally many tokens in a step, and in tokens otherwise.
    """

    schedule: ScheduleSettings
    stages: tuple[StageConfig, ...]

    @classmethod
    def of(cls, schedule: ScheduleSettings, stages: Sequence[StageConfig]) -> ScheduleSpan:
        """Return the run's `schedule` over those of its stages that have none of their own."""
        return cls(schedule, tuple(stage for stage in stages if not stage.has_own_schedule))

    @property
    def num_steps(self) -> int:
        return sum(stage.num_steps for stage in self.stages)

    def factor(self, stage: StageConfig, step: int) -> float:
        """Return the learning rate as a share of its peak at `step`, counted from the run's beginning, of `stage`, one
        of the stages of this span.
        """
        steps_before = sum(each.num_steps for each in self.stages if each.first_step < stage.first_step)
        steps = steps_before + step - stage.first_step
        if len({(each.seq_len, each.batch_start) for each in self.stages}) == 1:
            return self.schedule.factor(steps, self.num_steps)
        warmup_tokens = self._tokens_before(self.schedule.start_step)
        if steps < self.schedule.warmup_steps:
            return self._tokens_before(steps + 1) / warmup_tokens
        in_tokens = replace(self.schedule, warmup_steps=warmup_tokens)
        return in_tokens.after_warmup(self._tokens_before(steps), self._tokens_before(self.num_steps))

    def _tokens_before(self, steps: int) -> int:
        """Return the number of tokens, padding included, in the first `steps` steps of this span, whose stages are laid
        end to end.
        """
        total = 0
        for stage in self.stages:
            here = min(steps, stage.num_steps)
            first, end = (stage.plan.range_of(stage.first_step + step)[0] for step in (0, here))
            total, steps = total + (end - first) * stage.seq_len, steps - here
        return total


def _prepare_stages(tree: dict[str, Any], typed_values: Mapping[str, str]) -> None:
    """Complete `tree`, the settings of a run with training stages as nested dicts, in place: leave the run's length to
    its stages, and take the first stage's `data` if the run names no dataset. Raise SettingsError if the user typed
    train.steps or train.tokens (`typed_values` has it). Do nothing for a run without stages.
    """
    stages, train, data = tree.get("stages"), tree.get("train"), tree.get("data")
    if not stages or not isinstance(stages, dict) or not isinstance(train, dict):
        return
    if typed := [key for key in ("train.steps", "train.tokens") if typed_values.get(key, "null") != "null"]:
        raise SettingsError([
            f"{typed[0]}={typed_values[typed[0]]} is the length of the run, which is that of its stages together: "
            f"{join_few(stages)}. {leave_out(*typed)}, or change a stage's length, as "
            f"stages.{next(iter(stages))}.steps=N."
        ])
    train |= {"steps": 1, "tokens": None}  # because: RunConfig counts the steps once all stages are known
    first = next(iter(stages.values()))
    given = first.get("data") if isinstance(first, dict) else None
    if isinstance(given, dict) and isinstance(data, dict) and not ({"path", "text", "datasets"} & data.keys() - {
        key for key in data if not data[key]
    }):
        tree["data"] = data | given if given.get("kind", data.get("kind")) == data.get("kind") else dict(given)


def _adjust_warm_up_of_stages(tree: dict[str, Any], typed_values: Mapping[str, str]) -> list[AdjustedDefault]:
    """Shorten the default warm-up of the run's schedule in `tree` if the stages without a schedule of their own have
    too few steps together. Return the changes; [] if none is needed, or if other settings are wrong, which is reported
    later.
    """
    schedule = tree.get("schedule")
    if not tree.get("stages") or not isinstance(schedule, dict) or not schedule.get("warmup_steps"):
        return []
    try:
        config = build_settings(RunConfig, tree | {"schedule": schedule | {"warmup_steps": 0}})
    except LmtrainError:
        return []
    span = config.schedule_span
    steps = f"the {plural(span.num_steps, 'step')} of {join_few([stage.stage_name for stage in span.stages])}"
    return list(shorten_warm_up(tree, typed_values, span.num_steps, f"{steps} together")) if span.stages else []


def _set_path_of_text(tree: dict[str, Any], typed_values: Mapping[str, str]) -> None:
    """Set data.path in `tree`, the settings as nested dicts, to the dataset that will be made of data.text. A typed
    data.path stays, and is refused later.
    """
    data, run = tree.get("data"), tree.get("run")
    if not isinstance(data, dict) or not isinstance(run, dict) or not isinstance(data.get("text"), str | list):
        return
    if not issubclass(kinds(DataChoice).get(str(data.get("kind")), DataChoice), DataSettings):
        return  # because: a blend has neither of the keys
    text_dir, is_typed = data.get("text_dir"), "data.text" in typed_values and "data.path" not in typed_values
    if (is_typed or data.get("path") is None) and isinstance(text_dir, str | None):
        data["path"] = text_dataset_prefix(str(run.get("dir")), text_dir)


def read_run_config(run_folder: Path) -> RunConfig:
    """Read the settings recorded in `run_folder` at the run's last start. Raise SettingsError if this version of
    lmtrain does not accept them.
    """
    return build_settings(RunConfig, read_settings(run_folder))


def readable_config(settings: Mapping[str, Any]) -> RunConfig | None:
    """Build the settings that a run has recorded; None if this version of lmtrain does not accept them."""
    try:
        return build_settings(RunConfig, dict(settings)) if settings else None
    except LmtrainError:
        return None


def config_of_checkpoint(state: Mapping[str, Any]) -> RunConfig | None:
    """Build the settings with which a run saved a checkpoint, with the vocabulary that its data had. `state` is the
    state in the checkpoint's manifest. Return None if it has no settings, or some that this version does not accept.
    """
    settings, model = state.get("settings"), state.get("model")
    if not isinstance(settings, dict):
        return None
    if isinstance(model, dict) and isinstance(settings.get("model"), dict):
        sizes = {key: model[key] for key in ("vocab_size",) if key in model}
        settings = settings | {"model": settings["model"] | sizes}
    return readable_config(settings)


def with_resolved_paths(settings: dict[str, Any], run_folder: Path) -> dict[str, Any]:
    """Return a copy of a run's recorded settings in which relative paths (of data, tokenizer, checkpoints) start with
    the directory in which the run was launched, so that they can be opened from another directory.

    Paths stay as they are if the run began in the current folder. The folder is derived from the run's present place by
    removing the run.dir it was given, so that a moved tree still works. If run.dir cannot show this (an absolute path,
    for example), the run's own record of the folder is used.
    """
    place, run_settings = run_folder.resolve(), settings.get("run")
    run_dir = Path(str(run_settings.get("dir", "")) if isinstance(run_settings, dict) else "")
    num_parts = len(run_dir.parts)
    start = Path(*place.parts[:-num_parts]) if num_parts else None
    if run_dir.is_absolute() or ".." in run_dir.parts or place.parts[-num_parts:] != run_dir.parts:
        start = read_working_directory(run_folder)
    if start is None or start == Path.cwd():
        return settings
    return {key: _prefix_paths(start, key, value) for key, value in settings.items()}


def _prefix_paths(folder: Path, key: str, setting: Any) -> Any:
    """Return `setting` with `folder` put before each relative path in it, if the dotted `key` is that of a path; groups
    and lists are searched recursively.
    """
    if isinstance(setting, dict):
        return {name: _prefix_paths(folder, f"{key}.{name}", item) for name, item in setting.items()}
    if isinstance(setting, list):
        return [_prefix_paths(folder, key, item) for item in setting]
    if not isinstance(setting, str) or not facts_of(RunConfig, key).get("path"):
        return setting
    if key == "checkpoint.resume" and setting in ("auto", "none"):
        return setting
    # because: a text that begins with ~ is in the user's home
    return setting if key == "data.text" and setting.startswith("~") else str(folder / setting)
