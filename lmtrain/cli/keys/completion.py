"""What the shell offers behind TAB: groups, choices, keys and values of overrides, and ids of evaluation tasks.

Called by typer in a process of its own at every TAB, so that it must be quick; what is offered is a text and a few
words of help. bash cuts words at `=` and asks for the rest of a word; zsh and fish ask for all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from lmtrain.cli.keys.settings_reference import Key, Section

Offer = tuple[str, str]  # what would stand there, and its help


def complete_override(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Complete an argument of the form KEY=VALUE."""
    *before, word = _joined([*(ctx.params.get("overrides") or ()), incomplete])
    known = _Known(before, ctx.params.get("config_dir"))
    given = len(word) - len(incomplete) if word.endswith(incomplete) else 0  # by bash, which asks for what follows
    return [(text[given:], words) for text, words in _beginning(word, known.offers(word))]


def complete_group(ctx: typer.Context, incomplete: str) -> list[Offer]:
    return _beginning(incomplete, _Known([], ctx.params.get("config_dir")).group_offers())


def complete_choice(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Complete a choice of the group that was typed before it."""
    known = _Known([], ctx.params.get("config_dir"))
    return _beginning(incomplete, known.choice_offers(str(ctx.params.get("group") or "")))


def complete_key(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Complete the name of a setting, without a value."""
    offers = dict(_Known([], ctx.params.get("config_dir")).name_offers(incomplete))
    names = [name for name in offers if "." in name or f"{name[:-1]}." in offers]  # because: some groups are no part
    return _beginning(incomplete, [(name.removesuffix("="), offers[name]) for name in names])


def complete_task(incomplete: str) -> list[Offer]:
    from lmtrain.eval.task import all_tasks

    return _beginning(incomplete, [(name, f"needs {task.data}") for name, task in all_tasks().items()])


def _beginning(word: str, offers: Iterable[Offer]) -> list[Offer]:
    return [offer for offer in offers if offer[0].startswith(word)]


def _joined(words: list[str]) -> list[str]:
    """Words as they were typed: bash tells `model=gpt_tiny` as three, and `model=` as one."""
    joined: list[str] = []
    for number, word in enumerate(words):
        last = number == len(words) - 1
        if word == "=" and joined:
            joined[-1] += "="
        elif joined and joined[-1].endswith("="):
            joined[-1] += word
        elif last and not word and joined and "=" not in joined[-1]:
            joined[-1] += "="  # because: what lacks a value is not whole, and typer takes the `=` off it
        else:
            joined.append(word)
    return joined


class _Known:
    """What may follow, given the overrides that stand before: `model=llama_1b` decides which keys `model.` has."""

    def __init__(self, before: Iterable[str], config_dir: Path | None) -> None:
        from lmtrain.config.compose import group_choices

        self._groups = group_choices(config_dir if config_dir and config_dir.is_dir() else None)
        self._config_dir = config_dir
        self._chosen = dict(word.lstrip("+").partition("=")[::2] for word in before)

    @cached_property
    def _sections(self) -> dict[str, Section]:
        from lmtrain.cli.keys.settings_reference import sections

        return sections()

    def offers(self, word: str) -> Iterator[Offer]:
        name, equals, _ = word.partition("=")
        if equals:
            yield from self._value_offers(name)
            return
        found = _beginning(word, self.name_offers(word))
        yield from found
        if len(found) == 1 and found[0][0].endswith("="):
            # because: a shell puts a space behind the only offer, and here the value has to follow at once
            yield from self._value_offers(found[0][0][:-1]) or [(f"{found[0][0]}VALUE", "")]

    def name_offers(self, word: str) -> list[Offer]:
        """Return groups and parts of the settings; the keys of a part once it is named or is the only one left."""
        parts = [name for name in self._sections if f"{name}.".startswith(word) or word.startswith(f"{name}.")]
        groups = [(f"{name}=", words) for name, words in self.group_offers() if f"{name}=".startswith(word)]
        if len(parts) == 1 and not groups:
            return list({f"{key.name}=": _short(key.meaning) for key in self._keys(parts[0])}.items())
        return [*groups, *((f"{name}.", f"keys of {name}") for name in parts)]

    def group_offers(self) -> list[Offer]:
        return [(name, f"{len(choices)} to choose from") for name, choices in self._groups.items()]

    def choice_offers(self, group: str) -> list[Offer]:
        from lmtrain.cli.keys.settings_reference import config_file, headline

        return [
            (name, _short(headline(file)))
            for name in self._groups.get(group, ())
            if (file := config_file(group, name, self._config_dir))
        ]

    def _keys(self, part: str) -> list[Key]:
        """Return the keys of a group: those of the chosen kind, or of every kind if the choice is not known."""
        from lmtrain.cli.keys.settings_reference import CommentedFile, config_file, default_choices

        section = self._sections.get(part)
        if section is None:
            return []
        choice = self._chosen.get(part) or ("" if "experiment" in self._chosen else default_choices().get(part, ""))
        file = config_file(part, choice, self._config_dir)
        kind = CommentedFile(file).values.get("kind", "") if file else ""
        return [key for one in ([kind] if kind in section.kinds else list(section.kinds)) for key in section.keys(one)]

    def _value_offers(self, name: str) -> list[Offer]:
        """Return the choices of a group, or a key's default and its values if they are few."""
        if name in self._groups:
            return [(f"{name}={choice}", words) for choice, words in self.choice_offers(name)]
        keys = [key for key in self._keys(name.partition(".")[0]) if key.name == name]
        words = {value: "" for key in keys for value in key.values}
        words |= {key.default: "the default" for key in keys if key.default}
        return [(f"{name}={value}", said) for value, said in words.items()]


def _short(text: str) -> str:
    """Return the first sentence or clause of a text, for the line beside an offer."""
    return re.split(r"[.;:] ", text, maxsplit=1)[0][:70]
