"""The branches that decay a run from several of its checkpoints (`lmtrain branch`), each with the words to type."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.find_and_prune import list_checkpoints
from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.parse_and_apply_overrides import hydra_quoted, override_key
from lmtrain.config.settings_base import show
from lmtrain.config.typed_words import typed_words
from lmtrain.errors import MissingInputError, UsageError, example, join_few, leave_out, own, shell_quoted, way
from lmtrain.runfolder.file_names import CHECKPOINTS, step_from_name
from lmtrain.runfolder.folder_reader import is_run, not_a_run, read_run
from lmtrain.start.settings_from_earlier_run import RunRequest, SourceRun, compose_run, recorded_config
from lmtrain.start.training_stages_of_branch import inherited_settings
from lmtrain.train.run_config import RunConfig, read_run_config
from lmtrain.train.run_stage_settings import stage_may_set, unused_stage_name
from lmtrain.units import parse_count

_STAGE = "decay"
_PLAIN_TEXT = re.compile(r"[A-Za-z_/][\w/-]*", re.ASCII)
_SHAPES = {
    "linear": "{kind: linear}", "cosine": "{kind: cosine, min_ratio: 0}",
    "sqrt": "{kind: wsd, decay: sqrt, decay_fraction: 1}",
}  # fmt: skip


@dataclass(frozen=True)
class Branch:
    """A branch that decays: the checkpoint from which it begins, the settings to type, and all settings."""

    checkpoint: Path
    overrides: list[str]
    config: RunConfig

    @property
    def command(self) -> str:
        """The command that starts the branch, for a shell."""
        return " ".join(map(shell_quoted, ["lmtrain", "pretrain", "--from-run", str(self.checkpoint), *self.overrides]))


def _named_folder(run: Path) -> Path:
    return run if run.name not in ("", "..") else run.resolve()


def folder_of_branches(run: Path, output: Path | None) -> Path:
    """Return the folder for the sbatch file of all branches: in `output`, or beside the run."""
    run = _named_folder(run)
    return ((output or run.parent) / f"{run.name}-{_STAGE}").absolute()


def build_branches(
    run: Path, at: str, decay: str | None, decay_steps: int | None, decay_tokens: int | None, shape: str,
    output: Path | None, overrides: Sequence[str] | None,
) -> list[Branch]:  # fmt: skip
    """Return the branches that the parameters of `branch`, which have these names, ask for. Raise an LmtrainError if
    one of the parameters is wrong or a checkpoint is missing.
    """
    steps = _parse_steps(at)
    length = _parse_length(decay, decay_steps, decay_tokens)
    if taken := [word for word in overrides or () if {"run.dir", "checkpoint.resume"} & typed_words([word]).keys()]:
        way_out = f"{leave_out(*map(override_key, taken))}; --output FOLDER chooses where they go."
        raise UsageError(f"{taken[0]} is set for each branch. {way_out}")
    run = _named_folder(run)
    return list(_build_branches(run, steps, length, shape, output or run.parent, overrides or []))


def _parse_steps(text: str) -> list[int]:
    """Parse the value of --at, such as "20k,40k", to a list of training steps in the given order, without duplicates.
    Raise UsageError if a word is not a count, if there are no steps, or if one is below 1.
    """
    try:
        steps = [parse_count(word.strip()) for word in text.strip("[]() ").split(",") if word.strip()]
    except ValueError as error:
        way_out = f"Give the steps of checkpoints, such as {example('20k,40k,60k')}."
        raise UsageError(f"--at={text} does not list steps: {error}. {way_out}") from error
    if not steps or min(steps) < 1:
        raise UsageError(f"--at={text} names no step. Give the steps of checkpoints, such as {example('20k,40k,60k')}.")
    return [*dict.fromkeys(steps)]


def _parse_length(decay: str | None, steps: int | None, tokens: int | None) -> tuple[str, float]:
    """Return the decay's length as (unit, number) from the options --decay, --decay-steps and --decay-tokens: the unit
    is "percent" (of the branch's whole run), "steps" or "tokens". Without any option the result is ("percent", 10.0).
    Raise UsageError if two are given, or if a length is not above 0 or not below 100%.
    """
    given = [(name, value) for name, value in (("percent", decay), ("steps", steps), ("tokens", tokens)) if value]
    if len(given) > 1 or 0 in (steps, tokens):
        raise UsageError(
            "The decay has one length, above 0. Give one of --decay PERCENT, --decay-steps N and --decay-tokens N."
        )
    name, value = given[0] if given else ("percent", "10%")
    if name != "percent":
        return name, float(value)
    try:
        share = float(str(value).removesuffix("%"))
    except ValueError:
        share = 0.0
    if not (str(value).endswith("%") and 0 < share < 100):
        raise UsageError(f"--decay={value} is not a share of the branch's run. {_way_to_say_length(str(value))}")
    return name, share


def _way_to_say_length(decay: str) -> str:
    """Return what to type in place of `decay`, a value of --decay that is no share: a number below 1 or below 100 that
    lacks its sign is meant as one, and a larger number as steps.
    """
    number = 0.0
    with suppress(ValueError):
        number = float(decay)
    if 0 < number < 100:
        return f"Use {own(f'{number * (100 if number < 1 else 1):g}%')}."
    with suppress(ValueError):
        if (steps := parse_count(decay)) >= 100:
            return f"Use {way('--decay-steps', str(steps), instead_of='--decay')}."
    return f"Give a share, such as {example('10%')}, or --decay-steps N or --decay-tokens N."


def _build_branches(
    run: Path, steps: Sequence[int], length: tuple[str, float], shape: str, output: Path, overrides: Sequence[str]
) -> Iterator[Branch]:
    """Yield a Branch for each of `steps`: the run's checkpoint of that step, the overrides with which a new run decays
    from it, and the checked settings of that run. `length` is the result of `_parse_length`. Raise MissingInputError if
    a step has no checkpoint.
    """
    checkpoints = _find_checkpoints(run, steps)
    parent = build_settings(RunConfig, SourceRun.find(run).settings)
    name = unused_stage_name(_STAGE, parent.stages)
    for step, checkpoint in zip(steps, checkpoints, strict=True):
        kind, number = length
        if kind == "percent":
            kind, number = "steps", max(1, round(step * number / (100 - number)))
        folder = output / f"{run.name}-{_STAGE}-{_short(step)}"
        words = [f"run.dir={_literal(str(folder))}", f"stages.{name}.{kind}={number:.0f}"]
        there = recorded_config(checkpoint) or parent
        words += [f"stages.{name}.schedule={_SHAPES[shape]}", *_settings_there(there, parent, step, name)]
        typed = typed_words(overrides)
        words = [word for word in words if override_key(word) not in typed] + [*overrides]
        yield Branch(checkpoint, words, compose_run(RunRequest(words, from_run=checkpoint)))


def _find_checkpoints(run: Path, steps: Sequence[int]) -> list[Path]:
    """Return the folders of the run's checkpoints of these steps, in the same order. Raise MissingInputError if one of
    the steps has no checkpoint.
    """
    if not is_run(run):
        raise MissingInputError(not_a_run(run, "it has none of its files"))
    known = {step_from_name(path.name): path for path in list_checkpoints(run / CHECKPOINTS)}
    if missing := [step for step in steps if step not in known]:
        there = join_few([str(step) for step in known]) if known else "none"
        raise MissingInputError(
            f"{run} has no checkpoint of step {missing[0]}. Those there are: {there}. Give some of these; a run keeps "
            "the checkpoints of the steps that checkpoint.keep_every_steps=N divides."
        )
    return [known[step] for step in steps]


def _settings_there(there: RunConfig, parent: RunConfig, step: int, name: str) -> Iterator[str]:
    """Yield overrides `stages.NAME.KEY=VALUE` that give a new stage `name` the settings of the stage in which the run
    is after `step` steps, by the settings `there` of that checkpoint. They include that step's learning rate, and
    settings of the optimizer, that differ from those of the run's last start, `parent`.
    """
    stage = there.stage_at(step - 1)
    given = there.stages[stage.stage_name].overrides() if there.stages else {}
    for group, values in inherited_settings(given).items():
        if group == "recompute":
            yield f"stages.{name}.{group}={_literal(values)}"
            continue
        for key, value in values.items():
            if group != "optim":
                yield f"stages.{name}.{group}.{key}={_literal(value)}"
    reached = stage.optim.to_dict() | {"lr": stage.learning_rate(step - 1)}
    for key, value in parent.optim.to_dict().items():
        if stage_may_set(f"optim.{key}") and reached[key] != value:
            yield f"stages.{name}.optim.{key}={f'{reached[key]:.6g}' if key == 'lr' else _literal(reached[key])}"


def _literal(value: Any) -> str:
    """Return a setting's value (number, text, list, dict, ...) as text for the right side of an override KEY=VALUE;
    texts with special characters, and those that Hydra's grammar would read as something else, are quoted.
    """
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}: {_literal(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_literal, value))}]"
    if not isinstance(value, str):
        return show(value)
    is_plain = _PLAIN_TEXT.fullmatch(value) and value.lower() not in ("null", "true", "false", "nan", "inf")
    return value if is_plain else hydra_quoted(value)


def _short(step: int) -> str:
    """Return a step number as short text for a folder's name: "20k" for 20,000, "2M" for 2,000,000, and "25500"
    unabridged.
    """
    for unit, letter in ((1_000_000, "M"), (1000, "k")):
        if step % unit == 0:
            return f"{step // unit}{letter}"
    return str(step)


def pruning_warning(run: Path, at: str) -> str:
    """Return a warning if the run is not finished and, by its own settings, will delete its checkpoints of some of the
    steps `at`, which branches need; else "".
    """
    run, steps = _named_folder(run), _parse_steps(at)
    state, config = read_run(run, run.name).state, read_run_config(run)
    keep, ends = config.checkpoint, {stage.end_step for stage in config.stage_configs if config.stages}
    every = keep.keep_every_steps
    removed = [step for step in steps if step not in ends and not (every and step % every == 0)]
    if state == "finished" or not removed or keep.keep_last == "all":
        return ""
    return (
        f"warning: {run} is not finished and keeps its last {keep.keep_last} checkpoints, so it will remove "
        f"{'those of steps' if len(removed) > 1 else 'that of step'} {join_few([str(step) for step in removed])}, "
        "unless the branch has begun by then. checkpoint.keep_every_steps keeps those of every so many steps."
    )
