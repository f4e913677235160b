"""Shell completion of overrides (groups, choices, keys and values) and of the ids of evaluation tasks.

typer calls it in a new process at every TAB, so it must be quick. A completion is a text and a few words of help. bash
splits words at `=` and asks for the rest of a word; zsh and fish ask for the whole word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from lmtrain.start.describe_all_settings import Key, Section

Completion = tuple[str, str]  # the completed text, and its help


def complete_override(ctx: typer.Context, incomplete: str) -> list[Completion]:
    """Return completions of an override KEY=VALUE for typer; `incomplete` is what the user has typed of it."""
    *overrides, word = _rejoin_words([*(ctx.params.get("overrides") or ()), incomplete])
    completer = _Completer(overrides, ctx.params.get("config_dir"))
    # because: bash asks only for the part of the word after `=`
    already_typed = len(word) - len(incomplete) if word.endswith(incomplete) else 0
    completions = _with_prefix(word, completer.completions(word))
    return [(completed[already_typed:], help_text) for completed, help_text in completions]


def complete_group(ctx: typer.Context, incomplete: str) -> list[Completion]:
    """Return the names of config groups that begin with `incomplete`, for typer."""
    return _with_prefix(incomplete, _Completer([], ctx.params.get("config_dir")).group_completions())


def complete_choice(ctx: typer.Context, incomplete: str) -> list[Completion]:
    """Return the choices, of the config group typed before, that begin with `incomplete`, for typer."""
    completer = _Completer([], ctx.params.get("config_dir"))
    return _with_prefix(incomplete, completer.choice_completions(str(ctx.params.get("group") or "")))


def complete_key(ctx: typer.Context, incomplete: str) -> list[Completion]:
    """Return the names of settings (without values) that begin with `incomplete`, for typer."""
    completions = dict(_Completer([], ctx.params.get("config_dir")).name_completions(incomplete))
    # because: some groups, such as experiment, are not sections of the settings
    names = [name for name in completions if "." in name or f"{name[:-1]}." in completions]
    return _with_prefix(incomplete, [(name.removesuffix("="), completions[name]) for name in names])


def complete_task(incomplete: str) -> list[Completion]:
    """Return the ids of evaluation tasks that begin with `incomplete`, for typer."""
    from lmtrain.eval.task import all_tasks

    return _with_prefix(incomplete, [(name, f"needs {task.data}") for name, task in all_tasks().items()])


def _with_prefix(prefix: str, completions: Iterable[Completion]) -> list[Completion]:
    """Return the completions whose text begins with `prefix`."""
    return [completion for completion in completions if completion[0].startswith(prefix)]


def _rejoin_words(words: list[str]) -> list[str]:
    """Return a command line's words with every KEY=VALUE as one word. Bash passes `model=gpt_tiny` to a completion
    function as three words, and typer drops the `=` of a last word that has no value yet.
    """
    joined: list[str] = []
    for number, word in enumerate(words):
        last = number == len(words) - 1
        if word == "=" and joined:
            joined[-1] += "="
        elif joined and joined[-1].endswith("="):
            joined[-1] += word
        elif last and not word and joined and "=" not in joined[-1]:
            joined[-1] += "="  # because: typer removes the `=` of a word without a value
        else:
            joined.append(word)
    return joined


class _Completer:
    """Finds completions, given the overrides typed before: `model=llama_1b` decides which keys `model.` has."""

    def __init__(self, overrides: Iterable[str], config_dir: Path | None) -> None:
        from lmtrain.config.compose_run_settings import group_choices

        self._groups = group_choices(config_dir if config_dir and config_dir.is_dir() else None)
        self._config_dir = config_dir
        self._chosen = dict(word.lstrip("+").partition("=")[::2] for word in overrides)

    @cached_property
    def _sections(self) -> dict[str, Section]:
        from lmtrain.start.describe_all_settings import settings_sections

        return settings_sections()

    def completions(self, word: str) -> Iterator[Completion]:
        """Yield the completions of `word`, a partly typed override KEY=VALUE: keys until it has a `=`, after that
        values.
        """
        name, equals, _ = word.partition("=")
        if equals:
            yield from self._value_completions(name)
            return
        names = _with_prefix(word, self.name_completions(word))
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
        from lmtrain.config.compose_run_settings import STAGE_CHOICES, STAGE_GROUP
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
        from lmtrain.config.compose_run_settings import config_file
        from lmtrain.start.describe_all_settings import config_headline

        return [
            (name, _first_clause(config_headline(file)))
            for name in self._groups.get(group, ())
            if (file := config_file(group, name, self._config_dir))
        ]

    def _keys(self, section_name: str) -> list[Key]:
        """Return the Key entries of a settings section, such as "optim", of the kind that the command line or the
        defaults choose. If that choice is not known, return those of all kinds; return [] for an unknown section.
        """
        from lmtrain.config.compose_run_settings import config_file
        from lmtrain.start.describe_all_settings import CommentedFile, default_choices

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
        from lmtrain.config.compose_run_settings import STAGE_GROUP

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
