"""The config source through which Hydra reads YAML with our strict reader, and the composition itself.

Called by compose, which passes the choices of the command line. Each defaults list is checked, with file and line,
before Hydra follows it, so that almost no error is left for Hydra to report.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lmtrain.config import references
from lmtrain.config.names import nearest_value
from lmtrain.config.yaml_file import YamlFile, read_yaml
from lmtrain.errors import MissingInputError, SettingsError, join_few, spelling_hint

_HEADER = re.compile(r"^\s*#\s*@(.*)$", re.MULTILINE)
_WORDS = ("override", "optional")
MAX_DEPTH = 100  # nesting of defaults lists
MAX_JOINED = 100  # entries in the cache of joined trees
MAX_FILES = 1000  # because: if each list names two others, ten levels make a thousand files
_joined: dict[Any, dict[str, Any]] = {}  # cache of joined trees; the key has the choices and the state of all files


@dataclass(frozen=True)
class Asked:
    """A composition request: the root config, the existing groups and choices, and the choices of the command line."""

    name: str
    roots: Sequence[str]  # names of the existing root configs
    groups: Mapping[str, Sequence[str]]
    chosen: Mapping[str, str]  # group -> the override that chose it


@dataclass(frozen=True)
class Entry:
    """A line of a defaults list."""

    where: str
    text: str
    group: str  # full path of the group; "" if the line names a config without a group
    values: tuple[str, ...]  # file names; null is left out
    override: bool
    optional: bool


def compose_files(folders: Sequence[Path], asked: Asked, choices: Sequence[str]) -> dict[str, Any]:
    """Return the root config joined with every chosen file; references are not resolved.

    The joined tree is cached until a config file changes: joining takes nearly all of the time of composition, and the
    runs of a sweep mostly choose the same files.
    """
    key = asked.name, tuple(asked.chosen.items()), tuple(choices), tuple(_files(folders))
    if key not in _joined:
        if len(_joined) == MAX_JOINED:
            _joined.clear()
        with _opened(folders, asked):
            tree = hydra_compose(config_name=asked.name, overrides=list(choices))
            plain = OmegaConf.to_container(tree, resolve=False)
        assert isinstance(plain, dict)
        _joined[key] = {str(name): value for name, value in plain.items()}
    return deepcopy(_joined[key])


def _files(folders: Sequence[Path]) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield each config file's path, inode, size, mtime and ctime (ns), which change when the file is rewritten."""
    for folder in folders:
        for path in sorted(folder.rglob("*.yaml")):
            with suppress(OSError):  # because: the code that reads the file reports the error
                found = path.stat()
                yield str(path), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def merged_files(folders: Sequence[Path], asked: Asked, choices: Sequence[str]) -> list[tuple[YamlFile, str]]:
    """Return the joined files in order, each with the path in the tree where its keys go ("" for the top)."""
    with _opened(folders, asked) as loader:
        merged = loader.compute_defaults_list(asked.name, list(choices), RunMode.RUN).defaults
    places = [(one.config_path, (one.package or "").removeprefix("_global_").lstrip(".")) for one in merged]
    return [(YamlSource.read[path], place) for path, place in places if path in YamlSource.read]


