"""What `lmtrain config explain` says of a setting: what it means, who sets it, and its value in a run. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lmtrain.cli.keys.settings_reference import Key, config_file, text_of
from lmtrain.config.base import show
from lmtrain.config.build import build_settings
from lmtrain.config.compose import compose_plain, conf_dir, group_choices, prepare_composition, typed_words
from lmtrain.config.yaml_file import YamlFile, read_yaml
from lmtrain.errors import SettingsError, UsageError
from lmtrain.runfolder.changes import read_settings_history
from lmtrain.train.config import RunConfig

_ABSENT = object()
_OPTIONAL = {field.name for field in fields(RunConfig) if field.default is None}


@dataclass(frozen=True)
class Origin:
    """Who has set a value, and what is written there: the value in a file, or the override."""

    text: str
    file: Path | None = None  # None: the command line
    line: int = 0


def origins(overrides: Sequence[str], *, config_dir: Path | None = None, name: str = "pretrain") -> dict[str, Origin]:
    """Return the origin of every value that a file or an override sets, by its dotted key."""
    # because: hydra is slow to import
    from lmtrain.config.hydra_source import merged_files

    found: dict[str, Origin] = {}
    folders, asked, words, changes = prepare_composition(overrides, config_dir=config_dir, name=name)
    for file, place in merged_files(folders, asked, words):
        for key, origin in _origins_in(file).items():
            _put(found, f"{place}.{key}" if place else key, origin)
    for override in changes:
        if override.is_delete():
            _drop(found, override.key_or_group)
        else:
            for path, _ in _leaves(override.value(), (override.key_or_group,)):
                _put(found, ".".join(path), Origin(override.input_line))
    return found


def origin_of(found: dict[str, Origin], key: str) -> Origin | None:
    """Return a key's origin, or that of the nearest enclosing group that was set as a whole."""
    while key not in found and "." in key:
        key = key.rpartition(".")[0]
    return found.get(key)


def file_origins(file: Path) -> dict[str, Origin]:
    """Return the dotted keys of a config file with their values and lines."""
    return _origins_in(read_yaml(file))


def _origins_in(file: YamlFile) -> dict[str, Origin]:
    values = _leaves({key: value for key, value in file.data.items() if key != "defaults"}, ())
    return {".".join(path): Origin(show(value), file.path, file.lines.get(path, 0)) for path, value in values}


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield what is set, by its path; a group given as {a: 1, b: 2} sets each of its keys."""
    if isinstance(node, dict) and node:
        for name, inner in node.items():
            yield from _leaves(inner, (*path, str(name)))
    elif path:
        yield path, node


def _put(found: dict[str, Origin], key: str, origin: Origin) -> None:
    _drop(found, key)
    found[key] = origin


def _drop(found: dict[str, Origin], key: str) -> None:
    """Remove the origins of a key and of all keys below it."""
    for one in [one for one in found if one == key or one.startswith(f"{key}.")]:
        del found[one]


@dataclass(frozen=True)
class Composed:
    """The settings of a run as files and overrides give them, and who has set each."""

    tree: dict[str, Any]
    origins: dict[str, Origin]

    @classmethod
    def of(cls, overrides: Sequence[str], config_dir: Path | None, name: str) -> Composed:
        """Refuses what `lmtrain pretrain` would refuse, but for settings that are still to be given."""
        tree = compose_plain(overrides, config_dir=config_dir, name=name)
        gave_way = RunConfig.adjust_defaults(tree, typed_words(overrides))
        try:
            build_settings(RunConfig, tree)
        except SettingsError as error:
            if wrong := [problem for problem in error.problems if " is not set. " not in problem]:
                raise SettingsError(wrong) from error
        found = origins(overrides, config_dir=config_dir, name=name)
        for change in gave_way:
            chosen = f"{change.key}.kind" if isinstance(tree.get(change.key), dict) else change.key
            _put(found, chosen, Origin(f"to fit {change.cause}"))
        return cls(tree, found)

    def kind(self, section: str) -> str:
        part = self.tree.get(section)
        return str(part.get("kind", "")) if isinstance(part, dict) else ""

    def pick(self, keys: Sequence[Key]) -> Key | None:
        """Return the key of the run's own kind, of a key that several kinds have."""
        section = keys[0].name.partition(".")[0]
        return next((key for key in keys if key.kind in ("", self.kind(section))), None)

    def has(self, key: Key) -> bool:
        """Return whether a key's section is set; `hardware` is not if no machine is named."""
        section = key.name.partition(".")[0]
        return section not in _OPTIONAL or self.tree.get(section) is not None

    def value(self, key: Key) -> dict[str, Any]:
        """Return a key's value as plain data, and where it comes from in words."""
        node: Any = self.tree
        for word in key.name.split("."):
            node = node.get(word, _ABSENT) if isinstance(node, dict) else _ABSENT
        if node is not _ABSENT:
            return {"value": node, "from": _words(origin_of(self.origins, key.name))}
        if key.default:
            return {"value": key.default, "from": "the default, which no file repeats"}
        if not self.has(key):
            return {"value": None, "from": None, "why": f"{key.name.partition('.')[0]} is null"}
        return {"value": None, "from": None, "why": "has to be given"}


