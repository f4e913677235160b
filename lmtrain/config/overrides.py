"""Parsing of command-line overrides: `key=value`, `group=choice`, `~key`. Hydra's grammar with our messages.

Called by compose. This module handles syntax alone; callers check what a key means and which choices exist.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from lmtrain.config import references
from lmtrain.errors import SettingsError

MAX_WORD = 20_000
MAX_DEPTH = 20
MAX_DIGITS = 100
_LONG_NUMBER = re.compile(rf"(?<![\w.'\"])[+-]?[0-9][0-9_]{{{MAX_DIGITS},}}(?![\w.'\"])")
_KEY = re.compile(r"[~+]{0,2}[A-Za-z_$][\w$/-]*(?:\.[\w$-]+)*", re.ASCII)
_HYDRA = re.compile(r"[~+]*hydra(?:[./]|$)")
_SIGNS = ",[]{}()'\""
_BLENDS = {"data.path": "data.datasets", "data.valid_path": "data.valid_datasets"}  # one dataset -> several
_CLOSE = {"[": "]", "{": "}", "(": ")"}
_INSTEAD = {
    "hydra.run.dir": "Use run.dir=FOLDER.",
    "hydra.sweep.dir": "Use -m with run.dir=FOLDER, in which each run gets a folder of its own.",
    "hydra.sweep.subdir": "Use -m with run.dir=FOLDER, in which each run gets a folder of its own.",
    "hydra.searchpath": "Use --config-dir FOLDER.",
}


class WrongWords(SettingsError):
    """Overrides that are refused before values are checked.

    `wrong` lists the refused words, `others` the rest, which may have wrong values.
    """

    def __init__(self, problems: Sequence[str], wrong: Sequence[str], words: Sequence[str]) -> None:
        super().__init__(problems)
        self.wrong, self.others = wrong, [word for word in words if word not in wrong]


def key_of(word: str) -> str:
    return word.lstrip("~+").partition("=")[0]


def parse(words: Sequence[str], groups: Mapping[str, Sequence[str]]) -> list[Any]:
    """Return Hydra's override objects for these words. Raise WrongWords with the problems of all malformed words."""
    # because: hydra is slow to import
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, parsed, problems, said = OverridesParser.create(), list[Any](), list[str](), dict[str, str]()
    bad = list[str]()
    for index, text in enumerate(words):
        if (problem := _refused(text) or _is_no_pair(words, index, groups)) is not None:
            problems += [problem] if problem else []
            bad.append(text)
            continue
        key, _, value = text.partition("=")
        override = None
        # because: characters outside Hydra's grammar, such as non-ASCII letters, can only be part of a text
        as_text = [f"{key}={quoted(value)}"] if not (value.startswith("=") or set(_SIGNS) & set(value)) else []
        for one in (text, *as_text):
            with suppress(HydraException, RecursionError, ValueError):
                override = override or parser.parse_override(one)
        if override is None:
            problems.append(_unreadable(text))
            bad.append(text)
        else:
            key = override.key_or_group
            if (before := said.get(key)) == text:
                continue
            # because: `~key` first removes the old value, which a new mapping would otherwise be merged into
            if before and (key in groups or not before.startswith("~")):
                problems.append(f"{text} sets {key} again, after {before}. Leave one out.")
                bad.append(text)
            said[key] = text
            parsed.append(override)
            if not override.is_sweep_override():
                values = [value for _, value in references.values_of([override.value()])]
                wrong = [references.problem_of(value) for value in values if isinstance(value, str)]
                problems += [f"{text} {problem}" for problem in wrong if problem]
                bad += [text] * any(wrong)
    if problems:
        raise WrongWords(problems, bad, words)
    return parsed


def several(override: Any) -> str:
    """Return the message for a sweep such as `a=1,2` where a single run is expected."""
    text = str(override.input_line)
    key, _, value = text.partition("=")
    ways = blended(key, value)
    if not ways and "," in value and not set(_SIGNS[1:]) & set(value):
        ways = f" A list is {shell(f'{key}=[{value}]')}, one text {shell(f'{key}={quoted(value)}')}."
    return f"{text} names several values. Add -m to run each of them.{ways}"


def blended(key: str, value: str) -> str:
    """Return a hint how to mix datasets if several are given where one is expected; else ""."""
    names = [name.strip() for name in value.removeprefix("[").removesuffix("]").split(",")]
    if key not in _BLENDS or len(names) == 1 or set(_SIGNS) & set("".join(names)):
        return ""
    parts = ", ".join(f"{{path: {name}, weight: 1}}" for name in names)
    return f" To mix them in one run, type data=blend {shell(f'{_BLENDS[key]}=[{parts}]')}."


def change(tree: dict[str, Any], override: Any) -> str | None:
    """Set, add or remove one key of `tree` in place. Return a message if that is impossible, else None."""
    key, text = str(override.key_or_group), override.input_line
    *path, last = key.split(".")
    node: Any = tree
    for depth, part in enumerate(path):
        if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
            continue
        below = node.get(part) if isinstance(node, dict) else part  # a list without this entry counts as one value
        if override.is_delete() and not isinstance(below, (dict, list)):
            return f"{text} removes what is not there. Leave it out."
        if not (below is None or isinstance(below, (dict, list))):
            above = ".".join(path[: depth + isinstance(node, dict)])
            return f"{text} goes below {above}, which is one value. Write {above}=VALUE."
        if below is None:
            node[part] = {}
        node = node[part]
    if override.is_delete():
        if not isinstance(node, dict) or last not in node:
            return f"{text} removes what is not there. Leave it out."
        del node[last]
    elif isinstance(node, list):
        if not (last.isdecimal() and int(last) < len(node)):
            return f"{text} names entry {last} of a list of {len(node)}. Count from 0, or give the whole list."
        node[int(last)] = override.value()
    else:
        node[last] = _merged(node.get(last), override.value())
    return None


