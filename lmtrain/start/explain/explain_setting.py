"""Facts for `lmtrain config explain`: what a setting means, what sets it, and its value in a run and in a stage, as of
stages.decay.optim.lr. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lmtrain.config.compose_run_settings import (
    STAGE_CHOICES,
    Composed,
    conf_dir,
    config_file,
    group_choices,
)
from lmtrain.config.setting_origins import Origin, iter_leaves, origins_in_file
from lmtrain.config.settings_base import show
from lmtrain.config.strict_yaml import read_yaml
from lmtrain.errors import LmtrainError, SettingsError, UsageError, join_few, way
from lmtrain.runfolder.settings_differences import flatten, read_settings_history
from lmtrain.start.explain.describe_all_settings import Key, read_config_text
from lmtrain.start.settings_from_earlier_run import RunRequest, compose_run
from lmtrain.train.run_config import RunConfig, read_run_config, with_resolved_paths
from lmtrain.train.run_stage_settings import GROUPS, stage_may_set

_ABSENT = object()
_OPTIONAL = {field.name for field in fields(RunConfig) if field.default is None}


@dataclass(frozen=True)
class ComposedSettings:
    """The settings of a run as composed from files and overrides, with the origin of each value."""

    composed: Composed
    from_run: Path | None = None  # the earlier run of --from-run

    @classmethod
    def compose(cls, request: RunRequest) -> ComposedSettings:
        """Compose a run's settings as `compose_run` does. Raise SettingsError on wrong values, but not on required
        settings without a value.
        """
        composed = list[Composed]()
        try:
            compose_run(request, on_composed=composed.append)
        except SettingsError as error:
            wrong = [problem for problem in error.marked_problems if " is not set. " not in problem]
            if wrong or not composed:
                raise SettingsError(wrong or error.marked_problems) from error
        return cls(composed[-1], request.from_run)

    def kind(self, section: str) -> str:
        return str(self.lookup([section, "kind"], ""))

    def key_of_chosen_kind(self, keys: Sequence[Key]) -> Key | None:
        """Return the entry of `keys` for the kind that the run uses, or None if that kind has no such key."""
        return next((key for key in keys if key.kind in ("", self.kind(key.section))), None)

    def has_section(self, key: Key) -> bool:
        """Return True if a key's section is not null; `hardware` is null if no machine is named."""
        return key.section not in _OPTIONAL or self.lookup([key.section]) is not None

    def lookup(self, path: Sequence[str], default: Any = None) -> Any:
        """Return the value of a setting in the composed settings, or `default` if it has none. `path` lists the words
        of its dotted key: ["optim", "lr"].
        """
        node: Any = self.composed.tree
        for word in path:
            node = node.get(word, _ABSENT) if isinstance(node, dict) else _ABSENT
        return default if node is _ABSENT else node

    def origin(self, key: str) -> str:
        """Return in words where the dotted key was set."""
        origin = self.composed.origins.nearest(key)
        if origin is not None and origin.file in self._recorded:
            recorded = self._recorded[origin.file].get(key)
            is_same = recorded is not None and recorded.text == show(self.lookup(key.split(".")))
            origin = recorded if is_same else Origin(f"--from-run={self.from_run}")
        return _describe_origin(origin)

    @cached_property
    def _recorded(self) -> dict[Path, dict[str, Origin]]:
        """The settings that the earlier run has recorded, with their lines, by the path of its config.json."""
        recorded = {}
        for path in {file.path for file in self.composed.sources.files.values()}:
            file = read_yaml(path)
            recorded[path] = origins_in_file(replace(file, data=with_resolved_paths(file.data, path.parent)))
        return recorded

    def value(self, key: Key) -> dict[str, Any]:
        """Return a dict about a setting: its value (`value`) and where it was set, in words (`from`). If it has no
        value, these are None, and `why` says the reason.
        """
        node = self.lookup(key.name.split("."), _ABSENT)
        if node is not _ABSENT:
            return {"value": node, "from": self.origin(key.name)}
        if key.default:
            return {"value": key.default, "from": "the default, which no file repeats"}
        if not self.has_section(key):
            return {"value": None, "from": None, "why": f"{key.section} is null"}
        return {"value": None, "from": None, "why": "has to be given"}


