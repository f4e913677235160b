"""Explain a command line with another tool's options: the settings to type instead, and what is changed or left out.

Called by explain_click_errors if a verb does not have an option.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping

from lmtrain.cli.settings_keys.apply_advice import Command, is_setting
from lmtrain.cli.settings_keys.explain_verb_options import explain_by_verb
from lmtrain.cli.settings_keys.foreign_translation import Translation
from lmtrain.cli.settings_keys.translate_foreign_flags import translate_options
from lmtrain.config.foreign_names import FOREIGN_NAMES, UNSUPPORTED_SETTINGS
from lmtrain.config.parse_and_apply_overrides import override_key
from lmtrain.errors import shorten, way
from lmtrain.runtime.processes.process_environment import ProcessEnv

_KNOWN_NAMES = {*UNSUPPORTED_SETTINGS, *(name for names in FOREIGN_NAMES.values() for name in names.split())}


def explain_foreign_line(
    name: str, command: Command, own_options: Collection[str], only: str = ""
) -> tuple[str, tuple[str, ...]] | None:
    """Return the marked error message for the options of another tool in a typed command, and the words that it
    replaces: the settings to type instead are its way out. Return None if lmtrain knows none of the options, or if one
    is no setting whose key begins with `only`. `name` is the command's full name, such as "lmtrain pretrain"; options
    similar to its `own_options` are left as they are.
    """
    units = [unit for unit in command.units if is_foreign(unit[0].partition("=")[0], command, own_options)]
    scripts = [unit[0] for unit in command.units if len(unit) == 1 and unit[0].endswith(".py") and "=" not in unit[0]]
    given = {override_key(unit[0]): unit[0] for unit in command.units if is_setting(unit[0])}
    counts_as = "gpus" if command.verb == ("plan",) else ""
    result = translate_options(units, [*given.values()], counts_as, _typed_run(command))
    if len(result.unknown) == len(units) or not all(key.startswith(only) for key in result.settings):
        return None
    result.left_out += [f"{option.typed} has no counterpart that lmtrain knows." for option in result.unknown]
    no_program = "lmtrain reads no settings from a program; give them as KEY=VALUE."
    result.left_out += [f"{script}: {no_program}" for script in scripts]
    for key in given.keys() & result.settings.keys():  # because: what is typed in lmtrain's own words counts
        typed = result.origins[key].typed if key in result.origins else f"{key}={result.settings[key]}"
        result.left_out.append(f"{typed}: {given[key]} is given.")
        del result.settings[key]
    settings = (f"{key}={value}" for key, value in result.settings.items())
    words = [*settings, *result.options, *_process_words(result, command)]
    options = tuple(dict.fromkeys(unit[0].partition("=")[0] for unit in units))
    old = (*options, *scripts)
    is_are = "is not an option" if len(options) == 1 else "are not options"
    rule = f"{shorten(', '.join(options))} {is_are} of {name}, whose settings are words without dashes."
    parts = [("Changed", result.changed), ("Left out", result.left_out), ("Not translated", result.refused)]
    notes = "\n".join("\n  ".join([f"{title}:", *part]) for title, part in parts if part)
    advice = "" if result.refused else way(*words, instead_of=old, shown="")
    return f"{rule}{f' {notes}' if notes else ''}{advice}", old


def _typed_run(command: Command) -> str | None:
    """Return the run typed for --from-run, "" if none is; None if the verb has no such option."""
    if "--from-run" not in command.options:
        return None
    units = [unit for unit in command.units if unit[0].partition("=")[0] == "--from-run"]
    return (units[-1][0].partition("=")[2] or units[-1][-1]) if units else ""


def _process_words(result: Translation, command: Command) -> list[str]:
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


def is_foreign(option: str, command: Command, own_options: Collection[str]) -> bool:
    """Return whether a word is an option that the verb has not: another tool's name of a setting, or no misspelling of
    an option that the verb has.
    """
    spelt = option.lower().replace("_", "-")
    if not option.startswith("--") or len(option) == 2 or option in command.options or spelt in own_options:
        return False
    if explain_by_verb(option, command) is not None:
        return False
    is_known = spelt.rpartition(".")[2].lstrip("-").replace("-", "_") in _KNOWN_NAMES
    return is_known or not difflib.get_close_matches(option, own_options, n=1, cutoff=0.8)


def _layout_process_count(settings: Mapping[str, str]) -> str:
    """Return, as text, the product of parallel.tp, pp, dp_replicate and dp_shard in these settings (1 where not set):
    the number of processes. Return "" if it is 1, or if a size is not a whole number.
    """
    sizes = [settings.get(f"parallel.{axis}", "1") for axis in ("tp", "pp", "dp_replicate", "dp_shard")]
    count = math.prod(int(size) if size.isdecimal() else 0 for size in sizes)
    return str(count) if count > 1 else ""