def quoted(text: str) -> str:
    """Return a text quoted so that Hydra's grammar reads it as one string."""
    # because: hydra is slow to import
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.double if "'" in text and '"' not in text else Quote.single).with_quotes()


def shell(word: str) -> str:
    """Return a word quoted for a shell, if it needs quotes."""
    if re.fullmatch(r"[\w@%+=:,./-]+", word):
        return word
    return shlex.quote(word) if re.search(r'["$`\\!]', word) else f'"{word}"'


def _merged(old: Any, new: Any) -> Any:
    """Return `new`, merged recursively into `old` if both are mappings."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _merged(old.get(key), value) for key, value in new.items()}
    return new


def _refused(text: str) -> str | None:
    key = text.partition("=")[0]
    depths = accumulate((sign in "[{(") - (sign in "]})") for sign in text)
    if len(text) > MAX_WORD or max(depths, default=0) > MAX_DEPTH:
        return f"{text[:40]}... is too long or nests too deeply. Put it into a file of --config-dir."
    if number := _LONG_NUMBER.search(text, len(key)):
        return (
            f"{key} is given {number[0][:20]}..., which has {len(number[0])} digits, and no number here has more than "
            f"{MAX_DIGITS}. Write {key}='TEXT' if it is a text."
        )
    if _HYDRA.match(key):
        way_out = _INSTEAD.get(key.lstrip("~+"), "Leave it out; -m runs every combination of values.")
        return f"{text} sets Hydra itself, which only composes settings here. {way_out}"
    return None


def _is_no_pair(words: Sequence[str], index: int, groups: Mapping[str, Sequence[str]]) -> str | None:
    """Return the message for a word without a key or a value; None if the word is fine.

    Return "" if the message about the previous word covers this one.
    """
    text, before, after = words[index], words[index - 1] if index else "", words[index + 1 : index + 3]
    key, sign, value = text.partition("=")
    bare = key.lstrip("~+")
    if not sign and after and after[0].startswith("="):
        joined = shell(f"{text}{''.join(after) if after[0] == '=' else after[0]}")
        return f"{text!r} has a space before its value. Type {joined}."
    if (not bare and before and "=" not in before) or (index > 1 and before == "=" and not sign):
        return ""
    if not bare:
        return f"{text!r} is not an override, since it names no key. Write key=value."
    if bare != bare.strip() and _KEY.fullmatch(bare.strip()):
        return f"{text!r} has a space beside its key. Type {shell(f'{key.strip()}={value.strip()}')}."
    if "@" in bare:
        return f"{text!r} is not an override, since @ has no meaning here. Write key=value or group=choice."
    if match := re.match(r"([\w.]+)\[", bare):
        return f"{text!r} names an entry of a list. Give the whole list: {match[1]}=[FIRST,SECOND]."
    if not _KEY.fullmatch(key):
        return f"{text!r} is not an override ({bare!r} is no name of a key). Write key=value or group=choice."
    if sign or key.startswith("~"):
        return None
    if found := [group for group, choices in groups.items() if text in choices]:
        return f"{text!r} is not an override, since it names no key. Did you mean {found[0]}={text}?"
    if text.endswith((".yaml", ".yml")):
        return f"{text!r} is a file. Type --config-dir FOLDER --config-name NAME, without the .yaml."
    if text.endswith(".py"):
        return f"{text!r} is a program, and settings are none here. Type them as key=value, or in a YAML file."
    if Path(f"{text}.idx").is_file():
        return f"{text!r} is a dataset. Write data.path={shell(text)}."
    if "=" in before and not set(_SIGNS) & set(before):
        key, _, value = before.partition("=")
        joined = shell(f"{key}={quoted(f'{value} {text}')}")
        return f"{text!r} is not an override, since it names no key. If it belongs to the word before, type {joined}."
    return f"{text!r} is not an override, since it gives no value. Write {text}=VALUE."


def _unreadable(text: str) -> str:
    key, _, value = text.partition("=")
    if value.startswith("="):
        return f"{text!r} is not an override, since it has = twice. Write {shell(key + value)}."
    as_text = f"type {shell(f'{key}={quoted(value)}')}"
    opened = _first_open(value)
    if opened in _CLOSE and value.startswith(opened):
        closed = shell(f"{text}{_CLOSE[opened]}")
        return f"{text} opens a {opened} that is not closed. Type {closed}, or, if it is one text, {as_text}."
    if opened:
        what = "a quote" if opened in "'\"" else f"a {opened}"
        wrong = f"closes {what} that is not open" if opened in _CLOSE.values() else f"has {what} that is not closed"
        return f"{text} {wrong}. If it belongs to the text, {as_text}."
    signs = " ".join(sorted({sign for sign in value if sign in _SIGNS}))
    if not signs:
        return f"{text!r} is not an override ({key!r} is no name of a key). Write key=value or group=choice."
    return f"{text} cannot be read, since {signs} must be quoted within a value. If it is one text, {as_text}."


def _first_open(value: str) -> str:
    """Return the first unmatched bracket or quote, or ""."""
    stack: list[str] = []
    quote = ""
    for position, sign in enumerate(value):
        if quote:
            quote = "" if sign == quote and value[position - 1] != "\\" else quote
        elif sign in "'\"":
            quote = sign
        elif sign in _CLOSE:
            stack.append(sign)
        elif sign in _CLOSE.values() and (not stack or _CLOSE[stack.pop()] != sign):
            return sign
    return quote or (stack[-1] if stack else "")
