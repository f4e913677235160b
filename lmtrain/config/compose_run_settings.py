"""Composition of conf/ files and overrides with Hydra, and then typed settings. Called by the command line; torch-free.

Hydra serves only for composition and for its override grammar. No object is ever instantiated from a file: a config is
data (security promise), so `_target_` keys and resolvers such as `${oc.env:...}` are refused. Hydra joins the files;
this module applies the overrides of single values and resolves `${other.key}` references.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin

from lmtrain.config import setting_references
from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.name_suggestions import SettingNames, closest_value, suggest_value, types_by_key, union_members
from lmtrain.config.parse_and_apply_overrides import (
    FileSetting,
    RefusedOverrides,
    apply_override,
    override_key,
    parse_overrides,
    sweep_refusal,
)
from lmtrain.config.setting_origins import Origin, Origins, iter_leaves
from lmtrain.config.settings_base import AdjustedDefault, Settings, show
from lmtrain.config.settings_file import located_problems
from lmtrain.config.typed_words import typed_words
from lmtrain.errors import (
    LayoutError,
    MissingInputError,
    SettingsError,
    fill_in,
    join_few,
    leave_out,
    own,
    settings_error,
    spelling_hint,
    split_ways,
    way,
    with_other_ways,
)

if TYPE_CHECKING:
    from lmtrain.config.compose_files_with_hydra import CompositionRequest
    from lmtrain.config.strict_yaml import YamlFile

S = TypeVar("S", bound=Settings)
Rewrite = Callable[[dict[str, Any], Mapping[str, str]], dict[str, str]]  # settings, typed key -> text; typed afterwards
STAGE_GROUP = "stage"  # the folder of conf/ for `stages.NAME=FILE`
STAGE_CHOICES = ("data", "recompute", "schedule")  # groups that a stage takes by name: stages.NAME.schedule=linear
MAX_LISTED = 30  # choices of a group that a message lists
MAX_RUNS = 10_000  # because: every run's settings are checked before the first run starts, at about 10 ms each


def conf_dir() -> Path:
    """Return the conf/ folder inside the installed package, or next to the package in a checkout."""
    package, in_checkout = (parent / "conf" for parent in Path(__file__).resolve().parents[1:3])
    return package if package.is_dir() else in_checkout


@dataclass(frozen=True)
class Sources:
    """The config files and groups of settings from which a run is composed before any word is typed."""

    config_dir: Path | None = None  # the user's own config folder, searched before conf/
    name: str = "pretrain"  # the root config NAME.yaml
    # files that are in no folder, such as an earlier run's settings: path within conf/, without .yaml -> file
    files: Mapping[str, YamlFile] = field(default_factory=dict)
    groups: Mapping[str, Any] = field(default_factory=dict)  # that replace those of the files, such as `model`
    origin_of_groups: str = ""  # what has set `groups`, in words


@dataclass
class Composed:
    """Settings as nested dicts, not yet checked for their types, with what set each of them."""

    tree: dict[str, Any]
    typed: Mapping[str, str]  # key -> text, as of `typed_words`
    sources: Sources
    request: CompositionRequest
    changes: Sequence[Any]  # Hydra's Override objects of the words that set single values
    adjusted: Sequence[AdjustedDefault] = ()

    @cached_property
    def origins(self) -> Origins:
        """The place that sets each setting."""
        # because: hydra is slow to import
        from lmtrain.config.compose_files_with_hydra import merged_files

        found = Origins()
        for file, place in merged_files(self.request):
            found.put_file(file, place)
        for group, values in self.sources.groups.items():
            found.remove(group)
            for path, _ in iter_leaves(values, (group,)):
                found[".".join(path)] = Origin(self.sources.origin_of_groups)
        for override in self.changes:
            if override.is_delete():
                found.remove(override.key_or_group)
                continue
            for path, value in iter_leaves(override.value(), (override.key_or_group,)):
                key, word = ".".join(path), override.input_line
                is_of_file = isinstance(word, FileSetting)
                found.put(key, Origin(show(value), word.file, word.line(key)) if is_of_file else Origin(word))
        for change in self.adjusted:
            chosen = f"{change.key}.kind" if isinstance(self.tree.get(change.key), dict) else change.key
            found.put(chosen, Origin(f"to fit {change.cause}"))
        return found


def compose(
    cls: type[S], overrides: Sequence[str], sources: Sources = Sources(), *,
    report: Callable[[str], None] | None = None, rewrite: Rewrite | None = None,
    on_composed: Callable[[Composed], None] | None = None,
) -> S:  # fmt: skip
    """Build an instance of the settings class `cls` from its `sources`, the files that these include and the overrides
    of the command line; raise one error with all problems. `report` is called with a message for each default that was
    changed to fit the overrides, `on_composed` with the composed settings before they are checked.

    `rewrite` may change the tree of settings before it is checked; it gets what the user typed, as key -> word, and
    returns the same under the keys that the changed tree has for it.
    """
    with located_problems(overrides):
        composed = compose_adjusted(cls, overrides, sources, rewrite)
        if on_composed is not None:
            on_composed(composed)
        settings = composed_settings(cls, composed)
    if report is not None:
        for adjusted in composed.adjusted:  # because: a refusal must not follow notes on settings that fit nothing
            report(adjusted.text())
    return settings


def compose_adjusted(
    cls: type[S], overrides: Sequence[str], sources: Sources, rewrite: Rewrite | None = None
) -> Composed:
    """Compose settings for the class `cls`, with its defaults changed where they do not fit what was typed. Problems do
    not name the file of settings that they are in. `rewrite` is that of `compose`.
    """
    try:
        composed = compose_tree(overrides, sources, kind_of=partial(_kind_of_value, cls))
    except RefusedOverrides as error:
        raise SettingsError([*error.marked_problems, *_remaining_problems(cls, error, sources, rewrite)]) from error
    if rewrite is not None:
        composed.typed = rewrite(composed.tree, composed.typed)
    composed.adjusted = list(cls.adjust_defaults(composed.tree, composed.typed))
    return composed


def composed_settings(cls: type[S], composed: Composed) -> S:
    """Return composed settings as an instance of `cls`; raise SettingsError or LayoutError if they are wrong."""
    names = SettingNames(cls, group_choices(composed.sources.config_dir), composed.typed)
    return build_settings(cls, composed.tree, names=names)


def _kind_of_value(cls: type[Settings], key: str) -> str:
    """Return "list" if the setting `key` of the settings class `cls` may be a list, "number" if it is nothing but a
    number, else "".
    """
    options = {option for option in union_members(types_by_key(cls).get(key)) if option is not type(None)}
    if any(get_origin(option) is tuple for option in options):
        return "list"
    return "number" if options and options <= {int, float} else ""


def _remaining_problems(
    cls: type[Settings], error: RefusedOverrides, sources: Sources, rewrite: Rewrite | None
) -> Iterator[str]:
    """Yield the problems that the settings have apart from the overrides that `error` refused, so that the user sees
    all at once: the other overrides are composed again. Problems that only arise because the refused overrides are
    missing are left out.
    """
    if not error.refused or not all("=" in word for word in error.refused):
        return  # because: the key that an override without `=` was meant for is unknown
    keys = [override_key(word) for word in error.refused]
    follow_ups = [f"{key}{sign}" for key in keys for sign in (".", " is not set", *(["="] if "." not in key else []))]
    starts = tuple(f"{key}=" for key in keys)
    try:
        composed_settings(cls, compose_adjusted(cls, error.remaining, sources, rewrite))
    except (SettingsError, LayoutError) as failure:
        for problem in failure.marked_problems:
            text = split_ways(problem)[0]
            # because: what a refused override would have given is asked for in its absence
            is_asked_for = " is not set. " in text or " is left for the branch" in text
            is_alternative = is_asked_for and any(f" {start}" in text for start in starts)
            is_alternative |= " alone is no " in text  # because: the rest of the group may be what was refused
            if not (problem.startswith(starts) or is_alternative or any(part in problem for part in follow_ups)):
                yield problem


def compose_plain(
    overrides: Sequence[str], *, config_dir: Path | None = None, name: str = "pretrain"
) -> dict[str, Any]:  # fmt: skip
    """Return the settings of `compose_tree` alone."""
    return compose_tree(overrides, Sources(config_dir, name)).tree


def compose_tree(
    overrides: Sequence[str], sources: Sources, *, kind_of: Callable[[str], str] = lambda key: ""
) -> Composed:
    """Compose all settings: the root config and the files that it includes, the groups that replace those of the files,
    then the overrides. References such as `${optim.lr}` are replaced by values. `kind_of` is that of `_parse`.

    Raise SettingsError on wrong overrides, on unresolved references and on keys such as `_target_`.
    """
    # because: hydra takes 0.3 s to import, and most commands compose no config
    from lmtrain.config.compose_files_with_hydra import compose_files

    request, changes = _parse(overrides, sources, kind_of)
    tree = compose_files(request) | deepcopy(dict(sources.groups))
    _name_stages(tree, [override.key_or_group for override in changes])
    problems = list(_read_named_files(tree, request.folders))
    for override in sorted(changes, key=lambda change: _group_of(change.key_or_group) is None):
        problem, root = apply_override(tree, override), override.key_or_group.partition(".")[0]
        problems += [problem] if problem else _read_named_files({root: tree.get(root)}, request.folders)
    for path, _ in setting_references.iter_values(tree):
        if str(path[-1]).startswith("_") and str(path[-1]).endswith("_"):
            raise SettingsError([
                f"{setting_references.path_text(path)} names code, but settings are plain data. "
                f"{leave_out(setting_references.path_text(path), shown='Remove it')}."
            ])  # fmt: skip
    plain, unresolved = setting_references.resolve_references(tree)
    if problems or unresolved:
        raise SettingsError([*dict.fromkeys(problems + unresolved)])
    return Composed(plain, typed_words(overrides), sources, request, changes)


def _name_stages(tree: dict[str, Any], keys: Sequence[str]) -> None:
    """Add to `tree`, nested dicts of settings, an empty dict stages.NAME for each training stage that `keys` such as
    "stages.NAME.optim.lr" name and `tree` lacks. New stages are added in the order of `keys`, in which they will run.
    """
    for key in keys:
        if key.startswith("stages.") and isinstance(tree.get("stages"), dict):
            tree["stages"].setdefault(key.split(".")[1], {})


def _read_named_files(node: Any, folders: Sequence[Path], path: str = "") -> Iterator[str]:
    """Replace, in the nested dicts `node`, each text that stands for a config file (stages.decay=NAME) by the settings
    in that file, in place. Yield an error message for each name without a file. `path` is the dotted key of `node`.
    """
    for name, value in list(node.items()) if isinstance(node, dict) else ():
        key = f"{path}.{name}" if path else str(name)
        group = _group_of(key)
        if group is not None and isinstance(value, str):
            file = next((file for folder in folders if (file := folder / group / f"{value}.yaml").is_file()), None)
            if file is None:
                names = sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})
                yield f"{key}={value} is not in conf/{group}/. {suggest_value(value, names, own)}"
                continue
            node[name] = _read_group_file(file, folders)
            if group == "schedule":
                node[name].pop("warmup_steps", None)  # because: the files suit a run that begins, and a stage goes on
            if group == "data":
                node[name] = _without_defaults(node[name], folders)
        if key.partition(".")[0] == "stages" and key.count(".") < 2:
            yield from _read_named_files(node[name], folders, key)


def _read_group_file(file: Path, folders: Sequence[Path]) -> dict[str, Any]:
    """Return the settings in a config file, on top of those in the files of the same folder name that its `defaults`
    list names. Raise SettingsError if the file holds no settings, or names a file that does not exist in `folders`.
    """
    # because: yaml is slow to import
    from lmtrain.config.strict_yaml import read_yaml

    data, group = read_yaml(file).data, file.parent.name
    if not isinstance(data, dict):
        raise SettingsError([f"{file} holds no settings. Write its keys into it, such as steps: 1000."])
    result: dict[str, Any] = {}
    for base in data.get("defaults", ()):
        places = [place for folder in folders if (place := folder / group / f"{base}.yaml").is_file() and place != file]
        if base != "_self_" and not places:
            raise SettingsError([f"{file} builds upon {base}, which is not in conf/{group}/. Correct its `defaults`."])
        result |= _read_group_file(places[0], folders) if places else {}
    return result | {key: value for key, value in data.items() if key != "defaults"}


def _without_defaults(data: dict[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    """Return the `data` settings of a config file without those that equal the shipped defaults of their kind, so that
    a training stage takes these from the run instead. `kind` is always kept.
    """
    shipped = folders[-1] / "data" / f"{data.get('kind')}.yaml"
    defaults = _read_group_file(shipped, folders) if shipped.is_file() else {}
    return {key: value for key, value in data.items() if key == "kind" or key not in defaults or value != defaults[key]}


def _group_of(key: str) -> str | None:
    """Return the folder of conf/ with the files that a dotted key accepts by name: "stage" for stages.decay, "schedule"
    for stages.decay.schedule. Return None if the key takes no file.
    """
    match = re.fullmatch(r"stages\.[^.]+(?:\.(\w+))?", key)
    if match is None or match[1] not in (None, *STAGE_CHOICES):
        return None
    return match[1] or STAGE_GROUP


def _parse(
    overrides: Sequence[str], sources: Sources, kind_of: Callable[[str], str]
) -> tuple[CompositionRequest, list[Any]]:
    """Parse and check the overrides, and return them in two groups: a request for Hydra with those that choose files,
    such as `model=gpt2_small`, and Hydra's Override objects of those that set single values. `kind_of` tells of a key
    whether its value is a "list" or a "number", for messages. Raise RefusedOverrides if an override is malformed or
    chooses an unknown file.
    """
    # because: hydra is slow to import
    from lmtrain.config.compose_files_with_hydra import CompositionRequest

    overrides = [*dict.fromkeys(overrides)]  # an override typed twice counts once
    folders, groups = _config_folders(sources.config_dir), group_choices(sources.config_dir)
    roots = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")} | {*sources.files})
    name = _existing_config_name(sources.name, roots, folders)
    chosen, choices, changes = dict[str, str](), list[str](), list[Any]()
    refusals = list[tuple[str, str]]()
    for word, override in zip(overrides, parse_overrides(overrides, groups), strict=True):
        group = override.key_or_group
        if override.is_sweep_override():
            refusals.append((word, sweep_refusal(override, kind=kind_of(group))))
        elif group == STAGE_GROUP:
            name_of_stage = f"Write stages.NAME={override.value()}."
            if str(override.value()) not in groups[group]:  # because: elsewhere it says what is done with a model
                name_of_stage = f"lmtrain pretrains; {leave_out(group, shown='leave it out')} for that."
            refusals.append((word, f"{override.input_line} names no stage. {name_of_stage}"))
        elif group in groups:
            chosen[group] = str(override.input_line)
            wrong = [] if override.is_delete() else _choice_problems(group, override.value(), groups[group])
            refusals += [(word, problem) for problem in wrong]
            choices.append(f"~{group}" if override.value() is None else chosen[group])
        elif "/" in group:
            as_key = group.replace("/", ".")
            is_group = group.rpartition("/")[2] in groups or difflib.get_close_matches(group, groups, cutoff=0.8)
            is_key = override.value() is not None and not is_group
            mine = f"Write {way(f'{as_key}={override.value()}', instead_of=word)}." if is_key else ""
            hint = f"which does not exist. {mine or spelling_hint(group, groups, partial(_other_group, word))}"
            refusals.append((word, f"{override.input_line} chooses from the group {group}, {hint}"))
        else:
            changes.append(override)
    if refusals:
        raise RefusedOverrides(refusals, overrides)
    for group, _, choice in (path.rpartition("/") for path in sources.files if "/" in path):
        groups[group] = [*groups.get(group, ()), choice]
    return CompositionRequest(folders, name, roots, groups, chosen, choices, sources.files), changes


def _other_group(override: str, group: str) -> str:
    """Return the advice to choose from `group` what `override` chooses from another."""
    return way(f"{group}={override.partition('=')[2]}", instead_of=override, shown=group)


def expand_sweep(overrides: Sequence[str], *, config_dir: Path | None = None) -> list[list[str]]:
    """Return the list of overrides of each run of a sweep, one run for each combination of values: `a=1,2 b=3,4` gives
    [["a=1", "b=3"], ["a=1", "b=4"], ["a=2", "b=3"], ["a=2", "b=4"]]. `config_dir` is the user's own config folder,
    whose file names `glob()` finds as well.

    Raise SettingsError if a sweep is empty or unbounded, or if there are more than MAX_RUNS runs.
    """
    # because: hydra is slow to import
    from hydra.core.override_parser.types import Glob

    groups = group_choices(config_dir)
    options: list[list[str]] = []
    with located_problems(overrides):
        parsed = parse_overrides(overrides, groups)
    for override in parsed:
        key, value = override.get_key_element(), override.value()
        if not override.is_sweep_override():
            options.append([override.input_line])
        elif isinstance(value, Glob):
            options.append([f"{key}={name}" for name in value.filter(groups.get(override.key_or_group, []))])
        elif override.is_discrete_sweep():
            options.append([f"{key}={value}" for value in islice(override.sweep_string_iterator(), MAX_RUNS + 1)])
        else:
            raise SettingsError(
                [f"{override.input_line} does not list its values. With -m use a,b,c or range() or glob()."]
            )
        if not options[-1]:
            choices = groups.get(override.key_or_group)
            way_out = f"Choices are {join_few(choices)}." if choices else spelling_hint(override.key_or_group, groups)
            raise SettingsError([f"{override.input_line} matches no choice of {override.key_or_group}. {way_out}"])
    if prod(map(len, options)) > MAX_RUNS:
        keys = [value[0].partition("=")[0] for value in options if len(value) > 1]
        raise SettingsError(
            [f"The values of {join_few(keys)} make more than {MAX_RUNS} runs with -m. Give fewer values."]
        )
    return [list(combination) for combination in product(*options)]


@contextmanager
def whole_sweep_in_ways(run: Sequence[str], runs: Sequence[Sequence[str]]) -> Iterator[None]:
    """Context manager: if the settings `run` of one run of a sweep are refused, let the error's ways out replace its
    value alone among the values that the settings `runs` of all runs give to a key.
    """
    own = dict(word.split("=", 1) for word in run if "=" in word)
    values = {key: list(dict.fromkeys(word.partition("=")[2] for each in runs for word in each
                                      if word.startswith(f"{key}="))) for key in own}  # fmt: skip

    def among_all(word: str) -> str:
        key, sign, new = word.partition("=")
        listed = [new if value == own[key] else value for value in values.get(key, ())]
        return f"{key}{sign}{','.join(dict.fromkeys(listed))}" if len(listed) > 1 else word

    try:
        yield
    except (SettingsError, LayoutError) as error:
        change = lambda each: each._replace(new=tuple(map(among_all, each.new)))  # noqa: E731
        problems = [type(problem)(with_other_ways(problem, change)) for problem in error.marked_problems]
        raise settings_error(problems) from error


def group_choices(config_dir: Path | None = None) -> dict[str, list[str]]:
    """Return a dict that maps each config group to the names of its files, without .yaml: `model` -> [gpt2_large, ...].
    Groups are the folders in conf/ and in `config_dir`, the user's own.
    """
    choices: dict[str, set[str]] = {}
    for root in _config_folders(config_dir):
        for file in root.glob("*/**/*.yaml"):
            choices.setdefault(file.parent.relative_to(root).as_posix(), set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(choices.items())}


def config_file(group: str, name: str, config_dir: Path | None = None) -> Path | None:
    """Return the config file of a group's choice, from the user's folder if it has one, else from conf/; or None."""
    roots = [*([config_dir] if config_dir else []), conf_dir()]
    return next((path for root in roots if (path := root / group / f"{name}.yaml").is_file()), None)


def _config_folders(config_dir: Path | None) -> list[Path]:
    """Return the folders to search for config files, in order: the user's folder `config_dir`, if it is not None, then
    the shipped conf/. Raise MissingInputError if `config_dir` is not a folder.
    """
    if config_dir is None:
        return [conf_dir()]
    if not config_dir.is_dir():
        as_word = f"Use {way(str(config_dir), instead_of='--config-dir')} without it" if config_dir.suffix in (
            ".yaml", ".yml"
        ) else "Give the folder that holds your configs"  # fmt: skip
        raise MissingInputError(f"--config-dir={config_dir} is not a folder. {as_word}.")
    return [config_dir.resolve(), conf_dir()]


def _existing_config_name(name: str, config_names: Sequence[str], folders: Sequence[Path]) -> str:
    """Return `name`, the value of --config-name, without a suffix .yaml. Raise SettingsError if it is not among
    `config_names`; `folders` are those that were searched, for the message.
    """
    if name.removesuffix(".yaml") in config_names:
        return name.removesuffix(".yaml")
    misnamed = next((folder / f"{name}.yml" for folder in folders if (folder / f"{name}.yml").exists()), None)
    way_out = f"Rename {misnamed} to {name}.yaml." if misnamed else spelling_hint(name, config_names, own)
    raise SettingsError([f"--config-name={name} is not in {folders[0]}. {way_out}"])


def _choice_problems(group: str, value: Any, choices: Sequence[str]) -> list[str]:
    """Return an error message for each unknown name in `value`, the right side of an override such as
    `model=gpt2_small`: a name, None or a list of names. `choices` are the known names of the config group `group`.
    """
    chosen = value if isinstance(value, list) else [value]
    names = [show(name) for name in chosen if name is not None]
    wrong = [name for name in names if name not in choices]
    return [f"{group}={name} is not in conf/{group}/. {_suggest_choice(group, name, choices)}" for name in wrong]


# part of another tool's name of a choice -> what the nearest choice here has not
_LOST_PARTS = {
    "restart": "There are no restarts of a schedule here. ",
    "8bit": "Moments are kept in fp32 here. ", "8-bit": "Moments are kept in fp32 here. ",
    "paged": "Nothing is offloaded to the host here. ",
    "-true": "Weights are kept in fp32 here, beside what is computed. ",
    "schedule-free": "There is no optimizer without a schedule here. ",
}


def names_data(name: str) -> bool:
    """Return whether a word is the name of a file or a dataset, and not of a kind of data."""
    return "/" in name or os.path.exists(name) or os.path.exists(f"{name}.idx")


def _suggest_choice(group: str, name: str, choices: Sequence[str]) -> str:
    """Return a sentence for the error message that `name` is no choice of a config group: it names the nearest choice
    or all of them, or, if they are very many, the command that lists them.
    """
    if group == "data" and names_data(name):
        return f"Did you mean {way(f'data.path={name}', instead_of='data')}?"
    if len(choices) > MAX_LISTED and closest_value(name, choices) is None:
        return f"`lmtrain config list {group}` lists its {len(choices)} choices."
    if closest_value(name, choices) is None:
        return f"Choose one with {fill_in(f'{group}=NAME')}. Known: {', '.join(sorted(choices))}."
    about = next((said for part, said in _LOST_PARTS.items() if part in name.lower().replace("_", "-")), "")
    return f"{about}{suggest_value(name, choices, own)}"
