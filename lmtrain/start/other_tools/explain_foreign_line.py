"""Explain a line with another tool's options or settings: what to type instead, and what is changed or left out.

Called for an option that a verb does not have, and for a word KEY=VALUE that is no setting.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import get_origin

from lmtrain.config.compose_run_settings import group_choices
from lmtrain.config.foreign_names import FOREIGN_NAMES
from lmtrain.config.name_suggestions import types_by_key, union_members
from lmtrain.config.parse_and_apply_overrides import override_key
from lmtrain.config.settings_file import FILE_NAMES
from lmtrain.errors import LayoutError, LmtrainError, SettingsError, UsageError, joined, shorten, split_ways, way
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.start.other_tools.foreign_files import FILE_SUFFIXES, file_named, file_words
from lmtrain.start.other_tools.foreign_translation import Translation
from lmtrain.start.other_tools.translate_foreign_flags import translate_options
from lmtrain.start.other_tools.typed_line import TypedLine, is_setting
from lmtrain.train.run_config import RunConfig

KNOWN_NAMES = {name for names in FOREIGN_NAMES.values() for name in names.split()}
# of verbs with words KEY=VALUE of their own
_OWN_WORDS: dict[tuple[str, ...], tuple[str, ...]] = {("plan",): ("hardware", "gpus", "tokens", "parallel")}


def explain_foreign_line(
    name: str, command: TypedLine, foreign: Collection[str], has_option: Callable[[str], object], only: str = ""
) -> tuple[str, tuple[str, ...]] | None:
    """Return the marked error message for the options of another tool in a typed command, and the words that it
    replaces: the settings to type instead are its way out. Return None if lmtrain knows none of the options, or if one
    is no setting whose key begins with `only`. `name` is the command's full name, such as "lmtrain pretrain"; options
    that are not among the `foreign` are left as they are. Words such as n_layer=6 count as options, and are translated
    together with them. `has_option` tells whether a command of lmtrain has an option.
    """
    options = [unit for unit in command.units if unit[0].partition("=")[0] in foreign]
    files = _foreign_files(command)
    units = [*(unit for unit in options if unit not in files), *_foreign_words(command)]
    result, old = _translate(command, units, has_option=has_option)
    is_known = any(option.unit in options for option in result.known) or any(unit in files for unit in options)
    if not is_known or not all(key.startswith(only) for key in result.settings):
        return None
    names = tuple(dict.fromkeys(unit[0].partition("=")[0] for unit in options))
    is_are = "is not an option" if len(names) == 1 else "are not options"
    rule = f"{shorten(', '.join(names))} {is_are} of {name}, whose settings are words without dashes."
    if files:
        rule = f"{_rule_of(files)} {rule}" if set(map(_name_of, files)) != set(names) else _rule_of(files)
    return _message(rule, result, command, old, tells_all=bool(files)), old


def explain_foreign_words(error: LmtrainError, command: TypedLine) -> LmtrainError:
    """Return `error`, which refuses a typed command, with its problems of other tools' settings, such as n_layer=6 or
    those of a file, replaced by what they are here. A problem stays if its word is only called otherwise here.
    """
    if not (isinstance(error, (UsageError, LayoutError)) and command.takes_settings):
        return error
    units, problems = _foreign_words(command), getattr(error, "marked_problems", (error.marked,))
    files = _foreign_files(command)
    if not (units or files):
        return error
    result, old = _translate(command, units, problems)
    if not (result.known or files):
        return error
    keys = [override_key(word) for words in files.values() for word in words] + list(map(override_key, old))
    # because: a setting that is missing may be one of the translated, and another's default may be replaced by one
    keys += result.settings
    is_apart = [" is not set. " not in text and not any(is_about(text, key) for key in keys) for text in problems]
    others = [text for text, is_other in zip(problems, is_apart, strict=True) if is_other]
    rules = [_rule_of(files)] if files else []
    if words := [word for word in old if word not in map(_name_of, files)]:
        is_are = "is not a setting" if len(words) == 1 else "are not settings"
        rules.append(f"{shorten(', '.join(words))} {is_are} of lmtrain.")
    rule = " ".join(rules)
    told = [_message(rule, result, command, old, tells_all=True), *others]
    return joined([SettingsError([text], getattr(error, "subject", "settings")) for text in told])


def _rule_of(files: Collection[tuple[str, ...]]) -> str:
    """Return the sentence on files of another tool's settings that a command names."""
    shown = shorten(", ".join(" ".join(unit) for unit in files))
    is_are = "is a file" if len(files) == 1 else "are files"
    return f"{shown} {is_are} of another tool's settings, and lmtrain reads only its own, from .yaml files."


