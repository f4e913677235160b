"""A line that was typed, in units, and what becomes of it by the ways out that an error holds.

Used by the command line, which parses whole commands into it, and by the Python interface, whose settings are such a
line too. Messages hold the words to type (lmtrain/errors.py marks them); a line alone has the words that were typed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from lmtrain.config.parse_and_apply_overrides import changed_list_entry, override_key
from lmtrain.errors import Way

VALUE_SIGNS = re.compile(r"[\[\]{},:'\"\s]+")  # signs around the entries of a list


@dataclass(frozen=True)
class TypedLine:
    """A typed line in units: `verb` such as ("data", "show"), then one tuple for each option with its value, setting or
    argument; and what is known of the options of its verb.
    """

    verb: tuple[str, ...]
    units: tuple[tuple[str, ...], ...]
    takes_settings: bool
    options: frozenset[str]  # those that the verb has
    flags: frozenset[str] = frozenset()  # options without a value
    repeatable: frozenset[str] = frozenset()  # options that may be typed several times

    @property
    def has_foreign_options(self) -> bool:
        """True if an option was typed that the verb does not have."""
        return any(unit[0].startswith("--") and unit[0].partition("=")[0] not in self.options for unit in self.units)

    @property
    def words(self) -> list[str]:
        return [*self.verb, *(word for unit in self.units for word in unit)]

    def apply(self, way: Way) -> TypedLine:
        """Return the command after this way: what it replaces is removed, and its words stand in the first one's place,
        or at the end.
        """
        if (replaced := self.with_value(way)) is not None:
            return replaced
        groups = self.as_units(way.new)
        new_names = {name for unit in groups if (name := _name(unit)) and name not in self.repeatable}
        # because: a single value has no parts
        parts = tuple(f"{override_key(unit[0])}." for unit in groups if is_setting(unit[0]) and _is_single(unit[0]))
        places = [
            index for index, unit in enumerate(self.units)
            if _name(unit) in new_names or any(_is_named(unit, name) for name in way.old)
            or (is_setting(unit[0]) and _name(unit).startswith(parts))
        ]  # fmt: skip
        kept = [unit for index, unit in enumerate(self.units) if index not in places]
        place = places[0] if places else len(kept)
        return replace(self, units=(*kept[:place], *groups, *kept[place:]))

    def with_value(self, way: Way) -> TypedLine | None:
        """Return the command after a way of one word in place of another that is the value of an option or a setting,
        or of several in place of a value of an option that can be repeated. Return None if the way is another, or there
        is no such value.
        """
        if len(way.new) > 1 and len(way.old) == 1:
            return self._with_values(way)
        if len(way.new) != 1 or len(way.old) != 1:
            return None
        [new], [old] = way.new, way.old
        if any(unit[0] == old or _name(unit) == old for unit in self.units):
            return None
        units = tuple(
            (unit[0], *(new if word == old else word for word in unit[1:])) if len(unit) > 2
            else (*unit[:-1], unit[-1].removesuffix(old) + new) if _value(unit) == old
            else unit
            for unit in self.units
        )  # fmt: skip
        return None if units == self.units else replace(self, units=units)

    def _with_values(self, way: Way) -> TypedLine | None:
        """Return the command with an option for each new word of a way, in place of one with the old word."""
        units = list[tuple[str, ...]]()
        for unit in self.units:
            option, sign, value = unit[0].partition("=")
            is_replaced = option in self.repeatable and way.old == ((value,) if sign else unit[1:])
            new = [(f"{option}={word}",) if sign else (option, word) for word in way.new]
            units += new if is_replaced else [unit]
        return None if len(units) == len(self.units) else replace(self, units=tuple(units))

    def without(self, names: Iterable[str]) -> TypedLine:
        """Return the command without the units that these words, keys or options name."""
        return self.apply(Way((), tuple(names)))

    def as_units(self, words: Sequence[str]) -> list[tuple[str, ...]]:
        """Return words to type in units: an option together with the value that follows it. Words that set an entry of
        a typed list become words that set the list.
        """
        units: list[tuple[str, ...]] = []
        for word in map(self._whole_list, words):
            option = units[-1] if units else ("",)
            takes_value = option[0].startswith("--") and "=" not in option[0] and option[0] not in self.flags
            if takes_value and len(option) == 1 and (option[0] in self.options or not is_setting(word)):
                units[-1] += (word,)
            else:
                units.append((word,))
        return units

    def _whole_list(self, word: str) -> str:
        """Return a word that sets an entry of a list, such as data.datasets[0].weight=1, as one that sets the list."""
        key = word.partition("[")[0]
        typed = [unit[0] for unit in self.units if is_setting(unit[0]) and override_key(unit[0]) == key]
        return changed_list_entry(typed[0], word) if "[" in word.partition("=")[0] and typed else word

    def lost_units(self, before: TypedLine) -> list[tuple[str, ...]]:
        """Return the units of the line `before` that are not in this one any more, neither as a word nor as a value."""
        text = "\0".join(self.words)
        gone = [unit for unit in before.units if unit not in self.units]
        return [
            unit for unit in gone
            # because: another tool's option may have pairs such as pretrained=FOLDER
            if not all(part.rpartition("=")[2] in text for value in _values(unit) for part in VALUE_SIGNS.split(value))
        ]  # fmt: skip


def nearest_first(command: TypedLine, ways: Sequence[Way]) -> list[Way]:
    """Return the ways that are meant: neither only shown nor to be filled in. If the first sets a number in place of a
    typed one, those that set the same key come in the order of their distance from that.
    """
    meant = [way for way in ways if not (way.is_example or way.is_form)]
    if not meant or _distance(command, meant[0]) is None:
        return meant
    key = _name(meant[0].new)
    rivals = [way for way in meant if way.new and _name(way.new) == key and _distance(command, way) is not None]
    rivals.sort(key=lambda way: _distance(command, way) or 0.0)
    return rivals + [way for way in meant if way not in rivals]


def _distance(command: TypedLine, way: Way) -> float | None:
    """Return how far the number that a way sets is from the one that was typed, as a ratio; None if it sets none."""
    new_units = command.as_units(way.new)
    for unit in command.units if len(new_units) == 1 else ():
        if _name(new_units[0]) and _is_named(unit, _name(new_units[0])):
            with suppress(ValueError, ZeroDivisionError):
                typed, new = (abs(float(_value(each))) + 1 for each in (unit, new_units[0]))
                return max(typed / new, new / typed)
    return None


def fits(command: TypedLine, way: Way) -> bool:
    """Return whether the verb of `command` takes the words of `way`, and has what it removes."""
    if command.with_value(way) is not None:
        return True
    units = command.as_units(way.new)
    names = [name for unit in command.units for name in way.old if _is_named(unit, name)]
    is_taken = all(
        command.takes_settings if is_setting(unit[0])
        else _name(unit) in command.options if unit[0].startswith("-")
        else bool(names)  # an argument is only ever typed in place of another
        for unit in units
    )  # fmt: skip
    return is_taken and bool(units or names) and not any("[" in unit[0].partition("=")[0] for unit in units)


def corrects(command: TypedLine, unit: Sequence[str]) -> bool:
    """Return whether a command gives another value to the key or option of `unit`, which was typed. A unit without one,
    an argument, may have any word in its place.
    """
    return not _name(unit) or any(_plain(_name(each)) == _plain(_name(unit)) for each in command.units)


def has_rival(command: TypedLine, unit: Sequence[str]) -> bool:
    """Return whether a command gives the key or option of `unit` once more, perhaps in another spelling."""
    name = _plain(_name(unit))
    return bool(name) and any(_plain(_name(each)) == name and each != unit for each in command.units)


def _plain(name: str) -> str:
    """Return the name of an option or a key as it is without dashes: "--vocab-size" -> "vocab_size"."""
    return name.lstrip("-").replace("-", "_").lower()


def _name(unit: Sequence[str]) -> str:
    """Return the key of a setting or the name of an option; "" for an argument, which replaces nothing by itself."""
    word = unit[0]
    return override_key(word) if is_setting(word) else word.partition("=")[0] if word.startswith("-") else ""


def _is_single(setting: str) -> bool:
    """Return whether a setting such as data.text=FILE gives one value, and neither a mapping nor a group's choice."""
    return "." in override_key(setting) and setting[-1] != "}"


def _is_named(unit: Sequence[str], name: str) -> bool:
    """Return whether `name` is the key, the option or the whole word of a unit."""
    return name in (_name(unit), unit[0], " ".join(unit))


def _value(unit: Sequence[str]) -> str:
    """Return the last value that a unit gives; for a word without one, the word."""
    return _values(unit)[-1]


def _values(unit: Sequence[str]) -> Sequence[str]:
    """Return the values that a unit gives; for a word without one, the word."""
    return unit[1:] or (unit[0].partition("=")[2] or unit[0],)


def is_setting(word: str) -> bool:
    """Return whether a word is one that sets a value, KEY=VALUE, and no option."""
    return "=" in word and not word.startswith("-")
