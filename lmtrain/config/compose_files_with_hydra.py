"""The config source through which Hydra reads YAML with our strict reader, and the composition itself.

Called by compose, which passes the choices of the command line. Each defaults list is checked, with file and line,
before Hydra follows it, so that almost no error is left for Hydra to report.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
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

from lmtrain.config.name_suggestions import suggest_value
from lmtrain.config.setting_references import iter_values, path_text, reference_problem
from lmtrain.config.strict_yaml import YamlFile, read_yaml
from lmtrain.errors import MissingInputError, SettingsError, join_few, leave_out, spelling_hint, way

_HEADER = re.compile(r"^\s*#\s*@(.*)$", re.MULTILINE)
_KEYWORDS = ("override", "optional")
_IN_NO_FOLDER = "in-no-folder"  # stands for a folder where Hydra looks for the files of the request itself
MAX_DEPTH = 100  # nesting of defaults lists
MAX_JOINED = 100  # entries in the cache of joined trees
MAX_FILES = 1000  # because: if each list names two others, ten levels make a thousand files
_joined_trees: dict[
    Any, dict[str, Any]
] = {}  # cache of joined trees; the key has the choices and the state of all files


@dataclass(frozen=True)
class CompositionRequest:
    """Input of a composition with Hydra: the folders to search, the root config, the existing groups and their choices,
    and the choices of the command line.
    """

    folders: Sequence[Path]
    name: str
    roots: Sequence[str]  # names of the existing root configs
    groups: Mapping[str, Sequence[str]]
    chosen: Mapping[str, str]  # group -> the override that chose it
    choices: list[str]  # the same overrides in Hydra's words: `~group` for one that chooses null
    # files that are in no folder, such as the settings of an earlier run: path within conf/, without .yaml -> file
    files: Mapping[str, YamlFile] = field(default_factory=dict)

    def find_file(self, name: str) -> YamlFile | None:
        """Return the file at the path `name` within conf/, without .yaml; None if there is none."""
        paths = (path for folder in self.folders if (path := folder / f"{name}.yaml").is_file())
        return self.files.get(name) or next(map(_read_cached, paths), None)


@dataclass(frozen=True)
class Entry:
    """A line of a defaults list, the list of files that a config file includes."""

    location: str
    text: str
    group: str  # full path of the group; "" if the line names a config without a group
    values: tuple[str, ...]  # file names; null is left out
    override: bool
    optional: bool


def compose_files(request: CompositionRequest) -> dict[str, Any]:
    """Let Hydra merge the root config with all files that its defaults list and the choices of the command line
    include, and return the merged settings as nested dicts. References such as `${optim.lr}` are not replaced yet.

    The merged tree is cached until a config file changes: merging takes nearly all of the time of composition, and the
    runs of a sweep mostly choose the same files.
    """
    own_files = json.dumps([(name, file.data) for name, file in request.files.items()])
    key = request.name, tuple(request.chosen.items()), tuple(_file_states(request.folders)), own_files
    if key not in _joined_trees:
        if len(_joined_trees) == MAX_JOINED:
            _joined_trees.clear()
        with _open_loader(request):
            plain = OmegaConf.to_container(hydra_compose(request.name, request.choices), resolve=False)
        assert isinstance(plain, dict)
        _joined_trees[key] = {str(name): value for name, value in plain.items()}
    return deepcopy(_joined_trees[key])


def _file_states(folders: Sequence[Path]) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield (path, inode, size, mtime in ns, ctime in ns) of each .yaml file in the folders and below. They serve as
    the key of a cache, since they change when a file is rewritten.
    """
    for folder in folders:
        for path in sorted(folder.rglob("*.yaml")):
            with suppress(OSError):  # because: the code that reads the file reports the error
                status = path.stat()
                yield str(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def merged_files(request: CompositionRequest) -> list[tuple[YamlFile, str]]:
    """Return the config files that Hydra merges, in an order in which later files override earlier ones. Each comes
    with the dotted key below which its settings go, such as "model", or "" for the top level.
    """
    with _open_loader(request) as loader:
        merged = loader.compute_defaults_list(request.name, request.choices, RunMode.RUN).defaults
    places = [(entry.config_path, (entry.package or "").removeprefix("_global_").lstrip(".")) for entry in merged]
    return [(YamlSource.files_read[path], place) for path, place in places if path in YamlSource.files_read]


@contextmanager
def _open_loader(request: CompositionRequest) -> Iterator[ConfigLoader]:
    """Context manager that yields Hydra's config loader, set up to search the folders of `request` and to read files
    with YamlSource. Errors that Hydra raises in the `with` block become SettingsError.
    """
    Plugins.instance().register(YamlSource)
    YamlSource.request, YamlSource.files_read, YamlSource.cached_files = request, {}, {}
    # because: Hydra requires a config folder here; it is searched last
    with initialize_config_dir(config_dir=str(request.folders[-1]), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        for folder in (*reversed(request.folders), *[_IN_NO_FOLDER] * bool(request.files)):
            loader.get_search_path().prepend("lmtrain", f"{YamlSource.scheme()}://{folder}")
        loader.repository.initialize_sources(loader.get_search_path())  # type: ignore[attr-defined]
        try:
            _check_num_files(request)
            yield loader
        except (HydraException, OmegaConfBaseException, RecursionError) as error:
            raise SettingsError(_explain_failure(error, request, YamlSource.files_read)) from error


def _check_num_files(request: CompositionRequest) -> None:
    """Raise SettingsError if the root config and the files chosen by overrides include more than MAX_FILES files in
    total through their defaults lists. A file counts as often as it is included.
    """
    counts: dict[str, int] = {}

    def count(name: str, depth: int) -> int:
        if name not in counts:
            counts[name] = 1  # because: this ends the recursion on a cycle, which Hydra itself reports
            with suppress(SettingsError, MissingInputError):  # because: the later real read reports the error
                file = request.find_file(name) if depth < MAX_DEPTH else None
                for entry in read_entries(name, file)[0] if file else ():
                    folder = f"{entry.group}/" if entry.group else ""
                    counts[name] += sum(count(f"{folder}{file_name}", depth + 1) for file_name in entry.values)
        return counts[name]

    chosen = [f"{group}/{word.partition('=')[2]}" for group, word in request.chosen.items()]
    if sum(count(one, 0) for one in (request.name, *chosen)) > MAX_FILES:
        raise SettingsError([
            f"The defaults lists of {join_few(sorted(counts, key=lambda name: -counts[name]), max_shown=3)} include "
            f"more than {MAX_FILES} files in total. Name each file once."
        ])  # fmt: skip


def _read_cached(path: Path) -> YamlFile:
    """Return the parsed content of a YAML file. Each file is read at most once in a composition."""
    if path not in YamlSource.cached_files:
        YamlSource.cached_files[path] = read_yaml(path)
    return YamlSource.cached_files[path]


class YamlSource(ConfigSource):
    """A folder of config files as Hydra sees it, read with our strict YAML reader; or the files of the request that are
    in no folder. Hydra makes and copies an instance for each folder it searches.
    """

    request: ClassVar[CompositionRequest]
    files_read: ClassVar[dict[str, YamlFile]]  # config path -> the file, for all files that Hydra has read so far
    cached_files: ClassVar[dict[Path, YamlFile]]

    @staticmethod
    def scheme() -> str:
        return "lmtrain"

    def _file(self, config_path: str) -> Path:
        return Path(self.path, self._normalize_file_name(config_path))

    @property
    def _own_files(self) -> Mapping[str, YamlFile] | None:
        """The files that are in no folder, if this stands for them, else None."""
        return self.request.files if self.path == _IN_NO_FOLDER else None

    def load_config(self, config_path: str) -> ConfigResult:
        file = self._own_files[config_path] if self._own_files is not None else _read_cached(self._file(config_path))
        self.files_read[config_path] = file
        package, problems = _package_header(file)
        problems += list(
            _file_problems(config_path, package, file, self.request, self.files_read.get(self.request.name))
        )
        if problems:
            raise SettingsError(problems)
        return ConfigResult(
            self.provider, f"{self.scheme()}://{self.path}", OmegaConf.create(file.data), {"package": package}
        )

    def is_group(self, config_path: str) -> bool:
        if self._own_files is not None:
            return any(name.startswith(f"{config_path}/") for name in self._own_files)
        return not config_path.startswith("hydra") and Path(self.path, config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        if self._own_files is not None:
            return config_path in self._own_files
        return not config_path.startswith("hydra/") and os.path.lexists(self._file(config_path))

    def available(self) -> bool:
        return self._own_files is not None or Path(self.path).is_dir()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return list(self.request.groups.get(config_path, ()))


def _package_header(file: YamlFile) -> tuple[str | None, list[str]]:
    """Parse the comment line `# @package NAME` at the top of a config file, which names the key below which its
    settings go. Return (NAME, error messages); NAME is None if there is no such line or it is wrong.
    """
    for line in _HEADER.findall(file.header):
        words = line.split()
        if len(words) == 2 and words[0] == "package":
            return words[1], []
        return None, [
            f"{file.path} has the line `# @{line.strip()}`, which has no meaning here. Write `# @package _global_`."
        ]
    return None, []


def _file_problems(
    config_path: str, package: str | None, file: YamlFile, request: CompositionRequest, root_file: YamlFile | None
) -> Iterator[str]:
    """Yield error messages on a config file that was read: on its `# @package` line (`package` is the NAME in it), its
    defaults list and its references `${key}`. `config_path` is the file's path within conf/, without .yaml; `root_file`
    is the root config, or None before it is read.
    """
    group = config_path.rpartition("/")[0]
    if "hydra" in file.data:
        yield f"{file.location('hydra')} sets options of Hydra itself, which lmtrain does not use. Remove `hydra`."
    if group == "experiment" and package != "_global_":
        yield (
            f"{file.path} has no line `# @package _global_`, so that its keys would go into {group}. "
            "Add `# @package _global_` as its first line."
        )
    entries, problems = read_entries(config_path, file)
    yield from problems
    root_entries = read_entries(request.name, root_file)[0] if root_file else ()
    root_groups = {entry.group for entry in root_entries if not entry.override}
    seen_override = ""
    for entry in entries:
        if entry.override:
            seen_override = entry.text
        elif seen_override:
            yield f"{entry.location} has {entry.text} after {seen_override}. Move it up: overrides come last."
        yield from _entry_problems(entry, config_path == request.name, request, root_groups)
    for path, value in iter_values(file.data):
        if path[0] != "defaults" and isinstance(value, str) and (problem := reference_problem(value)):
            yield f"{file.location(*path)}: {path_text(path)}={value}: {problem}"


def read_entries(config_path: str, file: YamlFile) -> tuple[list[Entry], list[str]]:
    """Parse the defaults list of a config file; return its valid entries, and error messages on the others.
    `config_path` is the file's path within conf/, without .yaml.
    """
    raw, folder = file.data.get("defaults", []), config_path.rpartition("/")[0]
    if not isinstance(raw, list):
        return [], [
            f"{file.location('defaults')} has a `defaults` that is not a list. Write lines such as `- optim: adamw`."
        ]
    parsed = [
        _parse_entry(item, file.location("defaults", index), folder)
        for index, item in enumerate(raw) if item != "_self_"
    ]  # fmt: skip
    problems = [entry for entry in parsed if isinstance(entry, str)]
    if raw.count("_self_") > 1:
        problems.append(f"{file.location('defaults')} has _self_ twice. Keep one.")
    return [entry for entry in parsed if isinstance(entry, Entry)], problems


def _parse_entry(item: Any, location: str, folder: str) -> Entry | str:
    """Parse one item of a config file's defaults list to an Entry; return an error message instead if it is malformed.
    `location` is the file and line for the message, `folder` the file's folder within conf/.
    """
    [(key, value)] = item.items() if isinstance(item, dict) and len(item) == 1 else [("", item)]
    values = value if isinstance(value, list) and key else [value]
    if not all(isinstance(value, str) or (value is None and key) for value in values):
        return f"{location} has {item!r}, which names no file. Write `- GROUP: NAME`, or `- GROUP: null`."
    *keywords, name = (key or value).split() or [""]
    text = f"`- {key}: {', '.join(map(str, values)) if value is not None else 'null'}`" if key else f"`- {value}`"
    unknown_word = next((word for word in keywords if word not in _KEYWORDS), None)
    if unknown_word is not None or (keywords and not key):
        hint = spelling_hint(unknown_word or "", _KEYWORDS)
        return f"{location} has {text}, with the wrong word {unknown_word or keywords[0]}. {hint}"
    if problem := reference_problem(" ".join((key, *map(str, values)))):
        return f"{location} has {text}: {problem}"
    name = name.partition("@")[0]
    full_path = name[1:] if name.startswith("/") else f"{folder}/{name}".lstrip("/")
    files = tuple(value for value in values if value is not None) if key else (full_path,)
    return Entry(location, text, full_path if key else "", files, "override" in keywords, "optional" in keywords)


def _entry_problems(entry: Entry, is_root: bool, request: CompositionRequest, root_groups: set[str]) -> Iterator[str]:
    """Yield an error message if an entry of a defaults list names a file or group that does not exist, or, without the
    word `override`, a group for which a file is chosen already. `is_root` is True if the entry is in the root config.

    `root_groups` are the groups that the root config's own defaults list chooses.
    """
    group, last = entry.group, entry.group.rpartition("/")[2]
    if not group:
        folder, _, name = entry.values[0].rpartition("/")
        existing = request.groups.get(folder, ()) if folder else request.roots
        if name not in existing:
            hint = spelling_hint(name, existing)
            yield f"{entry.location} has {entry.text}, but there is no {entry.values[0]}.yaml. {hint}"
        return
    value = ", ".join(entry.values) or "null"
    if not is_root and not entry.override and (
        group in root_groups or (group not in request.groups and last in root_groups)
    ):  # fmt: skip
        chosen = group if group in root_groups else last
        yield (
            f"{entry.location} has {entry.text}, but {chosen} is chosen already. "
            f"Write `- override /{chosen}: {value}`."
        )
    elif group not in request.groups:
        if not entry.optional:
            hint = spelling_hint(group, request.groups)
            yield f"{entry.location} has {entry.text}, but {group} is not a group. {hint}"
    elif group not in request.chosen and not entry.optional:
        for name in entry.values:
            if "${" not in name and name.removesuffix(".yaml") not in request.groups[group]:
                suggestion = suggest_value(name, request.groups[group])
                yield f"{entry.location} has {entry.text}, but {group} has no {name}. {suggestion}"


def _explain_failure(error: Exception, request: CompositionRequest, files_read: Mapping[str, YamlFile]) -> list[str]:
    """Return error messages on why Hydra failed with `error`: defaults lists and overrides that contradict each other,
    or else one general message. `files_read` holds the files that were read, by path within conf/ without .yaml.
    """
    lists = [read_entries(name, file)[0] for name, file in files_read.items()]
    chosen = [entry for entries in lists for entry in entries if not entry.override and entry.group]
    groups = {entry.group for entry in chosen}
    problems = []
    for group, word in request.chosen.items():
        if group in groups and word.startswith("+"):
            plain = way(word.lstrip("+"), instead_of=word)
            problems.append(f"{word} adds {group}, which is chosen already. Write {plain}.")
        elif group not in groups and word.startswith("~"):
            problems.append(f"{word} removes {group}, which is not chosen. {leave_out(word)}.")
        elif group not in groups and not word.startswith("+"):
            added = way(f"+{word}", instead_of=word)
            problems.append(f"{word} changes {group}, which no defaults list names. Write {added}.")
    problems += [
        f"{entry.location} has {entry.text}, but {entry.group} is not chosen before it. Remove the word `override`."
        for entries in lists for entry in entries if entry.override and entry.group not in groups
    ]  # fmt: skip
    first: dict[str, Entry] = {}
    for entry in chosen:
        if (earlier := first.setdefault(entry.group, entry)) is not entry:
            correct_line = f"- override /{entry.group}: {', '.join(entry.values)}"
            problems.append(
                f"{entry.location} has {entry.text} after {earlier.location} has chosen it. Write `{correct_line}`."
            )
    files = join_few(str(file.path) for file in files_read.values() if file.data)
    if isinstance(error, RecursionError) and not problems:
        return [f"The defaults lists of {files} form a cycle. Take one of the entries out."]
    at = f" at {key}" if (key := getattr(error, "full_key", None)) else ""
    return problems or [f"The defaults lists of {files} contradict each other{at}. Correct them; --debug shows more."]