def key_facts(
    keys: Sequence[Key], run: ComposedSettings, without_overrides: ComposedSettings, config_dir: Path | None
) -> dict[str, Any]:
    """Return a dict of JSON values about one setting: type, meaning, default, its value in `run`, and the config files
    that set it. `keys` are its Key entries, one for each kind of its section that has it; `run` is composed with the
    command line's overrides, `without_overrides` without them.
    """
    name, run_key = keys[0].name, run.key_of_chosen_kind(keys)
    key = run_key or keys[0]
    facts: dict[str, Any] = {
        "key": name, "kinds": [each_key.kind for each_key in keys if each_key.kind], "type": key.types.replace("`", ""),
        "meaning": key.meaning, "values": list(key.values),
    }  # fmt: skip
    if (default_key := without_overrides.key_of_chosen_kind(keys)) is not None:
        facts["default"] = without_overrides.value(default_key)
    if run_key is None:
        facts["run"] = {
            "value": None, "from": None, "why": f"{key.section}.kind={run.kind(key.section)} has no such key"
        }  # fmt: skip
    elif run is not without_overrides:
        facts["run"] = run.value(run_key)
    return facts | {"set_by": [*_choices_that_set(name, config_dir)]}


def value_rows(prefix: str, known: dict[str, list[Key]], run: ComposedSettings) -> list[dict[str, Any]]:
    """Return a list of dicts with key, value, origin and meaning, one for each setting of `run` whose dotted name
    begins with `prefix`, such as "optim.". `known` maps the names of all settings to their Key entries. Training stages
    are listed with only the keys that they set.
    """
    picked = [key for name, keys in known.items() if name.startswith(prefix) and not name.startswith("stages.")
              and (key := run.key_of_chosen_kind(keys))]  # fmt: skip
    rows = {
        key.name: {"key": key.name} | run.value(key) | {"meaning": key.meaning}
        for key in filter(run.has_section, picked)
    }
    # because: a group within a section, such as train.rampup, is shown by its keys unless it is null, and a list by its
    # value
    empty = {name for name, row in rows.items() if row["value"] is None or isinstance(row["value"], list)}
    of_stages = {".".join(path): value for path, value in iter_leaves(run.lookup(["stages"]), ("stages",))}
    return [
        row
        for name, row in rows.items()
        if not isinstance(row["value"], dict) and name.rpartition(".")[0] not in empty
    ] + [
        {"key": name, "value": value, "from": run.origin(name), "meaning": _stage_key_meaning(name, known)}
        for name, value in of_stages.items() if name.startswith(prefix) and name != "stages"
    ]  # fmt: skip


def _stage_key_meaning(name: str, known: dict[str, list[Key]]) -> str:
    """Return the meaning of a key of a training stage, such as stages.decay.optim.lr; "" if it is no single setting.
    `known` maps the names of all settings to their Key entries.
    """
    _, inner = split_stage_key(name) or ("", name)
    keys = known.get(f"stages.NAME.{inner}") or known.get(inner)
    return keys[0].meaning if keys else ""


def history_rows(key: str, run: Path) -> list[dict[str, Any]]:
    """Return the values that a setting has had in the course of a run, whose starts may change it: a dict with key,
    value and the value's first step (from 1) for each. `key` may be a section, for all of its settings, or "all". Raise
    UsageError if the run has no such setting.
    """
    histories = read_settings_history(run)
    names = [name for name in histories if key in (name, "all") or name.startswith((f"{key}.", f"{key}["))]
    if not names:
        raise UsageError(f"{run} has no setting {key}. `lmtrain config explain all --run {run}` lists what it has.")
    return [
        {"key": name, "value": value, "step": step, "from": f"from step {step:,}"}
        for name in names for step, value in histories[name]
    ]  # fmt: skip


def _choices_that_set(name: str, config_dir: Path | None) -> Iterator[dict[str, str]]:
    """Yield a dict for each config file that sets the dotted key `name`: the value as text (`value`), and the override
    GROUP=CHOICE that selects the file (`choice`), or "conf/pretrain.yaml", which every run reads.
    """
    section, _, rest = name.partition(".")
    for group, choices in group_choices(config_dir).items():
        for choice in choices:
            file = config_file(group, choice, config_dir)
            if file is None:
                continue
            is_global = read_config_text(file).startswith("# @package _global_")
            inside = name if is_global else rest if group == section else None
            if inside and (origin := origins_in_file(read_yaml(file)).get(inside)):
                yield {"choice": f"{group}={choice}", "value": origin.text}
    if root := origins_in_file(read_yaml(conf_dir() / "pretrain.yaml")).get(name):
        yield {"choice": "conf/pretrain.yaml", "value": root.text}


