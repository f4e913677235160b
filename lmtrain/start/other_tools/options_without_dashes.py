"""Explain options of a verb that are typed like settings, without dashes: dry_run=true, gpus_per_node=1, or dry-run.

Called by find_accepted_line for verbs whose arguments are settings; for other verbs, explain_verb_options finds them.
"""

from __future__ import annotations

import re

from lmtrain.config.parse_and_apply_overrides import override_key
from lmtrain.errors import LmtrainError, SettingsError, joined, leave_out, split_ways, way
from lmtrain.start.other_tools.explain_foreign_line import explain_foreign_words, is_about, is_own_key
from lmtrain.start.other_tools.foreign_options import FALSE
from lmtrain.start.other_tools.typed_line import TypedLine, is_setting

_TASKS = re.compile(r"[\d,-]*\d(%\d+)?|%\d+")  # of a Slurm array, as in --array 0-3%2


def explain_words(error: LmtrainError, command: TypedLine) -> LmtrainError:
    """Return `error`, which refuses a typed command, with its problems of words that are options of the verb without
    their dashes, or settings of other tools, replaced by what to type.
    """
    words = {unit[0]: new for unit in command.units if len(unit) == 1 and (new := _as_option(unit[0], command))}
    if not words:
        return explain_foreign_words(error, command)
    problems = getattr(error, "marked_problems", (error.marked,))
    given = {way.new[0] for new in words.values() for way in split_ways(new)[1] if way.new}
    rest = [
        text for text in problems
        # because: what is missing may be the option that is typed without dashes
        if not any(is_about(text, override_key(word)) for word in words)
        and given.isdisjoint(word for way in split_ways(text)[1] for word in way.new[:1])
    ]  # fmt: skip
    told = [SettingsError([f"{word} is not a setting. {new}"], "things") for word, new in words.items()]
    if not rest:
        return joined(told)
    others = SettingsError(rest, getattr(error, "subject", "things"))
    return joined([*told, explain_foreign_words(others, command.without(words))])


def _as_option(word: str, command: TypedLine) -> str:
    """Return the marked advice for a word that is an option of the command's verb without its dashes; "" if it is none.
    """
    name, _, value = word.replace("==", "=", 1).partition("=")
    if _TASKS.fullmatch(word) and "--array-tasks" in command.options:
        return f"Did you mean {way('--array', '--array-tasks', word, instead_of=('--array', word))}?"
    option = f"--{name.lower().replace('_', '-')}"
    if not command.takes_settings or option not in command.options or word.startswith("-") or is_own_key(name):
        return ""
    if option in command.flags:
        is_off = value.lower() in FALSE
        return f"{leave_out(word)}." if is_off else f"Did you mean {way(option, instead_of=word)}?"
    return f"Did you mean {way(option, value, instead_of=word)}?" if is_setting(word) and value else ""
