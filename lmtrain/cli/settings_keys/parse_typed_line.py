"""Parse a typed command line into units, by the options that its verb has, and apply the advice of an error to it.

Called when a line is corrected, by find_accepted_line and explain_click_errors. Of click, this takes which options a
verb has; what a line in units becomes by a piece of advice is in lmtrain/start/other_tools/typed_line.py.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from lmtrain.cli.subcommands import HELP, build_verb, can_be_value, parameter_types, value_placeholder
from lmtrain.errors import LmtrainError
from lmtrain.start.other_tools.typed_line import TypedLine, fits, nearest_first

_COMMON_OPTIONS = frozenset(("--help", "-h", "--debug"))
_PAIR_OPTIONS = frozenset(  # other tools'; their values have a =
    ("--model-args", "-a", "--gen-kwargs", "--wandb-args", "--wandb-config-args", "--trackio-args", "--hf-hub-log-args",
     "--filter")
)
_LIST_OPTIONS = ("--json-keys", "--jsonl-keys", "--keys")  # other tools'; all words that follow are values


def parse_line(argv: Sequence[str]) -> TypedLine:
    """Split a command line without the program's name into units, by the options that its verb has. An option that
    it lacks is taken together with the value that follows, or with all of them if the verb's only arguments are
    settings.
    """
    command, verb = command_of(argv)
    params = command.params if command is not None else []
    names = {name: param for param in params for name in (*param.opts, *param.secondary_opts)}
    arguments = [param.name for param in params if param.param_type_name == "argument"]
    units, words = list[tuple[str, ...]](), list(argv[len(verb) :])
    while words:
        word = words.pop(0)
        num_values = 0
        if param := names.get(word) if word.startswith("-") else None:
            is_given = words and can_be_value(words[0], param, names, "overrides" in arguments)
            num_values = 0 if getattr(param, "is_flag", False) or not is_given else param.nargs
        elif word.startswith("-") and "=" not in word and word not in ("-", "--", *_COMMON_OPTIONS):
            most = len(words) if arguments == ["overrides"] else 1
            num_values = next((i for i, value in enumerate(words) if i == most or not _is_value(value)), len(words))
            if word.replace("_", "-") in _LIST_OPTIONS:
                is_key = [_is_value(value) and not os.path.lexists(value) for value in words]
                num_values = max(num_values, [*is_key, False].index(False))
            if word.replace("_", "-") in _PAIR_OPTIONS and words and not words[0].startswith("-"):
                num_values = 1
        units.append((word, *words[:num_values]))
        del words[:num_values]
    options = {name: param for name, param in names.items() if name.startswith("-")}
    flags = {name for name, param in options.items() if getattr(param, "is_flag", False)}
    return TypedLine(
        tuple(verb), tuple(units), not {"overrides", "layout"}.isdisjoint(arguments),
        _COMMON_OPTIONS.union(options or ["--version"]), _COMMON_OPTIONS | flags,
        frozenset(name for name, param in options.items() if getattr(param, "multiple", False)),
    )  # fmt: skip


def advised(error: LmtrainError, argv: Sequence[str]) -> TypedLine | None:
    """Return the typed command line `argv` after the first way out of each problem that `error` reports. Return None if
    a problem has none that can be typed.
    """
    before = command = parse_line(argv)
    for ways in error.ways:
        possible = nearest_first(command, [way for way in ways if fits(command, way)])
        if not possible:
            return None
        # because: options belong to the verb, which may be what was misspelt
        command = parse_line(command.apply(possible[0]).words)
    return None if command.units == before.units else command


def command_of(argv: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the click command that a command line calls, None if there is none, and the words that name it."""
    if not argv or argv[0] not in HELP:
        return None, []
    command, verb = build_verb(argv[0]), [argv[0]]
    while (commands := getattr(command, "commands", None)) and argv[len(verb) :] and argv[len(verb)] in commands:
        verb.append(argv[len(verb)])
        command = commands[verb[-1]]
    return command, verb


def with_fillers(words: Sequence[str]) -> tuple[list[str], frozenset[str]]:
    """Return a command line with a value in each place to fill in, such as --vocab-size N, of which a parser would say
    that N is no number, and the names of the parameters that are so given. Texts and paths stay as they are.
    """
    click_command, _ = command_of(words)
    hints, filled, unknown = parameter_types(click_command), list(words), set[str]()
    for param in click_command.params:
        hint = hints.get(param.name)
        kinds = [each for outer in (hint, *typing.get_args(hint)) for each in (outer, typing.get_origin(outer))]
        if not {int, float, typing.Literal} & {*kinds}:
            continue
        for place, (option, value) in enumerate(pairwise(words), 1):
            if option in param.opts and value == value_placeholder(param, hint):
                filled[place] = filler_words(param, hint)[-1]
                unknown.add(str(param.name))
    return filled, frozenset(unknown)


def filler_words(param: Any, hint: Any) -> tuple[str, ...]:
    """Return words that give a parameter a value of its type, with which the rest of a line can be parsed."""
    literals = [each for each in (hint, *typing.get_args(hint)) if typing.get_origin(each) is typing.Literal]
    # because: a number that is not whole is mostly a share
    number = "0.5" if float in (hint, *typing.get_args(hint)) else "1"
    value = str(typing.get_args(literals[0])[0]) if literals else number
    return (param.opts[0], value) if param.param_type_name == "option" else (value,)


def _is_value(word: str) -> bool:
    """Return whether a word can be the value of an option that is not known: a negative number is one."""
    return "=" not in word and (not word.startswith("-") or word == "-" or word[1:2].isdigit())
