"""Files of settings given as an argument, as in `lmtrain pretrain my.yaml`: each setting becomes the word KEY=VALUE
that would set it on the command line, ahead of the words that were typed.

Called by the commands that take settings, before they compose them. This module must not depend on what the keys mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.config.parse_and_apply_overrides import MAX_CHARACTERS, FileSetting, hydra_quoted, override_key
from lmtrain.config.settings_base import show
from lmtrain.errors import LayoutError, SettingsError, UsageError, way, with_own_key

if TYPE_CHECKING:
    from lmtrain.config.strict_yaml import YamlFile

_SUFFIXES = (".yaml", ".yml")
# what other tools call a file of settings, as an option or a key
FILE_NAMES = "config config_file config_path yaml_cfg args_file cfg conf yaml recipe params_file"
_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)  # a part of a dotted key
_KEY = re.compile(r"\+?[A-Za-z_][\w/-]*(\.[\w-]+)*", re.ASCII)
_PLAIN_TEXT = re.compile(r"[\w/][\w./-]*", re.ASCII)  # a text that Hydra's grammar reads without quotes
_KEYWORDS = {"true", "false", "null"}


def expand_settings_file(words: Sequence[str] | None) -> list[str] | None:
    """Return the words of a command line with the settings file among them, if there is one, replaced by a FileSetting
    for each of its settings, ahead of all words; those whose key is typed as well are left out. This is also the
    callback that typer calls with the words.

    Raise MissingInputError if there is no such file, SettingsError if it is malformed, UsageError if there are several.
    """
    _refuse_other_spellings(words or ())
    files = [word for word in words or () if word.endswith(_SUFFIXES) and "=" not in word]
    if words is None or not files:
        return None if words is None else list(words)
    if len(files) > 1:
        raise UsageError(
            f"{files[0]} and {files[1]} are two files of settings, but a command takes one. Copy the settings of one "
            "into the other."
        )
    typed = [word for word in words if word != files[0]]
    keys = set(map(override_key, typed))
    return [*(word for word in _read_settings(Path(files[0])) if override_key(word) not in keys), *typed]


def _refuse_other_spellings(words: Sequence[str]) -> None:
    """Raise UsageError if a file of settings is given as other tools take one: @my.yaml or config=my.yaml."""
    for word in words:
        name, sign, value = word.rpartition("=")
        file = value if sign and name.lstrip("+").replace("-", "_") in FILE_NAMES.split() else word.removeprefix("@")
        if file != word and file.endswith(_SUFFIXES) and not Path(word).exists():
            raise UsageError(f"{word} is not how a file of settings is given. Use {way(file, instead_of=word)}.")


def _read_settings(path: Path) -> Iterator[FileSetting]:
    """Yield the settings in a file, in its order. Raise SettingsError if a key is malformed or is given twice."""
    # because: yaml is slow to import
    from lmtrain.config.strict_yaml import read_yaml

    file = read_yaml(path)
    _refuse_config_file(file)
    places: dict[str, str] = {}
    for keys, value in _settings(file.data):
        key, place = ".".join(keys), file.location(*keys)
        if not _KEY.fullmatch(key):
            raise SettingsError([
                f"{place} has {key!r}, which is not the key of a setting. Write keys as on the command line, such as "
                "train.steps."
            ])  # fmt: skip
        if key in places:
            raise SettingsError([f"{place} gives {key} again, after {places[key]}. Keep one of the two."])
        places[key] = place
        lines = {_dotted(place[len(keys) :], key): n for place, n in file.lines.items() if place[: len(keys)] == keys}
        yield FileSetting(f"{key}={_as_typed(value)}", value, path, lines)


def _refuse_config_file(file: YamlFile) -> None:
    """Raise SettingsError if a file of settings says something that only the files of a config folder can say."""
    header = re.search(r"^\s*#\s*@package\s+(\S+)", file.header, re.MULTILINE)
    if header and header[1] != "_global_":
        raise SettingsError([
            f"{file.path} has the line `# @package {header[1]}`, but the keys of a file of settings are whole, as in "
            f"{header[1]}.KEY. Remove the line, and write the keys below `{header[1]}:`."
        ])  # fmt: skip
    if "defaults" in file.data:
        folder = file.path.resolve().parent
        is_experiment = folder.name == "experiment"
        config_dir = folder.parent if is_experiment else folder
        words = f"--config-dir {config_dir} {'experiment=' if is_experiment else '--config-name '}"
        raise SettingsError([
            f"{file.location('defaults')} has a `defaults` list, which a file of settings does not follow. Write "
            f"choices as keys, such as `optim: lamb`, or type {words}{file.path.stem}."
        ])  # fmt: skip


def _settings(node: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, value) for each setting in nested dicts. A dict counts as a value if it is empty or one of its keys
    cannot be a part of a dotted key.
    """
    for name, value in node.items():
        path = (*above, name)
        if isinstance(value, dict) and value and all(map(_NAME.fullmatch, value)):
            yield from _settings(value, path)
        else:
            yield path, value


def _dotted(parts: Sequence[str | int], key: str) -> str:
    """Return the dotted key of a value within the setting `key`: ("datasets", 0) -> "KEY.datasets[0]"."""
    return key + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


def _as_typed(value: Any) -> str:
    """Return a value as Hydra's grammar reads it in a word KEY=VALUE."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}: {_as_typed(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_as_typed, value))}]"
    if not isinstance(value, str):
        return show(value)
    with suppress(ValueError):
        float(value)
        return hydra_quoted(value)
    is_plain = _PLAIN_TEXT.fullmatch(value) and value.lower() not in _KEYWORDS
    return value if is_plain else hydra_quoted(value)


def words_for_command(words: Sequence[str]) -> list[str]:
    """Return the words with which another process gets these settings, even if their file has been changed since. Raise
    UsageError if a setting of the file is too long for a word.
    """
    for word in words:
        if isinstance(word, FileSetting) and len(word) > MAX_CHARACTERS:
            raise UsageError(
                f"{word.location()}: {override_key(word)} has {len(word)} characters; at most {MAX_CHARACTERS} can be "
                "handed on to a job or to a run of a sweep. Put it into a root config, with --config-dir and "
                "--config-name."
            )
    return list(map(str, words))


@contextmanager
def located_problems(words: Sequence[str]) -> Iterator[None]:
    """Context manager: put the file and line before each problem that the error from its body reports on a setting of a
    settings file among `words`.
    """
    settings = [word for word in words if isinstance(word, FileSetting)]
    try:
        yield
    except (SettingsError, LayoutError) as error:
        if not settings:
            raise
        problems = [_located(problem, settings) for problem in error.marked_problems]
        raise (SettingsError(problems) if isinstance(error, SettingsError) else LayoutError(*problems)) from error


def _located(problem: str, settings: Sequence[FileSetting]) -> str:
    """Return a problem with the file and line of the setting that it begins with, if that is one of `settings`."""
    match = re.match(r"[~+]*([\w./\[\]-]*[\w\]])", problem)
    key = match[1] if match else ""
    for setting in settings:
        if (own := override_key(setting)) == key or key.startswith((f"{own}.", f"{own}[")):
            return f"{setting.location(key)}: {with_own_key(key, problem)}"
    return problem
