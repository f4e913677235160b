"""Composition of conf/ files and overrides with Hydra, and then typed settings. Called by the command line; torch-free.

Hydra serves only for composition and for its override grammar. No object is ever instantiated from a file: a config is
data (security promise), so `_target_` keys and resolvers such as `${oc.env:...}` are refused. Hydra joins the files;
this module applies the overrides of single values and resolves `${other.key}` references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lmtrain.config import references
from lmtrain.config.base import Settings
from lmtrain.config.build import build_settings
from lmtrain.config.names import Names, nearest_value
from lmtrain.config.overrides import WrongWords, change, key_of, parse, several
from lmtrain.errors import LayoutError, MissingInputError, SettingsError, join_few, spelling_hint

if TYPE_CHECKING:
    from lmtrain.config.source import Asked

S = TypeVar("S", bound=Settings)
MAX_RUNS = 10_000  # because: every run's settings are checked before the first run starts, at about 10 ms each


def conf_dir() -> Path:
    """Return the conf/ folder inside the installed package, or beside it in a checkout."""
    package, beside = (parent / "conf" for parent in Path(__file__).resolve().parents[1:3])
    return package if package.is_dir() else beside


def compose(
    cls: type[S], overrides: Sequence[str], *, config_dir: Path | None = None, name: str = "pretrain",
    say: Callable[[str], None] | None = None,
) -> S:  # fmt: skip
    """Build the settings of a class from conf/NAME.yaml, the user's config folder and the overrides.

    Raise one error with all problems. Report to `say` each default that was changed to fit the overrides.
    """
    try:
        tree = compose_plain(overrides, config_dir=config_dir, name=name)
    except WrongWords as error:
        raise SettingsError([*error.problems, *_others_wrong(cls, error, config_dir, name)]) from error
    typed = typed_words(overrides)
    for changed in cls.give_way(tree, typed):
        if say is not None:
            say(changed.text())
    return build_settings(cls, tree, names=Names(cls, group_choices(config_dir), typed))


def typed_words(overrides: Sequence[str]) -> dict[str, str]:
    """Return key -> value, both as typed on the command line."""
    return {key_of(word): word.partition("=")[2] for word in overrides}


def _others_wrong(cls: type[Settings], error: WrongWords, config_dir: Path | None, name: str) -> Iterator[str]:
    """Yield the problems of the remaining overrides that do not result from leaving out the refused ones."""
    if not error.wrong or not all("=" in word for word in error.wrong):
        return  # because: the key that an override without `=` was meant for is unknown
    keys = [key_of(word) for word in error.wrong]
    parts = [f"{key}{sign}" for key in keys for sign in (".", " is not set", *(["="] if "." not in key else []))]
    starts = tuple(f"{key}=" for key in keys)
    try:
        compose(cls, error.others, config_dir=config_dir, name=name)
    except (SettingsError, LayoutError) as found:
        for one in found.problems:
            if not one.startswith(starts) and not any(part in one for part in parts):
                yield one


def compose_plain(
    overrides: Sequence[str], *, config_dir: Path | None = None, name: str = "pretrain"
) -> dict[str, Any]:
    """Return the composed tree as plain data, references resolved, types not yet checked.

    Raise SettingsError on wrong overrides, on unresolved references and on keys such as `_target_`.
    """
    # because: hydra takes 0.3 s to import, and most commands compose no config
    from lmtrain.config.source import compose_files

    folders, asked, words, changes = selected(overrides, config_dir=config_dir, name=name)
    tree = compose_files(folders, asked, words)
    problems = [problem for override in changes if (problem := change(tree, override))]
    for path, _ in references.values_of(tree):
        if str(path[-1]).startswith("_") and str(path[-1]).endswith("_"):
            raise SettingsError([f"{references.shown_path(path)} names code, and settings are data only. Remove it."])
    plain, unresolved = references.resolved(tree)
    if problems or unresolved:
        raise SettingsError(problems + unresolved)
    return plain


def selected(
    overrides: Sequence[str], *, config_dir: Path | None, name: str
) -> tuple[list[Path], Asked, list[str], list[Any]]:
    """Return the folders to search, the composition request, the overrides that choose files and those that set values.

    Raise WrongWords if any override is malformed or names an unknown choice.
    """
    # because: hydra is slow to import
    from lmtrain.config.source import Asked

    overrides, folders = [*dict.fromkeys(overrides)], _search_path(config_dir)  # an override typed twice counts once
    roots = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    name = _checked_name(name, roots, folders)
    groups = group_choices(config_dir)
    choices, words, changes, problems, wrong = dict[str, str](), list[str](), list[Any](), list[str](), list[str]()
    for word, override in zip(overrides, parse(overrides, groups), strict=True):
        group, before = override.key_or_group, len(problems)
        if override.is_sweep_override():
            problems.append(several(override))
        elif group in groups:
            choices[group] = str(override.input_line)
            problems += [] if override.is_delete() else _choice_problems(group, override.value(), groups[group])
            words.append(f"~{group}" if override.value() is None else choices[group])
        elif "/" in group:
            hint = spelling_hint(group, groups)
            problems.append(f"{override.input_line} chooses in {group}, which is no group. {hint}")
        else:
            changes.append(override)
        wrong += [word] * (len(problems) > before)
    if problems:
        raise WrongWords(problems, wrong, overrides)
    return folders, Asked(name, roots, groups, choices), words, changes


def sweep(overrides: Sequence[str], *, config_dir: Path | None = None) -> list[list[str]]:
    """Return every combination that `a=1,2 b=range(3)` names, as lists of plain overrides, in order.

    Raise SettingsError if a sweep is empty or unbounded, or if there are more than MAX_RUNS combinations.
    """
    # because: hydra is slow to import
    from hydra.core.override_parser.types import Glob

    groups = group_choices(config_dir)
    options: list[list[str]] = []
    for override in parse(overrides, groups):
        key, value = override.get_key_element(), override.value()
        if not override.is_sweep_override():
            options.append([str(override.input_line)])
        elif isinstance(value, Glob):
            options.append([f"{key}={name}" for name in value.filter(groups.get(override.key_or_group, []))])
        elif override.is_discrete_sweep():
            options.append([f"{key}={one}" for one in islice(override.sweep_string_iterator(), MAX_RUNS + 1)])
        else:
            raise SettingsError([f"{override.input_line} has no end. With -m use a,b,c or range() or glob()."])
        if not options[-1]:
            hint = spelling_hint(override.key_or_group, groups)
            raise SettingsError([f"{override.input_line} names nothing. {hint}"])
    if prod(map(len, options)) > MAX_RUNS:
        keys = [one[0].partition("=")[0] for one in options if len(one) > 1]
        raise SettingsError(
            [f"-m makes more than {MAX_RUNS} runs of the values of {join_few(keys)}. Name fewer of them."]
        )
    return [list(combination) for combination in product(*options)]


def group_choices(config_dir: Path | None = None) -> dict[str, list[str]]:
    """Return every group of conf/ and its choices: `model` -> [gpt2_large, ...]. Used by docs, tests and completion."""
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


def _checked_name(name: str, known: Sequence[str], folders: Sequence[Path]) -> str:
    """Return the name of an existing root config without `.yaml`; raise SettingsError if there is none."""
    if name.removesuffix(".yaml") in known:
        return name.removesuffix(".yaml")
    other = next((folder / f"{name}.yml" for folder in folders if (folder / f"{name}.yml").exists()), None)
    way_out = f"Rename {other} to {name}.yaml." if other else spelling_hint(name, known)
    raise SettingsError([f"--config-name={name} is not in {folders[0]}. {way_out}"])


def _choice_problems(group: str, value: Any, known: Sequence[str]) -> list[str]:
    chosen = value if isinstance(value, list) else [value]
    wrong = [one for one in chosen if one is not None and str(one) not in known]
    return [f"{group}={one} is not in conf/{group}/. {nearest_value(str(one), known)}" for one in wrong]
