"""What another tool's options become: the classes that translate_foreign_flags and reckon_foreign_values fill in."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from lmtrain.config.compose_run_settings import compose_plain, group_choices
from lmtrain.config.name_suggestions import SettingNames
from lmtrain.errors import LmtrainError, shell_quoted, shorten
from lmtrain.start.other_tools import foreign_options as tables
from lmtrain.train.run_config import RunConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """An option of another tool with its values, or a word KEY=VALUE with such a key, as typed."""

    unit: tuple[str, ...]
    meant: str = ""  # the option in snake case, if it was typed with another spelling

    @property
    def is_word(self) -> bool:
        """True for a word KEY=VALUE without dashes."""
        return not self.unit[0].startswith("-")

    @cached_property
    def typed(self) -> str:
        """The option and its values as a person typed them."""
        return shorten(" ".join(map(shell_quoted, self.unit)))

    @cached_property
    def path(self) -> str:
        """The option in snake case without dashes, such as "training.steps"."""
        return self.meant or self.unit[0].partition("=")[0].lstrip("-").lower().replace("-", "_")

    @property
    def name(self) -> str:
        """The last part of a dotted option."""
        return self.path.rpartition(".")[2]

    @cached_property
    def values(self) -> tuple[str, ...]:
        sign, value = self.unit[0].partition("=")[1:]
        return tuple(_without_quotes(each.strip()) for each in ((value, *self.unit[1:]) if sign else self.unit[1:]))

    @property
    def value(self) -> str:
        return " ".join(self.values)

    @property
    def is_off(self) -> bool:
        return self.value.lower() in tables.FALSE

    @property
    def is_on(self) -> bool:
        return self.value.lower() in ("", *tables.TRUE)

    def within(self, table: Mapping[str, T]) -> T | None:
        """Return the entry of a table for the option's whole path, or else for its last part."""
        return table.get(self.path) or table.get(self.name)


    def with_value(self, value: str) -> Option:
        """Return the option with this as its one value."""
        return Option((f"{self.unit[0].partition('=')[0]}={value}",))


def _without_quotes(value: str) -> str:
    """Return a value without the quotes that a shell would have taken away."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _key_of_data(key: str, path: str) -> str:
    """Return the key under which lmtrain reads what is at a path, instead of data.text or data.path if the other is
    meant: a dataset is no text, and a file no dataset.
    """
    is_dataset = os.path.exists(f"{path}.idx")
    if key == "data.text" and is_dataset and not os.path.exists(path):
        return "data.path"
    return "data.text" if key == "data.path" and os.path.isfile(path) and not is_dataset else key


@dataclass
class Translation:
    """Another tool's options in terms of lmtrain: settings, the number of processes, and sentences on what was changed,
    left out or is unknown. `typed_settings` are the settings of lmtrain in the same command.
    """

    has_option: Callable[[str], object]  # whether a command of lmtrain has an option
    typed_settings: Sequence[str] = ()
    counts_as: str = ""  # the verb's own key for the number of processes, such as "gpus" of a plan
    from_run: str | None = None  # the run typed for --from-run; "" if none is, None if the verb has no such option
    takes_variables: bool = False  # True if the verb has an option --env
    options: list[str] = field(default_factory=list)  # options of lmtrain and their values
    settings: dict[str, str] = field(default_factory=dict)
    processes: str = ""
    counted_by: Option | None = None  # the option that gave the number of processes
    changed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    unknown: list[Option] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # what a training run cannot do
    origins: dict[str, Option] = field(default_factory=dict)  # key -> the option that set it
    later: list[Option] = field(default_factory=list)  # options that depend on settings
    known: list[Option] = field(default_factory=list)  # options of which something is known
    all_names: set[str] = field(default_factory=set)  # of the options, without the parts before a dot

    @cached_property
    def names(self) -> SettingNames:
        return SettingNames(RunConfig, group_choices())

    def set(self, option: Option, overrides: str, *, is_as_typed: bool = False) -> bool:
        """Add overrides KEY=VALUE, separated by blanks. The first replaces an earlier value of its key, the others are
        defaults that other options may set. Note what the option became, unless its value `is_as_typed`.
        """
        first, *others = overrides.split() if not is_as_typed else [overrides]
        key, _, value = first.partition("=")
        key = _key_of_data(key, value)
        if (earlier := self.origins.get(key)) and self.settings.get(key) not in (None, value):
            self.left_out.append(f"{earlier.typed}: {option.typed} sets {key} too.")
        self.settings[key], self.origins[key] = value, option
        if more := tables.MEANS_MORE.get(option.name):
            self.changed.append(f"{option.typed}: {more}")
        added = [word for word in others if word.partition("=")[0] not in self.settings]
        self.settings |= {word.partition("=")[0]: word.partition("=")[2] for word in added}
        if not is_as_typed:
            self.changed.append(f"{option.typed} is {' '.join([first, *added])} here.")
        return True

    def omit(self, option: Option, why: str) -> bool:
        self.left_out.append(f"{option.typed}: {why}")
        return True

    def value_of(self, key: str) -> Any:
        """Return the value of a setting: translated, typed, or the default of the chosen configs; None if unknown."""
        if key in self.settings:
            return self.settings[key]
        node: Any = self._composed
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    @cached_property
    def _composed(self) -> dict[str, Any]:
        """The settings of the command as far as they are translated, not checked."""
        words = [f"{key}={value}" for key, value in self.settings.items()]
        own = [word for word in self.typed_settings if word.partition("=")[0] not in self.settings]
        for candidate in ([*own, *words], words, own, []):
            with suppress(LmtrainError):
                return compose_plain(candidate)
        return {}