def key_facts(keys: Sequence[Key], run: Composed, bare: Composed, config_dir: Path | None) -> dict[str, Any]:
    """`run` has the overrides of the command line, `bare` has none."""
    name, own = keys[0].name, run.pick(keys)
    key = own or keys[0]
    facts: dict[str, Any] = {
        "key": name, "kinds": [one.kind for one in keys if one.kind], "type": key.types.replace("`", ""),
        "meaning": key.meaning, "values": list(key.values),
    }  # fmt: skip
    if (normal := bare.pick(keys)) is not None:
        facts["default"] = bare.value(normal)
    if own is None:
        section = name.partition(".")[0]
        facts["run"] = {"value": None, "from": None, "why": f"{section}.kind={run.kind(section)} has no such key"}
    elif run is not bare:
        facts["run"] = run.value(own)
    return facts | {"set_by": [*_choices_that_set(name, config_dir)]}


def value_rows(prefix: str, known: dict[str, list[Key]], run: Composed) -> list[dict[str, Any]]:
    """Return every key below a prefix that a run has, with its value and origin."""
    picked = [key for name, keys in known.items() if name.startswith(prefix) and (key := run.pick(keys))]
    rows = {key.name: {"key": key.name} | run.value(key) for key in filter(run.has, picked)}
    # because: of a group within a part, such as train.rampup, the keys tell all, and where it is null there are none;
    # of a list the value tells all
    empty = {name for name, row in rows.items() if row["value"] is None or isinstance(row["value"], list)}
    return [
        row
        for name, row in rows.items()
        if not isinstance(row["value"], dict) and name.rpartition(".")[0] not in empty
    ]


def held_rows(key: str, run: Path) -> list[dict[str, Any]]:
    """Return every value that a key, or one below it, had in a run, and from which step."""
    found = read_settings_history(run)
    below = [one for one in found if key in (one, "all") or one.startswith((f"{key}.", f"{key}["))]
    if not below:
        raise UsageError(f"{run} has no setting {key}. `lmtrain config explain all --run {run}` lists what it has.")
    return [
        {"key": one, "value": value, "step": step, "from": f"from step {step:,}"}
        for one in below for step, value in found[one]
    ]  # fmt: skip


def _choices_that_set(name: str, config_dir: Path | None) -> Iterator[dict[str, str]]:
    """Yield every config file that sets this key, as the choice that one types."""
    section, _, rest = name.partition(".")
    for group, choices in group_choices(config_dir).items():
        for choice in choices:
            file = config_file(group, choice, config_dir)
            if file is None:
                continue
            is_global = text_of(file).startswith("# @package _global_")
            inside = name if is_global else rest if group == section else None
            if inside and (origin := file_origins(file).get(inside)):
                yield {"choice": f"{group}={choice}", "value": origin.text}
    if root := file_origins(conf_dir() / "pretrain.yaml").get(name):
        yield {"choice": "conf/pretrain.yaml", "value": root.text}


def _words(origin: Origin | None) -> str:
    if origin is None:
        return "the default, which no file repeats"
    if origin.file is None:
        return f"the command line: {origin.text}"
    inside = origin.file.is_relative_to(conf_dir())
    shown = Path("conf") / origin.file.relative_to(conf_dir()) if inside else origin.file
    return f"{shown}, line {origin.line}"