def _name_of(unit: Sequence[str]) -> str:
    """Return the word that names a unit as what is replaced: the whole of one without a value of its own."""
    return unit[0] if len(unit) == 1 and not unit[0].startswith("-") else unit[0].partition("=")[0]


def _take_out_renamed(
    result: Translation, command: TypedLine, given: Collection[str], problems: Sequence[str] | None
) -> None:
    """Take the words KEY=VALUE of a command out of a translation that keep their value under another key, as an error
    of their own tells it: one of `problems`, or a later one if they are None. Another tool's name of a key that is
    among those `given` stays, as it is left out.
    """
    for option in [option for option in result.known if option.is_word and option.unit in command.units]:
        keys = [key for key, origin in result.origins.items() if origin is option]
        is_noted = any(text.startswith(option.typed) for text in (*result.changed, *result.left_out, *result.refused))
        if len(keys) != 1 or is_noted or (keys[0] in given and option.name in KNOWN_NAMES):
            continue
        is_kept = result.names.suggest_overrides(option.path, option.value)[:1] == [f"{keys[0]}={option.value}"]
        is_told = problems is None or any(text.startswith(f"{option.typed} is not") for text in problems)
        if is_kept and is_told and "," not in option.value:
            result.known.remove(option)
            del result.settings[keys[0]], result.origins[keys[0]]


def is_about(problem: str, key: str) -> bool:
    """Return whether a problem begins with a word KEY=VALUE, or is about a whole word without a value."""
    text = split_ways(problem)[0]
    return re.match(rf"(\S+ line \d+: )?'?{re.escape(key)}(=|' )", text) is not None


def _foreign_words(command: TypedLine) -> list[tuple[str, ...]]:
    """Return the words KEY=VALUE of a command that takes settings whose keys are none."""
    own = _OWN_WORDS.get(command.verb, ())
    return [
        unit for unit in command.units
        if is_setting(unit[0]) and not is_own_key(key := override_key(unit[0])) and key.partition(".")[0] not in own
        and not (own and key.startswith("hardware_"))
        and not (key in FILE_NAMES.split() and unit[0].endswith(FILE_SUFFIXES))
    ]  # fmt: skip


def _foreign_files(command: TypedLine) -> dict[tuple[str, ...], list[str]]:
    """Return, for each unit of a command that names a file of another tool's settings, these as words KEY=VALUE. A file
    of lmtrain's own settings is none.
    """
    read = {unit: file_words(file) for unit in command.units if (file := file_named(unit))}
    return {
        unit: words for unit, words in read.items()
        if words and not (unit[0].endswith((".yaml", ".yml")) and all(is_own_key(override_key(word)) for word in words))
    }  # fmt: skip


@cache
def _own_keys() -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the keys of all settings, the groups, and what stands before keys of one's own, as stages.NAME."""
    types = types_by_key(RunConfig)
    groups = {part for key in (*types, *group_choices()) for part in accumulate(key.split("."), "{}.{}".format)}
    free = {key for key, hint in types.items() if any(get_origin(option) is dict for option in union_members(hint))}
    return frozenset(types), frozenset(groups), frozenset(free)


def is_own_key(key: str) -> bool:
    """Return whether a key is one of lmtrain's settings, a group of them, or an entry of one that has names of its own.
    """
    types, groups, free = _own_keys()
    is_within = any(key.startswith((f"{each}.", f"{each}[")) for each in (*free, "hardware", "hydra"))
    is_entry = key.partition("[")[0] in types or key.rpartition(".")[0] in types
    return key in groups or is_within or is_entry or not re.fullmatch(r"[A-Za-z_][\w.-]*", key) or key.endswith(".kind")