@contextmanager
def _opened(folders: Sequence[Path], asked: Asked) -> Iterator[ConfigLoader]:
    """Open Hydra's config loader over these folders with our reader; raise its errors as SettingsError."""
    Plugins.instance().register(YamlSource)
    YamlSource.asked, YamlSource.read, YamlSource.files = asked, {}, {}
    # because: Hydra requires a config folder here; it is searched last
    with initialize_config_dir(config_dir=str(folders[-1]), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        for folder in reversed(folders):
            loader.get_search_path().prepend("lmtrain", f"{YamlSource.scheme()}://{folder}")
        loader.repository.initialize_sources(loader.get_search_path())  # type: ignore[attr-defined]
        try:
            _check_count(folders, asked)
            yield loader
        except (HydraException, OmegaConfBaseException, RecursionError) as error:
            raise SettingsError(_explain(error, asked, YamlSource.read)) from error


def _check_count(folders: Sequence[Path], asked: Asked) -> None:
    """Raise SettingsError if defaults lists name more than MAX_FILES files in total, with repetitions counted."""
    counts: dict[str, int] = {}

    def count(name: str, depth: int) -> int:
        if name not in counts:
            counts[name] = 1  # because: this ends the recursion on a cycle, which Hydra itself reports
            path = next((one for folder in folders if (one := folder / f"{name}.yaml").is_file()), None)
            with suppress(SettingsError, MissingInputError):  # because: the later real read reports the error
                for entry in read_entries(name, _read(path))[0] if path and depth < MAX_DEPTH else ():
                    below = [f"{entry.group}/{one}" if entry.group else one for one in entry.values]
                    counts[name] += sum(count(one, depth + 1) for one in below)
        return counts[name]

    chosen = [f"{group}/{word.partition('=')[2]}" for group, word in asked.chosen.items()]
    if sum(count(one, 0) for one in (asked.name, *chosen)) > MAX_FILES:
        raise SettingsError([
            f"The defaults lists of {join_few(sorted(counts, key=lambda one: -counts[one]), max_shown=3)} bring "
            f"more than {MAX_FILES} files. Name each file once."
        ])  # fmt: skip


def _read(path: Path) -> YamlFile:
    if path not in YamlSource.files:
        YamlSource.files[path] = read_yaml(path)
    return YamlSource.files[path]


class YamlSource(ConfigSource):
    """A folder of configs, as a Hydra config source. Hydra makes and copies an instance for each folder it searches."""

    asked: ClassVar[Asked]
    read: ClassVar[dict[str, YamlFile]]  # config path -> the file, for all files that Hydra has read so far
    files: ClassVar[dict[Path, YamlFile]]

    @staticmethod
    def scheme() -> str:
        return "lmtrain"

    def _file(self, config_path: str) -> Path:
        return Path(self.path, self._normalize_file_name(config_path))

    def load_config(self, config_path: str) -> ConfigResult:
        file = _read(self._file(config_path))
        self.read[config_path] = file
        package, problems = _package(file)
        problems += list(_problems(config_path, package, file, self.asked, self.read.get(self.asked.name)))
        if problems:
            raise SettingsError(problems)
        return ConfigResult(
            self.provider, f"{self.scheme()}://{self.path}", OmegaConf.create(file.data), {"package": package}
        )

    def is_group(self, config_path: str) -> bool:
        return not config_path.startswith("hydra") and Path(self.path, config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        return not config_path.startswith("hydra/") and os.path.lexists(self._file(config_path))

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return list(self.asked.groups.get(config_path, ()))


def _package(file: YamlFile) -> tuple[str | None, list[str]]:
    """Return where the keys of a file go, from its line `# @package NAME` (None without one), and any problems."""
    for line in _HEADER.findall(file.header):
        words = line.split()
        if len(words) == 2 and words[0] == "package":
            return words[1], []
        problem = f"{file.path} has the line `# @{line.strip()}`, which says nothing here"
        return None, [f"{problem}. Write `# @package _global_`."]
    return None, []


def _problems(
    config_path: str, package: str | None, file: YamlFile, asked: Asked, root: YamlFile | None
) -> Iterator[str]:
    group = config_path.rpartition("/")[0]
    if "hydra" in file.data:
        yield f"{file.at('hydra')} sets Hydra itself, which only composes settings here. Take `hydra` out."
    if group == "experiment" and package != "_global_":
        yield (
            f"{file.path} has no line `# @package _global_`, so that its keys would go into {group}. "
            "Add `# @package _global_` as its first line."
        )
    entries, problems = read_entries(config_path, file)
    yield from problems
    root_groups = {entry.group for entry in (read_entries(asked.name, root)[0] if root else ()) if not entry.override}
    seen_override = ""
    for entry in entries:
        if entry.override:
            seen_override = entry.text
        elif seen_override:
            yield f"{entry.where} has {entry.text} after {seen_override}. Move it up: overrides stand last."
        yield from _entry_problems(entry, config_path == asked.name, asked, root_groups)
    for path, value in references.values_of(file.data):
        if path[0] != "defaults" and isinstance(value, str) and (problem := references.problem_of(value)):
            yield f"{file.at(*path)}: {references.shown_path(path)}={value} {problem}"


def read_entries(config_path: str, file: YamlFile) -> tuple[list[Entry], list[str]]:
    """Return the entries of a file's defaults list, and the problems of its malformed lines."""
    raw, problems, entries = file.data.get("defaults", []), list[str](), list[Entry]()
    if not isinstance(raw, list):
        return [], [f"{file.at('defaults')} has a defaults that is no list. Write lines such as `- optim: adamw`."]
    here, selves = config_path.rpartition("/")[0], 0
    for index, item in enumerate(raw):
        where = file.at("defaults", index)
        [(key, value)] = item.items() if isinstance(item, dict) and len(item) == 1 else [("", item)]
        values = value if isinstance(value, list) and key else [value]
        if not all(isinstance(one, str) or (one is None and key) for one in values):
            problems.append(f"{where} has {item!r}, which names no file. Write `- GROUP: NAME`, or `- GROUP: null`.")
            continue
        if value == "_self_" and not key:
            selves += 1
            continue
        *words, name = (key or value).split() or [""]
        text = f"`- {key}: {', '.join(map(str, values)) if value is not None else 'null'}`" if key else f"`- {value}`"
        wrong = next((word for word in words if word not in _WORDS), None)
        if wrong is not None or (words and not key):
            problems.append(f"{where} has {text}, with {wrong or words[0]}. {spelling_hint(wrong or '', _WORDS)}")
            continue
        if problem := references.problem_of(" ".join((key, *map(str, values)))):
            problems.append(f"{where} has {text}, which {problem}")
            continue
        name = name.partition("@")[0]
        whole = name[1:] if name.startswith("/") else f"{here}/{name}".lstrip("/")
        files = tuple(one for one in values if one is not None) if key else (whole,)
        entries.append(Entry(where, text, whole if key else "", files, "override" in words, "optional" in words))
    if selves > 1:
        problems.append(f"{file.at('defaults')} has _self_ twice. Keep one.")
    return entries, problems


def _entry_problems(entry: Entry, is_root: bool, asked: Asked, root_groups: set[str]) -> Iterator[str]:
    group, last = entry.group, entry.group.rpartition("/")[2]
    if not group:
        folder, _, name = entry.values[0].rpartition("/")
        known = asked.groups.get(folder, ()) if folder else asked.roots
        if name not in known:
            hint = spelling_hint(name, known)
            yield f"{entry.where} has {entry.text}, and there is no {entry.values[0]}.yaml. {hint}"
        return
    value = ", ".join(entry.values) or "null"
    if not is_root and not entry.override and (
        group in root_groups or (group not in asked.groups and last in root_groups)
    ):  # fmt: skip
        right = group if group in root_groups else last
        yield f"{entry.where} has {entry.text}, and {right} is chosen already. Write `- override /{right}: {value}`."
    elif group not in asked.groups:
        if not entry.optional:
            yield f"{entry.where} has {entry.text}, and {group} is no group. {spelling_hint(group, asked.groups)}"
    elif group not in asked.chosen and not entry.optional:
        for name in entry.values:
            if "${" not in name and name.removesuffix(".yaml") not in asked.groups[group]:
                near = nearest_value(name, asked.groups[group])
                yield f"{entry.where} has {entry.text}, and {group} has no {name}. {near}"


def _explain(error: Exception, asked: Asked, read: Mapping[str, YamlFile]) -> list[str]:
    """Return messages for the errors that only show across several files, after Hydra failed with `error`."""
    lists = [read_entries(name, file)[0] for name, file in read.items()]
    chosen = [entry for entries in lists for entry in entries if not entry.override and entry.group]
    groups = {entry.group for entry in chosen}
    problems = []
    for group, word in asked.chosen.items():
        if group in groups and word.startswith("+"):
            problems.append(f"{word} adds {group}, which is chosen already. Write {word.lstrip('+')}.")
        elif group not in groups and word.startswith("~"):
            problems.append(f"{word} takes away {group}, which nothing has chosen. Leave it out.")
        elif group not in groups and not word.startswith("+"):
            problems.append(f"{word} changes {group}, which no defaults list names. Write +{word}.")
    problems += [
        f"{entry.where} has {entry.text}, and nothing chose {entry.group} before. Leave out override."
        for entries in lists for entry in entries if entry.override and entry.group not in groups
    ]  # fmt: skip
    first: dict[str, Entry] = {}
    for entry in chosen:
        if (other := first.setdefault(entry.group, entry)) is not entry:
            right = f"- override /{entry.group}: {', '.join(entry.values)}"
            problems.append(f"{entry.where} has {entry.text} after {other.where} has chosen it. Write `{right}`.")
    files = join_few(str(file.path) for file in read.values() if file.data)
    if isinstance(error, RecursionError) and not problems:
        return [f"The defaults lists of {files} lead back to themselves. Take one of the entries out."]
    at = f" at {key}" if (key := getattr(error, "full_key", None)) else ""
    return problems or [f"{files} do not fit together{at}. Look at their defaults lists; --debug shows more."]
