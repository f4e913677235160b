"""Complete a partly typed setting: groups, choices, keys and values. A completion is a text and a few words of help.

Called by shell completion, in a new process at every TAB, so it must be quick.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from lmtrain.config.compose_run_settings import STAGE_CHOICES, STAGE_GROUP, config_file, group_choices
from lmtrain.start.explain.describe_all_settings import (
    CommentedFile,
    Key,
    Section,
    config_headline,
    default_choices,
    settings_sections,
)

Completion = tuple[str, str]  # the completed text, and its help


class SettingsCompleter:
    """Finds completions, given the overrides typed before: `model=llama_1b` decides which keys `model.` has."""

    def __init__(self, overrides: Iterable[str], config_dir: Path | None) -> None:
        self._groups = group_choices(config_dir if config_dir and config_dir.is_dir() else None)
        self._config_dir = config_dir
        self._chosen = dict(word.lstrip("+").partition("=")[::2] for word in overrides)

    @cached_property
    def _sections(self) -> dict[str, Section]:
        return settings_sections()

    def completions(self, word: str) -> Iterator[Completion]:
        """Yield the completions of `word`, a partly typed override KEY=VALUE: keys until it has a `=`, after that
        values.
        """
        name, equals, _ = word.partition("=")
        if equals:
            yield from self._value_completions(name)
            return
        names = [each for each in self.name_completions(word) if each[0].startswith(word)]
        yield from names
        if len(names) == 1 and names[0][0].endswith("="):
            # because: a shell adds a space after a single completion, but here the value has to follow directly
            yield from self._value_completions(names[0][0][:-1]) or [(f"{names[0][0]}VALUE", "")]

    def name_completions(self, word: str) -> list[Completion]:
        """Return the completions of `word`, a partly typed name of a setting: the config groups ("model=") and sections
        ("train.") that begin with it. If only one section and no group matches, return the section's keys instead.
        """
        if word.startswith("stages."):
            return self._stage_completions(word)
        parts = [name for name in self._sections if f"{name}.".startswith(word) or word.startswith(f"{name}.")]
        groups = [(f"{name}=", words) for name, words in self.group_completions() if f"{name}=".startswith(word)]
        groups = [group for group in groups if group[0] != "stage="]  # because: it is chosen as stages.NAME=CHOICE
        if parts == ["stages"]:
            return self._stage_completions("stages.")
        if len(parts) == 1 and not groups:
            return list({f"{key.name}=": _first_clause(key.meaning) for key in self._keys(parts[0])}.items())
        return [*groups, *((f"{name}.", f"keys of {name}") for name in parts)]

    def _stage_completions(self, word: str) -> list[Completion]:
        """Return the completions of `word`, which begins with "stages.": the stages named earlier on the command line
        and the files of conf/stage. If `word` has already named a stage, as in "stages.decay.", return the keys that a
        stage can set.
        """
        from lmtrain.train.run_stage_settings import GROUPS, stage_may_set

        _, name, *rest = word.split(".")
        if not rest:
            typed = dict.fromkeys(key.split(".")[1] for key in self._chosen if key.startswith("stages."))
            choices = [(f"stages.{choice}={choice}", help_text) for choice, help_text in
                       self.choice_completions(STAGE_GROUP) if choice not in typed]  # fmt: skip
            return [*((f"stages.{name}.", f"keys of the stage {name}") for name in typed), *choices]
        prefix = f"stages.{name}"
        found = {
            f"{prefix}.{key.name.rpartition('.')[2]}=": _first_clause(key.meaning)
            for key in self._keys("stages") if key.types != "settings"
        }  # fmt: skip
        found |= {f"{prefix}.{group}=": f"{len(self._groups[group])} to choose from" for group in STAGE_CHOICES}
        keys = [key for group in GROUPS for key in self._keys(group) if stage_may_set(key.name)]
        return list((found | {f"{prefix}.{key.name}=": _first_clause(key.meaning) for key in keys}).items())

    def group_completions(self) -> list[Completion]:
        """Return all groups, with the number of their choices."""
        return [(name, f"{len(choices)} to choose from") for name, choices in self._groups.items()]

    def choice_completions(self, group: str) -> list[Completion]:
        """Return the names of the files of a config group, such as "model", each with a short description; [] for an
        unknown group.
        """
        return [
            (name, _first_clause(config_headline(file)))
            for name in self._groups.get(group, ())
            if (file := config_file(group, name, self._config_dir))
        ]

    def _keys(self, section_name: str) -> list[Key]:
        """Return the Key entries of a settings section, such as "optim", of the kind that the command line or the
        defaults choose. If that choice is not known, return those of all kinds; return [] for an unknown section.
        """
        section = self._sections.get(section_name)
        if section is None:
            return []
        default = "" if "experiment" in self._chosen else default_choices().get(section_name, "")
        file = config_file(section_name, self._chosen.get(section_name) or default, self._config_dir)
        kind = CommentedFile(file).values.get("kind", "") if file else ""
        return [
            key for each_kind in ([kind] if kind in section.kinds else section.kinds) for key in section.keys(each_kind)
        ]

    def _value_completions(self, name: str) -> list[Completion]:
        """Return completions `name=value` for the value of a setting. If `name` is a config group, the values are its
        choices; if it is a key, its default, and its allowed values if these are a finite list. A stage's group or key
        is looked up without "stages.NAME.".
        """
        key_name, group = name, name
        if name.startswith("stages.") and len(parts := name.split(".", 2)) >= 2:
            key_name = parts[2] if len(parts) > 2 else ""
            group = key_name or STAGE_GROUP
        if group in self._groups:
            return [(f"{name}={choice}", words) for choice, words in self.choice_completions(group)]
        section = "stages" if key_name and "." not in key_name else key_name.partition(".")[0]
        keys = [key for key in self._keys(section) if key.name in (key_name, f"stages.NAME.{key_name}")]
        words = {value: "" for key in keys for value in key.values}
        words |= {key.default: "the default" for key in keys if key.default}
        return [(f"{name}={value}", help_text) for value, help_text in words.items()]


def _first_clause(text: str) -> str:
    """Return the first sentence or clause of a text, cut to 70 characters, as help beside a completion."""
    return re.split(r"[.;:] ", text, maxsplit=1)[0][:70]