def _translate(
    command: TypedLine, units: Sequence[tuple[str, ...]], problems: Sequence[str] | None = None,
    has_option: Callable[[str], object] = lambda option: False,
) -> tuple[Translation, tuple[str, ...]]:  # fmt: skip
    """Translate units of a command. Return the result and the words that it replaces. `problems` are those that are
    told of the command otherwise, if they are known. `has_option` tells whether a command of lmtrain has an option.
    """
    scripts = [unit[0] for unit in command.units if len(unit) == 1 and unit[0].endswith(".py") and "=" not in unit[0]]
    files = _foreign_files(command)
    of_files = [word for words in files.values() for word in words]
    own = {override_key(word): word for word in of_files if is_own_key(override_key(word))}
    given = own | {
        override_key(unit[0]): unit[0] for unit in command.units if is_setting(unit[0]) and unit not in units
    }  # fmt: skip
    units = [*((word,) for word in of_files if word not in own.values()), *units]
    counts_as = "gpus" if command.verb == ("plan",) else ""
    is_sweep = any(unit[0] in ("-m", "--multirun", "--array") for unit in command.units)
    result = translate_options(
        units, [*given.values()], counts_as, _typed_run(command), is_sweep=is_sweep, has_option=has_option,
        takes_variables="--env" in command.options,
    )  # fmt: skip
    _take_out_renamed(result, command, given, problems)
    no_program = "lmtrain reads no settings from a program; give them as KEY=VALUE."
    result.left_out += [f"{script}: {no_program}" for script in scripts]
    for key in given.keys() & result.settings.keys():  # because: what is typed in lmtrain's own words counts
        typed = result.origins[key].typed if key in result.origins else f"{key}={result.settings[key]}"
        result.left_out.append(f"{typed}: {given[key]} is given.")
        del result.settings[key]
    typed_keys = {override_key(unit[0]) for unit in command.units}
    result.options += [word for key, word in own.items() if key not in typed_keys]
    told = (*result.known, *result.unknown)
    names = [_name_of(option.unit) for option in told]
    replaced = {*names, *map(_name_of, files)}
    return result, (*(name for name in dict.fromkeys(map(_name_of, command.units)) if name in replaced), *scripts)


def _message(
    rule: str, result: Translation, command: TypedLine, old: Sequence[str], *, tells_all: bool = False
) -> str:
    """Return the marked message that begins with `rule`. With `tells_all` it names also what is only called otherwise.
    """
    words = [*(f"{key}={value}" for key, value in result.settings.items()), *result.options]
    words += _process_words(result, command)
    if tells_all or result.refused:
        result.changed += _renamed(result)
    left_out = [*result.left_out, *(f"{each.typed} has no counterpart that lmtrain knows." for each in result.unknown)]
    parts = [("Changed", result.changed), ("Left out", left_out), ("Not translated", result.refused)]
    notes = "\n".join("\n  ".join([f"{title}:", *part]) for title, part in parts if part)
    return f"{rule}{f' {notes}' if notes else ''}{'' if result.refused else way(*words, instead_of=old, shown='')}"


def _renamed(result: Translation) -> list[str]:
    """Return a sentence on each option that only has another name here."""
    return [
        f"{option.typed} is {key}={result.settings[key]} here." for key, option in result.origins.items()
        if key in result.settings
        and not any(text.startswith((f"{option.typed} is ", f"{option.typed}: ")) and " too, " not in text
                    for text in result.changed)
    ]  # fmt: skip


def _typed_run(command: TypedLine) -> str | None:
    """Return the run typed for --from-run, "" if none is; None if the verb has no such option."""
    if "--from-run" not in command.options:
        return None
    units = [unit for unit in command.units if unit[0].partition("=")[0] == "--from-run"]
    return (units[-1][0].partition("=")[2] or units[-1][-1]) if units else ""


def _process_words(result: Translation, command: TypedLine) -> list[str]:
    """Return the words that start as many processes as another tool's options did, or note that the verb starts none.
    """
    if "--nproc" in command.options:
        is_typed = any(unit[0].partition("=")[0] in ("--nproc", "--nproc-per-node") for unit in command.units)
        count = result.processes or (
            _layout_process_count(result.settings) if ProcessEnv.detect().world_size == 1 else ""
        )
        return ["--nproc", count] if count and not is_typed else []
    option = result.counted_by
    if option is not None and not any(text.startswith(f"{option.typed} is ") for text in result.changed):
        result.left_out.append(f"{option.typed}: The number of processes follows from the layout.")
    return []


def _layout_process_count(settings: Mapping[str, str]) -> str:
    """Return, as text, the product of parallel.tp, pp, dp_replicate and dp_shard in these settings (1 where not set):
    the number of processes. Return "" if it is 1, or if a size is not a whole number.
    """
    sizes = [settings.get(f"parallel.{axis}", "1") for axis in ("tp", "pp", "dp_replicate", "dp_shard")]
    count = math.prod(int(size) if size.isdecimal() else 0 for size in sizes)
    return str(count) if count > 1 else ""
