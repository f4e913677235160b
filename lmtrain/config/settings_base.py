"""The base classes of all settings: frozen, keyword-only dataclasses that check themselves. Torch-free.

Every package declares its settings in a `*_settings.py` file. A package with alternatives (which model? which
optimizer?) derives a base class from `Choice`; each alternative is a subclass with a `kind`. `kinds()` finds the
subclasses in the package or in a package that `--plugin` names, so that no list has to be edited.

Facts about a setting, such as that it is a path, stand beside its field, and `facts_of` finds them by the dotted key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from functools import cache, reduce
from operator import or_
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, Literal, TypedDict, Unpack, get_args, get_origin, get_type_hints

from lmtrain.errors import LayoutProblem, SettingsError, UsageError, own, settings_error, with_own_key

PLUGIN_FILES = ("_settings", "_schedule", "_task")  # endings of torch-free plugin files to import at start-up

Check = tuple[bool, str, str, str]  # True if the value is wrong, the key, the rule, a way out


class Facts(TypedDict, total=False):
    """Facts that hold of a setting whatever its value is. They stand beside the field, or in `field_facts` of its class
    for all fields that do not say otherwise; `facts_of` finds them by the dotted key.
    """

    path: Literal["dataset", "tokenizer", "text", "checkpoint", "folder", "file"]  # it is a path, and this is there
    per_stage: bool  # a training stage may set it for itself
    # what another value changes. "numbers", which holds where this fact is left out: what is learned. "training": the
    # same, but not what a model computes with given weights. "held_out": results of validation, and whether training
    # data is held out for it. "measures": results of validation and evaluation alone. "nothing": no number
    affects: Literal["numbers", "training", "held_out", "measures", "nothing"]
    chosen_at_start: bool  # a start may choose it, by parallel.auto or from the tokenizer; what is learned is the same


def setting(
    *, default: Any = MISSING, default_factory: Any = MISSING, metadata: Mapping[str, Any] = MappingProxyType({}),
    **facts: Unpack[Facts],
) -> Any:  # fmt: skip
    """Return a dataclass field with facts about the setting; the other arguments are those of `dataclasses.field`.

    Usage: `table: str | None = setting(default=None, path="file")`.
    """
    return dataclasses.field(default=default, default_factory=default_factory, metadata={**metadata, "facts": facts})


@dataclass(frozen=True)
class Problem:
    """A wrong setting: its key, its value, the rule that the value breaks, and advice on how to correct it
    (`way_out`).
    """

    key: str
    value: object
    rule: str
    way_out: str
    of_layout: bool = False  # True if each key is right by itself, but together they make an impossible layout

    def text(self) -> str:
        """Return the error message "KEY=VALUE RULE. WAY_OUT"."""
        way_out = with_own_key(f".{self.key}", self.way_out)
        message = f"{self.key}={show(self.value)} {self.rule}. {way_out}"
        return LayoutProblem(message) if self.of_layout else message


@dataclass(frozen=True)
class AdjustedDefault:
    """A default that was changed because it conflicts with settings typed on the command line; `cause` names them as
    `key=value`.
    """

    key: str
    value: object
    previous: object
    cause: str

    def text(self) -> str:
        """Return the message that tells the user about the change."""
        return f"{self.key}={show(self.value)} instead of {show(self.previous)}, to fit {self.cause}."


def show(value: object) -> str:
    """Return a value as a user would type it in an override: None -> "null", True -> "true", [1, 2] -> "[1,2]"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}: {show(item)}' for key, item in value.items())}}}"
    return str(value)


