"""Explain an error of click, typer's parser of command lines: all that is wrong in the line, and what to type instead.

Called by main. Click stops at the first word that it cannot take. Here that word is corrected, or taken out, and the
rest is parsed again without being run, so that one message names everything; settings are then composed as well.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import typer

from lmtrain.cli.settings_keys.parse_typed_line import advised, command_of, filler_words, parse_line, with_fillers
from lmtrain.cli.subcommands import HELP, ClickError, parameter_types, value_placeholder, verbs_with
from lmtrain.config.foreign_names import FOREIGN_NAMES, UNSUPPORTED_SETTINGS
from lmtrain.config.ideas_without_counterpart import idea_of
from lmtrain.config.names_without_counterpart import is_environment_variable, sentence_about, sentence_about_variable
from lmtrain.errors import (
    LmtrainError,
    SettingsError,
    UsageError,
    Way,
    fill_in,
    join_few,
    joined,
    leave_out,
    spelling_hint,
    way,
    with_other_ways,
)
from lmtrain.start.other_tools.explain_verb_options import explain_by_verb, with_dashes
from lmtrain.start.other_tools.foreign_options import FALSE, TRUE
from lmtrain.start.other_tools.option_synonyms import (
    LEFT_OUT,
    argument_named,
    is_known,
    layout_named,
    misspelt,
    named_alike,
    option_named,
)
from lmtrain.start.other_tools.typed_line import TypedLine
from lmtrain.start.other_tools.verb_synonyms import explain_subcommand, explain_verb

_STRAY = re.compile(r"[A-Za-z_][\w.-]*=.*", re.DOTALL)  # a word that can be meant as an option
_LAYOUT_OPTIONS: dict[tuple[str, ...], str] = {("reshard",): "--to", ("export",): "--layout"}  # verb -> option
# the begin of a problem about what is to be filled in
PLACE_OF_OPTION = re.compile(r"--[a-z-]+ [A-Z]+ (?:is (?!not an option)|does )")
_NO_ADVICE = " --help` lists its options."
_NAMES_OF_SETTINGS = {  # with the last part of each key
    *UNSUPPORTED_SETTINGS,
    *(name for key, names in FOREIGN_NAMES.items() for name in (key.rpartition(".")[2], *names.split())),
}
_DEFAULT_WORDS = ("auto", "none", "null", "default")  # values of other tools for what is chosen without the option
_GGUF = "GGUF is not written here: llama.cpp's convert_hf_to_gguf.py makes it of a Hugging Face folder."
_KINDS = {"valid int": "a whole number", "valid number": "a number", "valid float": "a number"}


@dataclass(frozen=True)
class _Problem:
    """A problem of the command line: its marked message, and the words, options or keys that it is about."""

    text: str
    names: tuple[str, ...] = ()
    filler: tuple[str, ...] = ()  # words with which the rest of the line can be parsed; for what is missing


def usage_error_from_click(
    error: Any, argv: Sequence[str], find_settings_problems: Callable[[Sequence[str], dict[str, Any]], Iterable[str]]
) -> LmtrainError:
    """Return a UsageError that says in lmtrain's style what is wrong in the command line `argv` and what to type
    instead. `argv` stands without the program's name; `error` is click's error about its first wrong word.
    `find_settings_problems` is called with the corrected words and the verb's parsed parameters.
    """
    return joined(_problems(list(argv), error, find_settings_problems))


def error_of_stray_word(
    argv: Sequence[str], find_settings_problems: Callable[[Sequence[str], dict[str, Any]], Iterable[str]]
) -> LmtrainError | None:
    """Return a UsageError for a command line whose verb has taken a word such as key=body for a file that does not
    exist; None if it has none, or if lmtrain does not know what is meant.
    """
    problems = _problems(list(argv), None, find_settings_problems) if _stray_word(parse_line(argv)) else []
    return joined(problems) if problems else None


def _stray_word(command: TypedLine) -> str | None:
    """Return the first argument of `command` that is written like an option without dashes, such as key=body, where its
    verb takes files, and that is no file; None if there is none.
    """
    click_command, _ = command_of(command.words)
    arguments = {param.name for param in getattr(click_command, "params", ()) if param.param_type_name == "argument"}
    if not arguments or "overrides" in arguments:
        return None
    words = (unit[0] for unit in command.units if len(unit) == 1 and not unit[0].startswith("-"))
    # because: the layout of an evaluation is given by settings
    others = (word for word in words if not ("layout" in arguments and "." in word.partition("=")[0]))
    return next((word for word in others if _STRAY.fullmatch(word) and not os.path.lexists(word)), None)


def _problems(
    words: list[str], error: Any, find_settings_problems: Callable[[Sequence[str], dict[str, Any]], Iterable[str]]
) -> list[LmtrainError]:
    """Return all that is wrong in a command line: `error` of click about its first wrong word, None if there is none,
    words that are no files, what is found when these are corrected, and settings.
    """
    problems, context, num_words = list[LmtrainError](), None, len(words)
    while word := _stray_word(command := parse_line(words)):
        problems.append(UsageError(_explain_stray(word, command).text))
        found = advised(problems[-1], words)
        words = (found or command.without([word])).words
        context, error = _parse_again(words)
    while error is not None and len(problems) <= num_words:
        problem = _explain(error, parse_line(words))
        if problems and PLACE_OF_OPTION.match(problem.text):
            break  # because: what is still to be filled in is no mistake
        if str(reported := UsageError(problem.text)) in map(str, problems):
            break
        problems.append(reported)
        found = advised(reported, words)
        if found is None and "is not a command. " in problem.text:
            break  # because: what follows are words of that command
        command = found or parse_line(words).without(problem.names)
        words = [*command.words, *problem.filler]
        context, error = _parse_again(words)
    if context is not None:
        problems += map(SettingsError, ([problem] for problem in find_settings_problems(words, context.params)))
    return problems


def _parse_again(words: Sequence[str]) -> tuple[Any, Any]:
    """Parse a command line without running it. Return click's context and None, or None and click's error; both are
    None if there is no command to parse for, or if the line ends otherwise.
    """
    command, verb = command_of(words)
    filled = words if command is None else with_fillers(words)[0]
    rest = [word for word in filled[len(verb) :] if word not in ("--help", "-h", "--debug")]
    if command is None or (getattr(command, "commands", None) and not rest):
        return None, None
    try:
        context = command.make_context(" ".join(verb), rest, obj=list(words))
        if getattr(command, "commands", None):
            command.resolve_command(context, rest)
        return context, None
    except ClickError as error:
        return None, error
    except (LmtrainError, typer.Exit, typer.Abort):
        return None, None  # because: what is wrong beside click's rules is reported when the corrected line is typed


def _explain(error: Any, command: TypedLine) -> _Problem:
    """Return what an error of click about the typed `command` means."""
    name, message = " ".join(("lmtrain", *command.verb)), " ".join(error.format_message().split())
    click_command, _ = command_of(command.words)
    hints = parameter_types(click_command) if click_command is not None else {}
    param = getattr(error, "param", None)
    option = getattr(error, "option_name", None)
    if option and hasattr(error, "possibilities"):
        return _explain_unknown_option(option, name, error.ctx.command.params, command)
    if match := re.match(r"No such command ['\"](.*?)['\"]", message):
        verbs = getattr(click_command, "commands", HELP)
        word = match[1]
        # because: swapped letters make a name less similar than other letters do
        spelt = next((verb for verb in verbs if sorted(verb) == sorted(word.lower())), word)
        is_misspelt = bool(difflib.get_close_matches(spelt, verbs, cutoff=0.8))
        if is_environment_variable(word.partition("=")[0]) and "=" in word:
            about = f"{sentence_about_variable(word)} {leave_out(word)} here."
            return _Problem(f"{name} {word} is not a command. {about}", (word,))
        if not is_misspelt and verbs is not HELP:
            foreign = explain_subcommand(command.verb[0], word)
        else:
            foreign = None if is_misspelt else explain_verb(word)
        way_out = foreign or spelling_hint(spelt, verbs, lambda verb: way(verb, instead_of=word))
        return _Problem(f"{name} {word} is not a command. {way_out}", (word,))
    if match := re.match(r"Got unexpected extra arguments? ?\(?s?\)? ?\((.*)\)", message):
        return _explain_extra_words(match[1], name, click_command, command)
    if option and "is given more than once" in message:
        return _explain_repeated(option, command)
    if option and "does not take a value" in message:
        return _explain_switch(option, command)
    if option:
        # because: a group may have read the line as one of its verb that is meant without its name
        verbs = [click_command, *getattr(click_command, "commands", {}).values()]
        param, verb = next((param, verb) for verb in verbs for param in verb.params if option in param.opts)
        return _explain_no_value(option, param, parameter_types(verb).get(param.name))
    if type(error).__name__ == "MissingParameter" and param is not None:
        return _explain_missing(param, name, hints.get(param.name))
    if param is not None:
        return _explain_value(param, hints.get(param.name), error.message, command)
    return _Problem(f"{_with_full_stop(message)} `{name} --help` shows how it is called.")


def _explain_stray(word: str, command: TypedLine) -> _Problem:
    """Return the problem that an argument such as key=body is no file: what it says as an option."""
    if is_environment_variable(word.partition("=")[0]):
        return _Problem(f"{word} is not a file. {sentence_about_variable(word)} {leave_out(word)} here.", (word,))
    option, _, value = with_dashes(word).partition("=")
    following = command.units[command.units.index((word,)) + 1 :][:1] if (word,) in command.units else ()
    if option in command.options and not value and following and not following[0][0].startswith("-"):
        [value] = following[0]
        meant = way(option, value, instead_of=(word, value))
        return _Problem(f"{word} is not a file. Did you mean {meant}?", (word, value))
    params = command_of(command.words)[0].params
    if not value and any(option in param.opts and getattr(param, "hidden", False) for param in params):
        return _Problem(f"{word} is not a file, and {option} is no option here. {leave_out(word)}.", (word,))
    if option in command.options and not (value or option in command.flags):
        return _Problem(f"{word} is not a file. Give {_without_value(option, word, command)}.", (word,))
    if option in command.options:
        new = (option,) if option in command.flags else (option, value)
        return _Problem(f"{word} is not a file. Did you mean {way(*new, instead_of=word)}?", (word,))
    pretended = replace(
        command, units=tuple((option, value) if unit == (word,) else unit for unit in command.units)
    )
    text = _explain_unknown_option(option, " ".join(("lmtrain", *command.verb)), params, pretended).text

    def for_word(way: Way) -> Way:
        return way._replace(old=tuple(word if name == option else name for name in way.old))

    return _Problem(f"{word} is not a file, and {with_other_ways(text, for_word)}", (word,))


def _explain_unknown_option(option: str, name: str, params: Sequence[Any], command: TypedLine) -> _Problem:
    """Return the problem that the verb `name` has no option `option`: its words in place of a similar option or of what
    other tools call so; for a verb that takes settings, everything in `command` that is another tool's.
    """
    arguments = [str(param.name) for param in params if param.param_type_name == "argument"]
    # because: such a verb is called with whole lines of other tools, whose names of settings count first
    is_run_verb = "overrides" in arguments and any(param.name == "config_dir" for param in params)
    hidden = {name for param in params if getattr(param, "hidden", False) for name in param.opts}
    own_options = [own for own in command.options if own.startswith("--") and own not in hidden]
    spelt = option.lower().replace("_", "-")
    if len(option) == 2 and (problem := _explain_dash(option, command)):
        return problem
    if len(option) == 2:  # because: of a long option with one dash, click names the first letter
        whole = (unit[0].partition("=")[0] for unit in command.units if unit[0].startswith(option))
        option = next((word for word in whole if f"-{word}" in own_options), option)
        spelt = spelt if len(option) == 2 else f"-{option}"
    refusal = f"{option} is not an option of {name}."
    closest = [spelt] if spelt in own_options else []
    if not closest and (text := explain_by_verb(option, command)):
        return _Problem(text, (option,))
    has_no_setting = option.lstrip("-").replace("-", "_") in UNSUPPORTED_SETTINGS
    has_synonym = has_no_setting and option_named(option, own_options)
    synonym = None
    if not closest and (has_synonym or not is_run_verb):
        synonym = _explain_synonym(option, name, own_options, arguments, command)
    if synonym is not None:
        return synonym
    if not closest and command.takes_settings:
        # because: the tables of other tools' names take time to build
        from lmtrain.start.other_tools.explain_foreign_line import explain_foreign_line

        only = "parallel." if "layout" in arguments else ""
        typed = (unit[0].partition("=")[0] for unit in command.units)
        foreign = {each for each in (option, *typed) if _is_foreign(each, command, own_options)}
        if option in foreign and (found := explain_foreign_line(name, command, foreign, verbs_with, only)):
            return _Problem(*found)
    closest = closest or difflib.get_close_matches(option, own_options, n=1, cutoff=0.8)
    closest = closest or list(filter(None, [option_named(option, own_options)]))
    closest = closest or ([own for own in own_options if own.startswith(option)] if len(option) > 2 else [])
    if closest := closest or misspelt(option, own_options):
        meant = " or ".join(_renamed(option, own, command) for own in closest)
        return _Problem(f"{refusal} Did you mean {meant}?", (option,))
    if alike := named_alike(spelt, own_options):
        return _Problem(f"{refusal} Options named alike: {join_few(alike)}. `{name} --help` shows them.", (option,))
    if places := verbs_with(spelt):
        return _Problem(f"{refusal} It is one of {places}.", (option,))
    if is_known(spelt):
        return _Problem(f"{refusal} {name} has nothing like it.", (option,))
    if spelt.lstrip("-").replace("-", "_") in _NAMES_OF_SETTINGS:
        return _Problem(f"{refusal} It is about training, which `lmtrain pretrain` does.", (option,))
    if sentence := idea_of(spelt):
        return _Problem(f"{refusal} {sentence}", (option,))
    return _Problem(f"{refusal} `{name}{_NO_ADVICE}", (option,))


def _is_foreign(option: str, command: TypedLine, own_options: Collection[str]) -> bool:
    """Return whether a word is an option that the verb has not: another tool's name of a setting, or no misspelling of
    an option that the verb has.
    """
    # because: the tables of other tools' names take time to build
    from lmtrain.start.other_tools.explain_foreign_line import KNOWN_NAMES

    spelt = option.lower().replace("_", "-")
    if not option.startswith("--") or len(option) == 2 or option in command.options or spelt in own_options:
        return False
    if explain_by_verb(option, command) is not None:
        return False
    path = spelt.lstrip("-").replace("-", "_")
    is_known = path.rpartition(".")[2] in KNOWN_NAMES or sentence_about(path) is not None
    return is_known or not difflib.get_close_matches(option, own_options, n=1, cutoff=0.8)


def _explain_dash(option: str, command: TypedLine) -> _Problem | None:
    """Return the problem of a setting or a switch of one letter that is typed as -KEY=VALUE, of which click names a
    letter as `option`; None if there is none.
    """
    for word in (unit[0] for unit in command.units if re.fullmatch(r"-\w[\w.]*=.*", unit[0], re.DOTALL)):
        name, _, value = word.partition("=")
        if name in command.flags and option[1] in f"={value}":
            return _explain_switch(name, replace(command, units=tuple(u for u in command.units if u == (word,))))
        if command.takes_settings and "." in name and option[1] in name:
            new = way(word[1:], instead_of=word)
            return _Problem(f"{word} begins with a dash, which a setting does not. Write {new}.", (word,))
    return None


def _explain_synonym(
    option: str, name: str, own_options: Collection[str], arguments: Sequence[str], command: TypedLine
) -> _Problem | None:
    """Return the problem of an option that other tools have for one of the verb's, for one of its arguments, or for
    what it does anyway; None if there is none.
    """
    refusal, units = f"{option} is not an option of {name}.", _units(option, command)
    values = [value for unit in units for value in _values_of(unit)]
    layout_option = _LAYOUT_OPTIONS.get(command.verb)
    if layout_option and option in (sizes := layout_named(command.units)):
        given = ",".join(value for unit in _units(layout_option, command) for value in _values_of(unit)).split(",")
        axes = {size.partition("=")[0]: size for size in (*filter(None, given), *sizes.values())}
        to = way(layout_option, ",".join(axes.values()), instead_of=sizes)
        return _Problem(f"{', '.join(sizes)} cannot be given to {name}. Use {to}.", tuple(sizes))
    if (synonym := option_named(option, own_options)) and units:
        return _Problem(f"{refusal} Did you mean {_renamed(option, synonym, command)}?", (option,))
    if values and argument_named(option, arguments):
        give = way(*values, instead_of=option, shown=" ".join(values))
        return _Problem(f"{refusal} Give {give} without it.", (option,))
    if units and (sentence := LEFT_OUT.get(option.lstrip("-").lower().replace("_", "-"))):
        typed = ", ".join(" ".join(unit) for unit in units)
        return _Problem(f"{typed} is not an option of {name}. {sentence} {leave_out(option)}.", (option,))
    return None


def _renamed(option: str, own: str, command: TypedLine) -> str:
    """Return the marked option `own` of the verb, with all values that were typed for `option`."""
    words: list[str] = []
    for unit in _units(option, command):
        values = _values_of(unit)
        if own in command.flags and values[-1:] and values[-1].lower() in FALSE:
            return leave_out(option, shown="to leave it out")
        # because: of a switch, the word that follows is an argument
        if own in command.flags and ("=" in unit[0] or (values[-1:] and values[-1].lower() in TRUE)):
            values = []
        if own in command.repeatable and option.endswith("s"):  # because: other tools take a list there
            words += [word for value in values for part in value.split(",") for word in (own, part)]
            continue
        if not values and own not in command.flags:
            return _without_value(own, option, command)
        words += [own, *values] if own in command.flags or len(values) == 1 else [f"{own}={' '.join(values)}"]
    return way(*words, instead_of=option, shown=own) if words else own


def _without_value(own: str, option: str, command: TypedLine) -> str:
    """Return the marked option `own` of the verb, in place of `option`, which was typed without a value."""
    click_command, _ = command_of(command.words)
    param = next(param for param in click_command.params if own in param.opts)
    placeholder = value_placeholder(param, parameter_types(click_command).get(param.name))
    return fill_in(own, placeholder, instead_of=option) if placeholder.isalpha() else f"{own} {placeholder}"


def _explain_extra_words(text: str, name: str, click_command: Any, command: TypedLine) -> _Problem:
    """Return the problem that a verb takes fewer arguments: those in `text`, separated by blanks, are too many. An
    argument such as seed=1 is an option, if the verb has it.
    """
    metavars = [str(p.metavar or p.name).upper() for p in click_command.params if p.param_type_name == "argument"]
    taken = f"takes {' and '.join(metavars)} alone" if metavars else "takes no arguments"
    words = [unit[0] for unit in command.units if len(unit) == 1 and unit[0] in text]
    taken_words, extra = words[: -len(text.split())], words[-len(text.split()) :] or [text]
    found = [(word, f"--{word.partition('=')[0].replace('_', '-')}") for word in extra if "=" in word]
    if found and len(found) == len(extra) and all(option in command.options for _, option in found):
        new = [part for word, option in found for part in (option, word.partition("=")[2].lstrip("="))]
        return _Problem(f"{text} is not an argument of {name}, which {taken}. Use {way(*new, instead_of=extra)}.")
    if len(extra) == 2 and (option := f"--{extra[0].rstrip('=').replace('_', '-')}") in command.options - command.flags:
        meant = way(option, extra[1], instead_of=extra)
        return _Problem(f"{text} is not an argument of {name}, which {taken}. Did you mean {meant}?", tuple(extra))
    if "--prompt" in command.options and not _units("--prompt", command):
        prompt = way("--prompt", " ".join(extra), instead_of=extra)
        return _Problem(f"{text} is not an argument of {name}, which {taken}. Did you mean {prompt}?", tuple(extra))
    if text.endswith(".gguf"):
        out = leave_out(*extra)
        return _Problem(f"{text} is too much for {name}, which {taken}. {_GGUF} {out}, and give --to hf.", tuple(extra))
    if len(extra) == 1 and is_environment_variable(text.partition("=")[0]):
        about = f"{sentence_about_variable(text)} {leave_out(text)} here."
        return _Problem(f"{text} is too much for {name}, which {taken}. {about}", (text,))
    is_are, them = ("is", "it") if len(extra) == 1 else ("are", "them")
    # because: a word that is typed twice is too much only once
    hint = way(*(word for word in taken_words if word in extra), instead_of=extra, shown=f"Leave {them} out")
    return _Problem(f"{text} {is_are} too much for {name}, which {taken}. {hint}.", tuple(extra))


def _explain_switch(option: str, command: TypedLine) -> _Problem:
    """Return the problem that a switch has a value."""
    typed = next((unit[0] for unit in command.units if unit[0].startswith(f"{option}=")), option)
    value = typed.partition("=")[2]
    if option == "--array" and (value[:1].isdigit() or value.startswith("%")):  # as sbatch has it
        meant = way("--array", "--array-tasks", value, instead_of=typed)
        return _Problem(f"{typed} has a value, but {option} is a switch. Use {meant}.", (typed,))
    is_off = value.lower() in ("false", "no", "0", "off")
    way_out = f"{leave_out(typed)}." if is_off else f"Use {way(option, instead_of=typed)}."
    return _Problem(f"{typed} has a value, but {option} is a switch. {way_out}", (typed,))


def _explain_repeated(option: str, command: TypedLine) -> _Problem:
    """Return the problem that an option that has one value is typed with several."""
    params = command_of(command.words)[0].params
    names = next(param.opts for param in params if option in param.opts)
    values = [*dict.fromkeys(value for name in names for unit in _units(name, command) for value in _values_of(unit))]
    ways = " or ".join(way(option, value, instead_of=names) for value in values)
    return _Problem(f"{option} is given more than once, and has one value. Use {ways}.", (option,))


def _explain_no_value(option: str, param: Any, hint: Any) -> _Problem:
    """Return the problem that an option is given without its value."""
    if getattr(param, "hidden", False):  # because: it is there only to be refused
        return _Problem(f"{option} is given without its value, and is no option here. {leave_out(option)}.", (option,))
    place, filler = value_placeholder(param, hint), filler_words(param, hint) if param.required else ()
    words = fill_in(option, place) if place.isalpha() and place.isupper() else f"{option} {place}"
    return _Problem(f"{option} is given without its value. Give {words}.", (option,), filler)


def _explain_missing(param: Any, name: str, hint: Any) -> _Problem:
    """Return the problem that an argument or an option which the verb `name` needs is not given. `hint` is its type."""
    placeholder = value_placeholder(param, hint)
    filler = filler_words(param, hint)
    if len(filler) < 2:
        return _Problem(f"{placeholder} is not given, and {name} needs it. Give {placeholder}.", filler=filler)
    option = filler[0]
    if example := re.search(r"\bas in (\d\S*?)\.?$", str(param.help)):
        way_out = f"Give one such as {fill_in(option, example[1])}."
    else:
        way_out = f"Give {fill_in(option, placeholder)}."
    return _Problem(f"{option} is not given, and {name} needs it. {way_out}", filler=filler)


def _explain_value(param: Any, hint: Any, message: str, command: TypedLine) -> _Problem:
    """Return the problem that an option has a wrong value, which `message` of click or of the option's parser explains.
    """
    from lmtrain.config.name_suggestions import closest_value, number_meant

    is_option = param.param_type_name == "option"
    option = next((name for name in param.opts if _units(name, command)), param.opts[0]) if is_option else ""
    units = _units(option, command) if is_option else _argument_units(param, command)
    wrong = _wrong_unit(units, message)
    value = wrong[-1].removeprefix(f"{option}=") if wrong else ""
    typed, filler = " ".join(wrong), filler_words(param, hint) if param.required else ()
    given = f"{option} {value}" if is_option else f"{value or 'The value'} for {value_placeholder(param, hint)}"

    def mark(new: object) -> str:
        return way(*([option] if is_option else []), str(new), instead_of=typed, shown=str(new))

    if match := re.search(r"is not one of (.+?)\.?$", message):
        choices = re.findall(r"['\"](\S+?)['\"]", match[1])
        closest = closest_value(value, choices)
        way_out = f"Did you mean {mark(closest)}?" if closest else "Give one of these."
        if value.lower() == "gguf" and "hf" in choices:
            way_out = f"{_GGUF} Use {mark('hf')} first."
        return _Problem(f"{given} is not one of {', '.join(choices)}. {way_out}", (typed,), filler)
    if match := re.search(r"(greater|less) than or equal to (\S+)", message):
        bound = f"{mark(match[2])} or {'more' if match[1] == 'greater' else 'less'}"
        return _Problem(f"{given} is out of range. Use {bound}.", (typed,))
    if rule := next((rule for word, rule in _KINDS.items() if word in message), None):
        meant = number_meant(value)
        if meant is not None and rule == "a whole number":
            meant = str(int(float(meant))) if float(meant).is_integer() else None
        way_out = f"Did you mean {mark(meant)}?" if meant else f"Give {rule}."
        if value.lower() in _DEFAULT_WORDS and not param.required:
            way_out = f"{leave_out(typed)} for the default."
        return _Problem(f"{given} is not {rule}. {way_out}", (typed,), filler)
    rule = _with_full_stop(message.removeprefix("Value error, "))
    return _Problem(f"{given} is refused: {rule}", (typed,), filler)


def _argument_units(param: Any, command: TypedLine) -> list[tuple[str, ...]]:
    """Return the units that can be values of the argument `param`: arguments of one word stand before it."""
    arguments = [each for each in command_of(command.words)[0].params if each.param_type_name == "argument"]
    first = next((place for place, each in enumerate(arguments) if each.name == param.name), 0)
    return [unit for unit in command.units if not unit[0].startswith("-")][first:]


def _wrong_unit(units: Sequence[tuple[str, ...]], message: str) -> tuple[str, ...]:
    """Return which of the units that give a parameter's values is the one that `message` is about: it quotes the value,
    or is about numbers; () if there are none.
    """
    quoted = re.search(r"['\"](\S*?)['\"]", message)
    for unit in units:
        value = unit[-1].partition("=")[2] if unit[0].startswith("-") and "=" in unit[0] else unit[-1]
        is_number = re.fullmatch(r"[+-]?\d+" if "valid int" in message else r"[+-]?[\d.]+(e[+-]?\d+)?", value)
        if (quoted and quoted[1] == value) or ("valid" in message and not is_number):
            return unit
    return units[-1] if units else ()


def _units(option: str, command: TypedLine) -> list[tuple[str, ...]]:
    return [unit for unit in command.units if unit[0].partition("=")[0] == option]


def _values_of(unit: Sequence[str]) -> list[str]:
    """Return the values that were typed for an option, as "--x=1" or "--x 1"."""
    return [unit[0].partition("=")[2]] if "=" in unit[0] else list(unit[1:])


def _with_full_stop(message: str) -> str:
    return message if message.endswith((".", "?")) else f"{message}."
