"""Hydra's composition over conf/, then typed settings. Called by the command line; torch-free.

Hydra is used to compose and for its override grammar only. Nothing is ever instantiated from a file: a config is
data (security promise), so `_target_` keys and `${oc.env:...}` style resolvers are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from lmtrain.config.base import Settings
from lmtrain.config.build import build_settings
from lmtrain.errors import MissingInputError, SettingsError, nearest

S = TypeVar("S", bound=Settings)
_RESOLVER = re.compile(r"\$\{\s*[A-Za-z_][\w.]*\s*:")


def conf_dir() -> Path:
    """conf/ inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def compose(cls: type[S], overrides: Sequence[str], *, config_dir: Path | None = None, name: str = "pretrain") -> S:
    """Settings of this class from conf/NAME.yaml, a user's config folder and the overrides, judged whole."""
    return build_settings(cls, compose_plain(overrides, config_dir=config_dir, name=name))


def compose_plain(
    overrides: Sequence[str], *, config_dir: Path | None = None, name: str = "pretrain"
) -> dict[str, Any]:
    """The composed tree as plain data, before types are judged."""
    # because: hydra takes a third of a second to import, and most commands compose nothing
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    search = _search_path(config_dir)
    home = _home_of(name, search)
    before, after = search[: search.index(home)], search[search.index(home) + 1 :]
    arguments = [*_lenient(_parse(overrides), search), _further_folders(after)]
    with initialize_config_dir(config_dir=str(home), version_base="1.3"):
        for folder in before:  # takes effect because hydra.searchpath makes Hydra look at its folders anew
            GlobalHydra.instance().config_loader().get_search_path().prepend("lmtrain", f"file://{folder}")
        try:
            tree = hydra_compose(config_name=name, overrides=arguments)
            _refuse_code(OmegaConf.to_container(tree, resolve=False))
            plain = OmegaConf.to_container(tree, resolve=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise SettingsError([" ".join(str(error).split())]) from error
    assert isinstance(plain, dict)
    return {str(k): v for k, v in plain.items()}


def sweep(overrides: Sequence[str], *, config_dir: Path | None = None) -> list[list[str]]:
    """Every combination that `a=1,2 b=range(3)` names, as lists of plain overrides, in order."""
    # because: hydra is slow to import
    from hydra.core.override_parser.types import Glob

    groups = group_choices(config_dir)
    options: list[list[str]] = []
    for override in _parse(overrides):
        key, value = override.get_key_element(), override.value()
        if not override.is_sweep_override():
            options.append([str(override.input_line)])
        elif isinstance(value, Glob):
            options.append([f"{key}={name}" for name in value.filter(groups.get(override.key_or_group, []))])
        elif override.is_discrete_sweep():
            options.append([f"{key}={one}" for one in override.sweep_string_iterator()])
        else:
            raise SettingsError([f"{override.input_line} has no end. With -m use a,b,c or range() or glob()."])
        if not options[-1]:
            raise SettingsError([f"{override.input_line} names nothing. {nearest(override.key_or_group, groups)}"])
    return [list(combination) for combination in product(*options)]


def group_choices(config_dir: Path | None = None) -> dict[str, list[str]]:
    """Every group of conf/ and its choices: `model` -> [gpt2_large, ...]. Used by docs, tests and completion."""
    found: dict[str, set[str]] = {}
    for root in _search_path(config_dir):
        for file in root.glob("*/**/*.yaml"):
            found.setdefault(file.parent.relative_to(root).as_posix(), set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(found.items())}


def _search_path(config_dir: Path | None) -> list[Path]:
    if config_dir is None:
        return [conf_dir()]
    if not config_dir.is_dir():
        raise MissingInputError(f"--config-dir={config_dir} is not a folder. Give the folder that holds your configs.")
    return [config_dir.resolve(), conf_dir()]


def _home_of(name: str, search: list[Path]) -> Path:
    """The first folder that holds the root config; Hydra must start there."""
    known = {file.stem for root in search for file in root.glob("*.yaml")}
    if name not in known:
        raise SettingsError([f"--config-name={name} is not in {search[0]}. {nearest(name, known)}"])
    return next(root for root in search if (root / f"{name}.yaml").exists())


def _further_folders(folders: list[Path]) -> str:
    """Where else Hydra looks. Always given, so that no config file can add a place of its own."""
    quoted = ["'file://" + str(folder).replace("'", "\\'") + "'" for folder in folders]
    return f"hydra.searchpath=[{','.join(quoted)}]"


def _parse(overrides: Sequence[str]) -> list[Any]:
    # because: hydra is slow to import
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, parsed, problems = OverridesParser.create(), [], []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
            reason = "" if parsed[-1].key_or_group else "it names no key"
        except HydraException as error:
            reason = str(error).splitlines()[0]
        if reason:
            problems.append(f"{text!r} is not an override ({reason}). Write key=value, +key=value or group=choice.")
    if problems:
        raise SettingsError(problems)
    return parsed


def _lenient(overrides: list[Any], search: list[Path]) -> list[str]:
    """Let Hydra take every key, so that unknown ones are judged by our types, together and with a near name.

    `key=value` becomes `++key=value` unless key is a group; a group's choice must exist.
    """
    groups: dict[str, set[str]] = {}
    for root in search:
        for file in root.glob("*/**/*.yaml"):
            groups.setdefault(file.parent.relative_to(root).as_posix(), set()).add(file.stem)
    problems, result = [], []
    for override in overrides:
        if override.is_sweep_override():
            problems.append(f"{override.input_line} names several values. Add -m to run each of them.")
            continue
        name = override.key_or_group
        if name in groups:
            choice = override.value()
            for one in choice if isinstance(choice, list) else [choice]:
                if one is not None and str(one) not in groups[name] and not override.is_delete():
                    problems.append(f"{name}={one} is not in conf/{name}/. {nearest(str(one), groups[name])}")
            result.append(override.input_line)
        elif override.is_delete():
            result.append(override.input_line)
        else:
            result.append("++" + str(override.input_line).lstrip("+"))
    if problems:
        raise SettingsError(problems)
    return result


def _refuse_code(node: Any, path: str = "") -> None:
    """Configs are data: no import strings, no resolvers that read the environment or call anything."""
    if isinstance(node, dict):
        for key, value in node.items():
            where = f"{path}.{key}" if path else str(key)
            if str(key).startswith("_") and str(key).endswith("_"):
                raise SettingsError([f"{where} names code, and settings are data only. Remove it."])
            _refuse_code(value, where)
    elif isinstance(node, list):
        for i, value in enumerate(node):
            _refuse_code(value, f"{path}[{i}]")
    elif isinstance(node, str) and _RESOLVER.search(node):
        raise SettingsError([f"{path}={node} calls a resolver. Use plain values or ${{other.key}} references."])