@dataclass(frozen=True, kw_only=True)
class Settings:
    field_facts: ClassVar[Facts] = Facts()

    def __post_init__(self) -> None:
        problems = list(self.problems())
        if problems:
            raise settings_error([p.text() for p in problems])

    def problems(self) -> Iterator[Problem]:
        """Yield the problems within these settings alone; `problems_across` yields those across groups."""
        return iter(())

    def problem_if(self, wrong: bool, key: str, rule: str, way_out: str) -> Iterator[Problem]:
        """Yield a Problem about the field `key` if `wrong` is true. `rule` says what is wrong with its value, `way_out`
        how to correct it.
        """
        value = getattr(self, key)
        return problem_if(wrong, key, list(value) if isinstance(value, tuple) else value, rule, way_out)

    def checked(self, *checks: Check) -> Iterator[Problem]:
        """Yield a Problem for each failed check. A check is a tuple (True if the field is wrong, field name, what is
        wrong, how to correct it).

        Usage: `yield from self.checked((self.x == "", "x", "is empty", "Use y."), ...)`.
        """
        for wrong, key, rule, way_out in checks:
            yield from self.problem_if(wrong, key, rule, way_out)

    def at_least(self, minimum: int, key: str, way_out: str = "") -> Check:
        """Return a check, to pass to `checked`, that the field `key` is `minimum` or more; None passes. `way_out` says
        how to correct the value.
        """
        value = getattr(self, key)
        way_out = way_out or f"Use {own(minimum)} or more."
        return value is not None and value < minimum, key, f"must be at least {minimum}", way_out

    def at_most(self, maximum: int, key: str, way_out: str = "") -> Check:
        """Return a check, an argument for `checked`, that fails if the field `key` is above `maximum`; None passes.
        `way_out` is the sentence that tells the user how to correct the value.
        """
        value = getattr(self, key)
        return (
            value is not None and value > maximum,
            key,
            f"must be at most {maximum}",
            way_out or f"Use {own(maximum)} or less.",
        )

    def above_0(self, key: str, way_out: str) -> Check:
        """Return a check, to pass to `checked`, that the field `key` is a finite number above 0; None passes. `way_out`
        says how to correct the value.
        """
        value = getattr(self, key)
        return value is not None and not 0 < value < float("inf"), key, "must be above 0", way_out

    @classmethod
    def from_older(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return `data`, plain values by key, with the spellings of older versions replaced by today's."""
        return data

    @classmethod
    def problems_across(cls, parts: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield the problems between several settings, each valid by itself. `parts` maps the name of each valid field
        to its value.

        Missing and wrong settings are not in `parts`, so that this check also runs without them.
        """
        return iter(())

    @classmethod
    def adjust_defaults(cls, tree: dict[str, Any], typed_values: Mapping[str, str]) -> list[AdjustedDefault]:
        """Change defaults in `tree`, in place, that conflict with settings typed on the command line, and return the
        changes.

        `tree` has all settings as nested dicts; `typed_values` maps each typed key to its text.
        """
        return []

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as nested dicts and lists, which `build_settings` turns into equal settings. The `kind`
        of a choice is included.
        """
        kind = {"kind": self.kind} if isinstance(self, Choice) else {}
        return kind | {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def digest(self) -> str:
        """Return a hash of all values: 16 hex digits, equal for equal settings."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Return a setting's value with nested settings as dicts and tuples as lists."""
    if isinstance(value, Settings):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


@dataclass(frozen=True, kw_only=True)
class Choice(Settings):
    """Base of settings with alternatives, such as optimizers; each subclass has a `kind`, the name that a config gives.

    `package` is the package to search for subclasses; its files whose names end with `file_ending` are imported.
    """

    package: ClassVar[str]
    file_ending: ClassVar[str] = "_settings"
    kind: ClassVar[str] = ""

    def component(self) -> Any:
        """Import the module that these settings configure: `lmtrain.models.gpt` for `lmtrain.models.gpt_settings`."""
        return importlib.import_module(type(self).__module__.removesuffix("_settings"))


PLUGIN_WAY_OUT = "If it is a plugin's, add --plugin PACKAGE."  # second way out in the message about an unknown kind
plugins: dict[str, list[ModuleType]] = {}  # package named by --plugin -> the package and its imported files


def add_plugin(name: str) -> None:
    """Import the Python package that --plugin names, and those of its modules whose names end with one of PLUGIN_FILES,
    which need no torch. Classes in them become choices that `kinds` finds.

    Raise UsageError if `name` cannot be a package's, or if the import fails. Only the command line names plugins: a
    config file must not decide which code runs.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"--plugin={name} is not the name of a Python package. Give a name as in `import NAME`.")
    try:
        package = importlib.import_module(name)
        inside = [f"{name}.{info.name}" for info in pkgutil.iter_modules(getattr(package, "__path__", ()))]
        plugins[name] = [package, *(importlib.import_module(file) for file in inside if file.endswith(PLUGIN_FILES))]
    except ImportError as error:
        raise UsageError(
            f"--plugin={name} cannot be imported: {error}. Install it, or add its parent folder to PYTHONPATH."
        ) from error


def load_modules(package: str, ending: str = "") -> Iterator[ModuleType]:
    """Import and yield the modules directly in `package` whose names end with `ending`, then the modules of all plugins
    that `add_plugin` imported.
    """
    yield from _package_modules(package, ending)
    for files in plugins.values():
        yield from files


@cache
def _package_modules(package: str, ending: str) -> list[ModuleType]:
    """Import the modules of a package whose names end with `ending`."""
    infos = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return [importlib.import_module(f"{package}.{info.name}") for info in infos if info.name.endswith(ending)]


def kinds(base: type[Choice]) -> dict[str, type[Choice]]:
    """Return a dict that maps the name of each alternative of the choice `base`, such as an optimizer, to its class,
    sorted by name. The classes are subclasses of `base` in its own package and in plugins.

    Raise SettingsError if two classes have the same kind.
    """
    homes = {module.__name__ for module in load_modules(base.package, base.file_ending)}
    classes: dict[str, type[Choice]] = {}
    todo = [base]
    while todo:
        cls = todo.pop()
        todo.extend(cls.__subclasses__())
        if "kind" in vars(cls) and cls.__module__ in homes:
            first = classes.setdefault(cls.kind, cls)
            if first is not cls:
                both = " and ".join(sorted((first.__module__, cls.__module__)))
                raise SettingsError([f"Two classes have kind={cls.kind}, in {both}. Rename the kind of the plugin."])
    return dict(sorted(classes.items()))


def classes_of(base: type[Settings]) -> list[type[Settings]]:
    """Return the classes that settings of `base` can have: its kinds if it is the base of a choice, else `base` alone.
    """
    return [*kinds(base).values()] if issubclass(base, Choice) and not base.kind else [base]


@cache  # because: they are slow to resolve, and a run of hundreds of stages builds each class once for each of them
def type_hints(cls: Any) -> dict[str, Any]:
    """Return the type of each field of a settings class."""
    return get_type_hints(cls)


def facts_of(base: type[Settings], key: str) -> Facts:
    """Return the facts about the setting with the dotted `key`, such as "optim.lr" or "data.datasets[0].path", below
    the settings class `base`; facts that are left out do not hold.

    Facts of the group that holds it count unless the setting's own say otherwise, and those that one kind of a choice
    states count for the settings of that name in all its kinds. For an unknown setting, return the facts of its group.
    """
    name, _, rest = re.sub(r"\[\d+\]", "", key).partition(".")
    owners: list[tuple[Any, dataclasses.Field[Any]]] = [
        (cls, field) for cls in classes_of(base) for field in dataclasses.fields(cls) if field.name == name
    ]
    inner = [
        facts_of(inner, rest.partition(".")[2] if has_names else rest)
        for cls, field in owners
        for inner, has_names in _settings_in(field.metadata.get("group", type_hints(cls)[name]))
    ]  # fmt: skip
    of_fields = [field.metadata.get("facts", {}) for _, field in owners]
    facts: Facts = reduce(or_, [*(cls.field_facts for cls, _ in owners), *of_fields, *inner], base.field_facts)
    return facts


def changes_training(base: type[Settings], key: str) -> bool:
    """Return whether another value of the setting with the dotted `key`, below the settings class `base`, can change
    what is learned: by more than results of validation and evaluation.
    """
    return facts_of(base, key).get("affects") not in ("measures", "nothing")


def _settings_in(hint: Any, in_dict: bool = False) -> Iterator[tuple[type[Settings], bool]]:
    """Yield (settings class, whether it is in a dict, by a name) for each one in the type `hint`."""
    if isinstance(hint, type) and issubclass(hint, Settings):
        yield hint, in_dict
    for inner in get_args(hint):
        yield from _settings_in(inner, in_dict or get_origin(hint) is dict)


def problem_if(wrong: bool, key: str, value: object, rule: str, way_out: str) -> Iterator[Problem]:
    """Yield a Problem about `key` if `wrong` is true. Used for checks across several settings, or if the message shows
    another value than the field's.
    """
    if wrong:
        yield Problem(key, value, rule, way_out)
