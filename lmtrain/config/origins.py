"""Where each value of a run comes from: which line of which file, or which override, has set it last. Torch-free.

Called by `lmtrain config explain`, after the same overrides have composed. Hydra says which files it merges and in
which order; what they set is read here, with line numbers, which Hydra does not keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.config.base import show
from lmtrain.config.compose import selected
from lmtrain.config.yaml_file import YamlFile, read_yaml


@dataclass(frozen=True)
class Origin:
    """Who has set a value, and what is written there: the value in a file, or the override."""

    text: str
    file: Path | None = None  # None: the command line
    line: int = 0


def origins(overrides: Sequence[str], *, config_dir: Path | None = None, name: str = "pretrain") -> dict[str, Origin]:
    """Of every value that a file or an override sets, by its dotted key; what nobody sets is a default of the code."""
    # because: hydra is slow to import
    from lmtrain.config.source import merged_files

    found: dict[str, Origin] = {}
    folders, asked, words, changes = selected(overrides, config_dir=config_dir, name=name)
    for file, place in merged_files(folders, asked, words):
        for key, origin in _origins_in(file).items():
            _put(found, f"{place}.{key}" if place else key, origin)
    for override in changes:
        if override.is_delete():
            _drop(found, override.key_or_group)
            continue
        for one in _keys(override.key_or_group, override.value()):
            _put(found, one, Origin(override.input_line))
    return found


def origin_of(found: dict[str, Origin], key: str) -> Origin | None:
    """Its own, or that of the nearest group around it that was set as a whole."""
    while key not in found and "." in key:
        key = key.rpartition(".")[0]
    return found.get(key)


def file_origins(file: Path) -> dict[str, Origin]:
    """The dotted keys of a config file, with what is set there and in which line."""
    return _origins_in(read_yaml(file))


def _origins_in(file: YamlFile) -> dict[str, Origin]:
    values = _leaves({key: value for key, value in file.data.items() if key != "defaults"}, ())
    return {".".join(path): Origin(show(value), file.path, file.lines.get(path, 0)) for path, value in values}


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(node, dict) and node:
        for name, inner in node.items():
            yield from _leaves(inner, (*path, str(name)))
    elif path:
        yield path, node


def _keys(key: str, value: Any) -> Iterator[str]:
    """What an override sets: a group given as {a: 1, b: 2} sets each of its keys."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _keys(f"{key}.{name}", inner)
    else:
        yield key


def _put(found: dict[str, Origin], key: str, origin: Origin) -> None:
    _drop(found, key)
    found[key] = origin


def _drop(found: dict[str, Origin], key: str) -> None:
    """A group that is set or removed as a whole takes its keys with it."""
    for one in [one for one in found if one == key or one.startswith(f"{key}.")]:
        del found[one]