def _describe_origin(origin: Origin | None) -> str:
    """Return where a value was set, as text: a file and line, an override on the command line, or the default if
    `origin` is None.
    """
    if origin is None:
        return "the default, which no file repeats"
    if origin.file is None:
        return f"the command line: {origin.text}"
    is_ours = origin.file.is_relative_to(conf_dir())
    return f"{Path('conf') / origin.file.relative_to(conf_dir()) if is_ours else origin.file}, line {origin.line}"


def split_stage_key(key: str) -> tuple[str, str] | None:
    """Split a key such as "stages.decay.optim.lr" into ("decay", "optim.lr"): the stage's name and the key within the
    stage. Return None for any other key.
    """
    field, _, rest = key.partition(".")
    name, _, inner = rest.partition(".")
    return (name, inner) if field == "stages" and inner else None


def stage_key_facts(
    stage_key: tuple[str, str], keys: dict[str, list[Key]], run: ComposedSettings,
    without_overrides: ComposedSettings, config_dir: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Return a dict of JSON values about a key of a training stage: those of `key_facts`, and the value that the stage
    sets. `stage_key` is (stage's name, key within the stage), and `keys` maps all settings' names to their Key entries.
    Raise UsageError if stages have no such key.
    """
    name, inner = stage_key
    key, own = f"stages.{name}.{inner}", keys.get(f"stages.NAME.{inner}")
    if own is None and inner not in keys and inner not in STAGE_CHOICES:
        known = [word for word in keys if stage_may_set(word) and word.endswith(f".{inner.rpartition('.')[2]}")]
        ways = [way(f"stages.{name}.{word}", instead_of=key) for word in known]
        hint = f"Did you mean {join_few(ways, ' or ')}?" if ways else (
            "`lmtrain config explain stages` lists those of a run."
        )  # fmt: skip
        raise UsageError(f"{key} is not a setting. {hint}")
    if own is None and not stage_may_set(inner):
        raise UsageError(
            f"{key} is not a setting of a stage: {inner} cannot differ between the stages of a run. "
            f"`lmtrain config explain {inner}` explains it."
        )
    facts = key_facts(own or keys[inner], run, without_overrides, config_dir) | {"key": key}
    value = run.lookup(key.split("."))
    if own is not None:
        facts.pop("run", None)  # because: it is the value of a key that only stages have
    else:
        facts["in_stage"] = f"the key {inner}, while the stage {name} lasts, in place of the run's"
    facts["stage"] = (
        {"value": value, "from": run.origin(key)} if value is not None
        else {"value": None, "from": None, "why": f"not set in the stage {name}" + "; the run's holds" * (own is None)}
    )  # fmt: skip
    return facts


def held_by_stage(key: str, run: Path) -> list[dict[str, Any]]:
    """Return the values of a setting that differ between a run's training stages: a dict with key, value, stage and
    first step for each stage. `key` may be a section, for all of its settings, or "all". Return [] if the run has no
    stages, if no value differs, or if its settings cannot be read.
    """
    try:
        config = read_run_config(run)
        stages = config.stage_configs if config.stages else ()
    except LmtrainError:
        return []
    # because: other settings are the same in all stages
    values = [(stage, dict(flatten({group: getattr(stage, group).to_dict() for group in GROUPS}))) for stage in stages]
    names = dict.fromkeys(
        name for _, stage_values in values for name in stage_values
        if key in (name, "all") or name.startswith((f"{key}.", f"{key}["))
    )  # fmt: skip
    differing = [name for name in names if len({show(stage_values.get(name)) for _, stage_values in values}) > 1]
    return [
        {"key": name, "value": stage_values[name], "step": stage.first_step + 1, "stage": stage.stage_name,
         "from": f"in the stage {stage.stage_name}, from step {stage.first_step + 1:,}"}
        for name in differing for stage, stage_values in values if name in stage_values
    ]  # fmt: skip
