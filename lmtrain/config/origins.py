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
from lmtrain.config.compose import conf_dir, group_choices
from lmtrain.config.yaml_file import read_yaml


@dataclass(frozen=True)
class Origin:
    """Who has set a value, and what is written there: the value in a file, or the override."""

    text: str
    file: Path | None = None  # None: the command line
    line: int = 0


def origins(overrides: Sequence[str], *, config_dir: Path | None = None, name: str = "pretrain") -> dict[str, Origin]:
    """Of every value that a file or an override sets, by its dotted key; what nobody sets is a default of the code."""
    groups = group_choices(config_dir)
    keys = [(text, text.lstrip("+~").partition("=")[0]) for text in overrides]
    found: dict[str, Origin] = {}
    for file, package in _merged_files([text for text, key in keys if key in groups], config_dir, name):
        for key, origin in file_origins(file).items():
            _put(found, f"{package}.{key}" if package else key, origin)
    for text, key in keys:
        if text.startswith("~"):
            _drop(found, key)
        elif key not in groups:
            for one in _keys(key, _value(text)):
                _put(found, one, Origin(text))
    return found


def origin_of(found: dict[str, Origin], key: str) -> Origin | None:
    """Its own, or that of the nearest group around it that was set as a whole."""
    while key not in found and "." in key:
        key = key.rpartition(".")[0]
    return found.get(key)


def file_origins(file: Path) -> dict[str, Origin]:
    """The dotted keys of a config file, with what is set there and in which line."""
    read = read_yaml(file)
    values = _leaves({key: value for key, value in read.data.items() if key != "defaults"}, ())
    return {".".join(path): Origin(show(value), file, read.lines.get(path, 0)) for path, value in values}


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(node, dict) and node:
        for name, inner in node.items():
            yield from _leaves(inner, (*path, str(name)))
    elif path:
        yield path, node


def _merged_files(groups: Sequence[str], config_dir: Path | None, name: str) -> Iterator[tuple[Path, str]]:
    """The files of which Hydra makes the config, in its order, each with the place in the tree where it puts it."""
    # because: hydra is slow to import
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    roots = [*([config_dir.resolve()] if config_dir else []), conf_dir()]
    home = next(root for root in roots if (root / f"{name}.yaml").is_file())
    before, after = roots[: roots.index(home)], roots[roots.index(home) + 1 :]
    with initialize_config_dir(config_dir=str(home), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        for folder in before:  # takes effect because hydra.searchpath makes Hydra look at its folders anew
            loader.get_search_path().prepend("lmtrain", f"file://{folder}")
        further = ",".join("'file://" + str(folder).replace("'", "\\'") + "'" for folder in after)
        given = [*groups, f"hydra.searchpath=[{further}]"]
        merged = loader.compute_defaults_list(name, given, RunMode.RUN).defaults
    for one in merged:
        file = next((path for root in roots if (path := root / f"{one.config_path}.yaml").is_file()), None)
        if file is not None:
            yield file, (one.package or "").removeprefix("_global_").lstrip(".")


def _value(text: str) -> Any:
    """What an override sets a key to; None where that is not for Hydra's grammar to say."""
    # because: hydra is slow to import
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(text).value()
    except HydraException:
        return None


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
