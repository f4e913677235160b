"""Parsing of command-line overrides: `key=value`, `group=choice`, `~key`. Hydra's grammar with our messages.

Called by compose. This module handles syntax alone; callers check what a key means and which choices exist.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain, count
from pathlib import Path, PurePath
from typing import Any

from lmtrain.config.foreign_names import FOREIGN_NAMES
from lmtrain.config.setting_references import iter_values, reference_problem
from lmtrain.config.settings_base import show
from lmtrain.errors import SettingsError, join_few, leave_out, way

MAX_CHARACTERS = 20_000
MAX_DEPTH = 20
MAX_DIGITS = 100
_LONG_NUMBER = re.compile(rf"(?<![\w.'\"])[+-]?[0-9][0-9_]{{{MAX_DIGITS},}}(?![\w.'\"])")
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_NUMBER = r"[0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?(?:[kmtKMT]|[kKMGTP]?i?[bB]|s|min|h|d)?"
_PLUS_NUMBER = re.compile(rf"(?:(?<=[\[{{(,:])\s*|^)(\+)({_NUMBER})(?=\s*(?:[\]}}),]|$))")
_KEY = re.compile(r"[~+]{0,2}[A-Za-z_$][\w$/-]*(?:\.[\w$-]+)*", re.ASCII)
_COLON = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):=?(|[^=:/\\].*)", re.ASCII | re.DOTALL)
_HYDRA = re.compile(r"[~+]*hydra(?:[./]|$)")
_PLAIN_TEXT = re.compile(r"[A-Za-z_./~][\w./~@%+-]*")
_SPECIAL_CHARACTERS = ",[]{}()'\""
_PLAIN_ITEM = re.compile(r"[\w.+/:%@?|$*\\-]+", re.ASCII)  # an entry of a list that Hydra's grammar reads unquoted
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
_OTHER_FILES = (".toml", ".json", ".ini", ".cfg", ".conf")
_CLOSING_BRACKETS = {"[": "]", "{": "}", "(": ")"}
_FOREIGN_KEYS = {name for names in FOREIGN_NAMES.values() for name in names.split() if "_" in name}
_HYDRA_WAYS_OUT = {  # a setting of Hydra's -> the words to type instead; VALUE is its value
    "hydra.run.dir": ("run.dir=VALUE",),
    "hydra.sweep.dir": ("-m", "run.dir=VALUE"),
    "hydra.sweep.subdir": ("-m", "run.dir=VALUE"),
    "hydra.searchpath": ("--config-dir", "VALUE"),
}


class RefusedOverrides(SettingsError):
    """Error on overrides that are malformed or unknown, raised before any value is checked.

    `refusals` has (override, message) for each problem; the message is empty if that of another override covers it.
    `refused` lists these overrides, `remaining` the others, whose values are not checked yet.
    """

    def __init__(self, refusals: Sequence[tuple[str, str]], overrides: Sequence[str]) -> None:
        super().__init__([problem for _, problem in refusals if problem])
        self.refused = [override for override, _ in refusals]
        self.remaining = [override for override in overrides if override not in self.refused]


class FileSetting(str):
    """A setting of a settings file, as the word KEY=VALUE that sets the same on the command line. It is parsed as this
    `value` and not as a text.
    """

    value: Any
    file: Path
    lines: Mapping[str, int]  # dotted key of each value within the setting, itself included -> its line, from 1

    def __new__(cls, word: str, value: Any, file: Path, lines: Mapping[str, int]) -> FileSetting:
        self = super().__new__(cls, word)
        self.value, self.file, self.lines = value, file, lines
        return self

    def line(self, key: str) -> int:
        """Return the line of the dotted key `key` within the setting; that of the setting if it has no such key."""
        return self.lines.get(key) or self.lines[override_key(self)]

    def location(self, key: str = "") -> str:
        """Return the file and the line of the dotted key `key` within the setting, for messages."""
        return f"{self.file} line {self.line(key)}"


def override_key(override: str) -> str:
    """Return the key of an override: `+optim.lr=1` -> `optim.lr`."""
    return override.lstrip("~+").partition("=")[0]


def parse_overrides(words: Sequence[str], groups: Mapping[str, Sequence[str]]) -> list[Any]:
    """Parse command-line words such as `optim.lr=1e-3` and return Hydra's Override objects, in the same order. `groups`
    maps each config group, such as `model`, to the names of its files. Raise RefusedOverrides with the problems of all
    words that are malformed or set a key again.
    """
    # because: hydra is slow to import
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, parsed, text_by_key = OverridesParser.create(), list[Any](), dict[str, str]()
    refusals = list[tuple[str, str]]()
    for index, text in enumerate(words):
        limit = None if isinstance(text, FileSetting) else _limit_problem(text)
        if (problem := limit or _form_problem(words, index, groups)) is not None:
            refusals.append((text, problem))
            continue
        if problem := _plus_problem(text):
            refusals.append((text, problem))
            continue
        key, _, value = text.partition("=")
        override = _override_of_file(text) if isinstance(text, FileSetting) else None
        for candidate in (text, *_as_texts(key, value)) if override is None else ():
            with suppress(HydraException, RecursionError, ValueError):
                override = override or parser.parse_override(candidate)
        if override is None:
            refusals.append((text, _syntax_problem(text)))
            continue
        key = override.key_or_group
        if (previous := text_by_key.get(key)) == text:
            continue
        # because: `~key` first removes the old value, which a new mapping would otherwise be merged into
        if previous and (key in groups or not previous.startswith("~")):
            hint = blend_hint(key, f"{previous.partition('=')[2]},{text.partition('=')[2]}")
            one_out = leave_out(previous, shown="Leave one out")
            refusals.append((text, f"{text} sets {key} again, after {previous}.{hint} {one_out}."))
        text_by_key[key] = text
        parsed.append(override)
        for _, value in iter_values([] if override.is_sweep_override() else [override.value()]):
            if isinstance(value, str) and (problem := reference_problem(value)):
                refusals.append((text, f"{text}: {problem}"))
    if refusals:
        raise RefusedOverrides(refusals, words)
    return parsed


def _as_texts(key: str, value: str) -> list[str]:
    """Return the override with its value as a text in quotes, or as a list of such texts, if it can be one; else [].

    because: characters outside Hydra's grammar, such as non-ASCII letters and ~, can only be part of a text
    """
    if not (value.startswith("=") or set(_SPECIAL_CHARACTERS) & set(value)):
        return [f"{key}={hydra_quoted(value)}"]
    items = [item.strip() for item in value[1:-1].split(",")]
    if value[:1] + value[-1:] != "[]" or not all(items) or set(_SPECIAL_CHARACTERS) & set("".join(items)):
        return []
    quoted = (item if _PLAIN_ITEM.fullmatch(item) else hydra_quoted(item) for item in items)
    return [f"{key}=[{','.join(quoted)}]"]


def _override_of_file(setting: FileSetting) -> Any:
    """Return Hydra's Override object of a setting of a file."""
    # because: hydra is slow to import
    from hydra.core.override_parser.types import Override, OverrideType, ValueType

    return Override(
        type=OverrideType.CHANGE, key_or_group=override_key(setting), value_type=ValueType.ELEMENT,
        _value=setting.value, input_line=setting,
    )  # fmt: skip


def sweep_refusal(override: Any, *, kind: str = "") -> str:
    """Return the error message for a Hydra Override object with several values, such as `a=1,2`, on a command that
    starts a single run. `kind` says what the key takes: "list", "number", or "" for anything else.
    """
    text = str(override.input_line)
    key, _, value = text.partition("=")
    each, hint = f" Add {way('-m')} to run each of them, or {way('--array')} to a Slurm job.", blend_hint(key, value)
    if "," in value and not set(_SPECIAL_CHARACTERS[1:]) & set(value):
        as_list = f" A list is {way(f'{key}=[{value}]')}"
        if kind == "list":
            return f"{text} names several values.{as_list}."
        if _THOUSANDS.fullmatch(value):
            number = way(f"{key}={value.replace(',', '')}")
            is_sweep = not any(part.startswith("0") for part in value.split(","))
            return f"{text} names several values. As one number it is {number}.{each if is_sweep else ''}"
        hint = "" if kind == "number" else hint or f"{as_list}, one text {way(f'{key}={hydra_quoted(value)}')}."
    return f"{text} names several values.{hint + each if key.startswith('data.') else each + hint}"


def blend_hint(key: str, value: str, instead_of: Sequence[str] = ()) -> str:
    """Return a sentence, to append to an error message, on how to train or validate on several datasets at once, for a
    user who gave a list to a key that takes one path, as in `data.path=a,b`, or who typed the words `instead_of`.
    Return "" in all other cases.
    """
    names = [name.strip() for name in value.removeprefix("[").removesuffix("]").split(",")]
    if len(names) == 1 or not all(names) or set(_SPECIAL_CHARACTERS) & set("".join(names)):
        return ""
    if key in ("data.valid_path", "data.valid_paths"):
        words = way(f"data.valid_paths={named_values(names)}", instead_of=instead_of or key)
        return f" To validate on each of them, type {words}."
    parts = ", ".join(f"{{path: {name}, epochs: 1}}" for name in names)
    words = way("data=blend", f"data.datasets=[{parts}]", instead_of=instead_of or key)
    return f" To mix them in one run, as much of each as there is, type {words}." if key == "data.path" else ""


def named_values(values: Sequence[str]) -> str:
    """Return texts, such as paths, as a mapping that a user can type, each under a name made of its last part:
    "{a: data/a, b: data/b}".
    """
    names = list[str]()
    for value in values:
        base = re.sub(r"[^A-Za-z0-9_-]", "_", PurePath(value).name) or "_"
        candidates = chain([base], (f"{base}-{number}" for number in count(2)))
        names.append(next(name for name in candidates if name not in names))
    return f"{{{', '.join(f'{name}: {value}' for name, value in zip(names, values, strict=True))}}}"


def apply_override(tree: dict[str, Any], override: Any) -> str | None:
    """Change `tree`, nested dicts and lists of settings, in place: set, add or remove the key that Hydra's Override
    object `override` names. Return an error message if the tree has no place for the key, else None.
    """
    key, text = str(override.key_or_group), override.input_line
    *path, last = key.split(".")
    node: Any = tree
    for depth, part in enumerate(path):
        if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
            continue
        child = node.get(part) if isinstance(node, dict) else part  # a list without this entry counts as one value
        if override.is_delete() and not isinstance(child, (dict, list)):
            return f"{text} removes a key that does not exist. {leave_out(text)}."
        if not (child is None or isinstance(child, (dict, list))):
            parent = ".".join(path[: depth + isinstance(node, dict)])
            value = way(f"{parent}={text.partition('=')[2]}", instead_of=text)
            return f"{text} sets a key of {parent}, which is a single value. Write {value}."
        if child is None:
            node[part] = {}
        node = node[part]
    if override.is_delete():
        if not isinstance(node, dict) or last not in node:
            return f"{text} removes a key that does not exist. {leave_out(text)}."
        del node[last]
    elif isinstance(node, list):
        if not (last.isdecimal() and int(last) < len(node)):
            return f"{text} names entry {last} of a list of {len(node)}. Count from 0, or give the whole list."
        node[int(last)] = override.value()
    else:
        node[last] = _merged(node.get(last), override.value())
    return None


def changed_list_entry(override: str, change: str) -> str:
    """Return an override that gives a whole list, such as data.datasets=[{path: x, weight: 0}], with the change of one
    entry, data.datasets[0].weight=1, made in it; unchanged if the entry does not exist.
    """
    parsed, changed = parse_overrides([override], {})[0], parse_overrides([f"value={change.partition('=')[2]}"], {})[0]
    steps = re.findall(r"[^.\[\]]+", change.partition("=")[0].removeprefix(parsed.key_or_group))
    node = value = parsed.value()
    try:
        for step in steps[:-1]:
            node = node[int(step) if isinstance(node, list) else step]
        node[int(steps[-1]) if isinstance(node, list) else steps[-1]] = changed.value()
    except (LookupError, TypeError, ValueError):
        return override
    return f"{parsed.key_or_group}={override_text(value)}"


def override_text(value: Any) -> str:
    """Return a value as the text of an override: texts in it get the quotes that Hydra's grammar needs."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(override_text, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}: {override_text(item)}' for key, item in value.items())}}}"
    return hydra_quoted(value) if isinstance(value, str) and not _PLAIN_TEXT.fullmatch(value) else show(value)


def hydra_quoted(text: str) -> str:
    """Return `text` in quotes, with quotes inside it escaped, so that Hydra's override grammar reads it as a single
    string.
    """
    # because: hydra is slow to import
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.double if "'" in text and '"' not in text else Quote.single).with_quotes()


def _merged(old: Any, new: Any) -> Any:
    """Return `old` updated with `new`, recursively, if both are dicts; otherwise return `new`. Neither argument is
    changed.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _merged(old.get(key), value) for key, value in new.items()}
    return new


def _limit_problem(text: str) -> str | None:
    """Return an error message if an override is too long, nests too deeply, has a number with too many digits or sets
    Hydra's own settings; else None.
    """
    key = text.partition("=")[0]
    depths = accumulate((sign in "[{(") - (sign in "]})") for sign in text)
    if len(text) > MAX_CHARACTERS or max(depths, default=0) > MAX_DEPTH:
        return f"{text[:40]}... is too long or nests too deeply. Put it into a file of settings, as in my.yaml."
    if number := _LONG_NUMBER.search(text, len(key)):
        return (
            f"{key} is given {number[0][:20]}..., which has {len(number[0])} digits; at most {MAX_DIGITS} are allowed. "
            f"Write {key}='TEXT' if it is a text."
        )
    if _HYDRA.match(key):
        words = [
            word.replace("VALUE", text.partition("=")[2].strip("[]"))
            for word in _HYDRA_WAYS_OUT.get(key.lstrip("~+"), ())
        ]
        out = f"{leave_out(text)}; `-m` runs every combination of values."
        way_out = f"Use {way(*words, instead_of=text)}." if words else out
        return f"{text} sets options of Hydra itself, which lmtrain does not use. {way_out}"
    return None


def _plus_problem(text: str) -> str | None:
    """Return an error message if an override has a number with a leading +, which the grammar would read as the number
    alone; None if it has none. `train.steps=+200` is more likely to mean 200 more.
    """
    key, _, value = text.partition("=")
    unquoted = _QUOTED.sub(lambda match: "_" * len(match[0]), value)
    if (match := _PLUS_NUMBER.search(unquoted)) is None:
        return None
    if key in ("train.steps", "train.tokens"):
        return (
            f"{text} is not {match[2]} more, since {key} is the length of the whole run. Give {match[2]} for so many "
            f"in all; for {match[2]} more, add the number that `lmtrain config explain {key} --run RUN` shows."
        )
    plain = way(f"{key}={value[: match.start(1)]}{value[match.end(1) :]}", instead_of=text)
    return f"{text} has {match[0].strip()}, but nothing can be added to a value. Write {plain}."


def _form_problem(words: Sequence[str], index: int, groups: Mapping[str, Sequence[str]]) -> str | None:
    """Return an error message if the word at `index` does not have the form `key=value`, `group=choice` or `~key`, else
    None. `groups` maps each config group to its choices, for suggestions.

    Return "" if the message about the previous word covers this one, as in `a = 1`.
    """
    if (problem := _cut_value_problem(words, index)) is not None:
        return problem
    text, before, after = words[index], words[index - 1] if index else "", words[index + 1 : index + 3]
    if (problem := _colon_problem(text, before, after)) is not None:
        return problem
    key, sign, value = text.partition("=")
    bare = key.lstrip("~+")
    if not sign and after and after[0].startswith("="):
        parts = after if after[0] == "=" else after[:1]
        joined = way(text + "".join(parts), instead_of=(text, *parts))
        return f"{text!r} has a space before its value. Type {joined}."
    if (text.startswith("=") and before and "=" not in before) or (index > 1 and before == "=" and not sign):
        return ""
    if _takes_next_word(before, text, groups) and not _is_text_path(before) and "/" not in before:
        return ""
    if not bare:
        return f"{text!r} is not an override, since it names no key. Write key=value."
    if bare != bare.strip() and _KEY.fullmatch(bare.strip()):
        return (
            f"{text!r} has a space next to its key. Type {way(f'{key.strip()}={value.strip()}', instead_of=text)}."
        )
    if (group := bare.partition("@")[0]) != bare and group in groups:
        choice = way(f"{group}={value}", instead_of=text)
        return f"{text!r} is not an override, since @ has no meaning here. Write {choice}."
    if "@" in bare:
        return f"{text!r} is not an override, since @ has no meaning here. Write key=value or group=choice."
    if not sign and _is_run(text):
        go_on, begin = (way(words, instead_of=text) for words in (f"run.dir={text}", f"checkpoint.init_from={text}"))
        source = way("--from-run", text, instead_of=text)
        return (
            f"{text!r} is the folder of a run. Write {go_on} to go on with it, {source} for another run from its last "
            f"step, or {begin} to begin with its weights."
        )
    if not sign and _is_text_path(text):
        return _bare_texts_problem(text, [word for word in words if "=" not in word and _is_text_path(word)], words)
    if not sign and _is_dataset(text):
        return _bare_datasets_problem(text, [word for word in words if "=" not in word and _is_dataset(word)])
    if match := re.match(r"([\w.]+)\[", bare):
        return f"{text!r} names an entry of a list. Give the whole list: {match[1]}=[FIRST,SECOND]."
    if not _KEY.fullmatch(key):
        return f"{text!r} is not an override ({bare!r} is not a valid key). Write key=value or group=choice."
    if sign or key.startswith("~"):
        return None
    if matching_groups := [group for group, choices in groups.items() if text in choices]:
        choice = way(f"{matching_groups[0]}={text}", instead_of=text)
        return f"{text!r} is not an override, since it names no key. Did you mean {choice}?"
    if text.endswith(".py"):
        return (
            f"{text!r} is a Python file, but settings are plain data. {leave_out(text)}; give settings as key=value, "
            "or in a YAML file."
        )
    if text.endswith(_OTHER_FILES):
        return (
            f"{text!r} is not read: a file of settings has the suffix .yaml. {leave_out(text)}; give settings as "
            "key=value, or in such a file."
        )
    if after and _takes_next_word(text, after[0], groups):
        joined = way(f"{text}={after[0]}", instead_of=(text, after[0]))
        return f"{text!r} and its value are two words. Write {joined}."
    if "=" in before and not set(_SPECIAL_CHARACTERS) & set(before) and not Path(text).exists():
        key, _, value = before.partition("=")
        joined = way(f"{key}={hydra_quoted(f'{value} {text}')}", instead_of=(before, text))
        return f"{text!r} is not an override, since it names no key. If it belongs to the word before, type {joined}."
    return f"{text!r} is not an override, since it gives no value. Write {text}=VALUE."


def _cut_value_problem(words: Sequence[str], index: int) -> str | None:
    """Return the error message for a list or mapping that a shell has cut at its blanks, as in `data.split=[98, 1, 1]`,
    if the word at `index` is its begin; "" if the word is another part of it; None if it is none.
    """
    for first in range(index, -1, -1):
        value = words[first].partition("=")[2]
        if value[:1] in _CLOSING_BRACKETS and _first_unmatched(value) in _CLOSING_BRACKETS:
            break
    else:
        return None
    for last in range(first + 1, len(words)):
        whole = " ".join(words[first : last + 1])
        if not _first_unmatched(whole.partition("=")[2]):
            if last < index:
                return None
            typed = words[first : last + 1]
            text = f"{whole} is cut at its blanks by the shell. Quote it: {way(whole, instead_of=typed)}."
            return text if first == index else ""
    return None


def _colon_problem(text: str, before: str, after: Sequence[str]) -> str | None:
    """Return the error message for a setting that is typed with a colon, as in `train.steps: 100`, if `text` is its
    key; "" if `text` is its value alone; None if there is no colon.
    """
    if before.endswith(":") and _COLON.fullmatch(before) and "=" not in text:
        return ""
    if (match := _COLON.fullmatch(text)) is None or os.path.lexists(text):
        return None
    words = [text] if match[2] else [text, *after[:1]]
    new = f"{match[1]}={(match[2] or ' '.join(words[1:])).strip()}"
    return f"{' '.join(words)!r} has a colon before its value. Write {way(new, instead_of=words)}."


def _takes_next_word(text: str, word: str, groups: Mapping[str, Sequence[str]]) -> bool:
    """Return whether `text` is a key without a value, and the word after it is that value, as in `train.steps 100`."""
    is_key = "." in text or text in groups or text in _FOREIGN_KEYS
    return "=" not in text + word and bool(_KEY.fullmatch(text)) and is_key


def _bare_texts_problem(text: str, texts: Sequence[str], words: Sequence[str]) -> str:
    """Return the error message for `text`, one of the words `texts` that are the paths of texts; "" if the message for
    the first of them covers it. A text that data.text names in another of the `words` is kept.
    """
    given = next((word for word in words if word.startswith("data.text=")), "")
    before = given.removeprefix("data.text=").removeprefix("[").removesuffix("]")
    names = ",".join(path if _PLAIN_TEXT.fullmatch(path) else hydra_quoted(path) for path in texts)
    names = f"{before},{names}" if before else names
    is_one = len(texts) == 1 and not before
    replaced = (given, *texts) if given else texts
    word = way(f"data.text={names}" if is_one else f"data.text=[{names}]", instead_of=replaced)
    if len(texts) == 1:
        return f"{text!r} is no setting. To train on the text in it, write {word}."
    shown = join_few(map(repr, texts))
    return "" if text != texts[0] else f"{shown} are no settings. To train on the texts in them, write {word}."


def _bare_datasets_problem(text: str, datasets: Sequence[str]) -> str:
    """Return the error message for `text`, one of the words `datasets` that are the prefixes of datasets; "" if the
    message for the first of them covers it.
    """
    if len(datasets) == 1:
        return f"{text!r} is a dataset. Write {way(f'data.path={text}', instead_of=text)}."
    way_out = blend_hint("data.path", ",".join(datasets), instead_of=datasets)
    way_out = way_out or " List them in data.datasets, with data=blend."
    return "" if text != datasets[0] else f"{join_few(map(repr, datasets))} are datasets, not settings.{way_out}"


def _is_dataset(text: str) -> bool:
    """Return True if `text` is the prefix of a dataset, without .bin and .idx."""
    return os.path.isfile(f"{text}.idx") or os.path.isfile(f"{text}-00000.idx")


def _is_run(text: str) -> bool:
    """Return True if `text` is the folder of a run."""
    return os.path.isfile(f"{text}/config.json") and os.path.isfile(f"{text}/metrics.jsonl")


def _is_text_path(text: str) -> bool:
    """Return True if `text` is the path of an existing file with a suffix .txt, .jsonl or .parquet, or of a folder that
    directly holds such a file.
    """
    path = Path(text)
    files = path.iterdir() if path.is_dir() else [path]
    return any({".txt", ".jsonl", ".parquet"} & set(file.suffixes) and file.is_file() for file in files)


def _syntax_problem(text: str) -> str:
    """Return the error message for an override that Hydra's grammar rejects: it names the unmatched quote or bracket or
    the special characters, and shows how to quote the value.
    """
    key, _, value = text.partition("=")
    if value.startswith("="):
        return f"{text!r} is not an override, since it has = twice. Write {way(key + value, instead_of=text)}."
    as_text = f"type {way(f'{key}={hydra_quoted(value)}', instead_of=text)}"
    unmatched = _first_unmatched(value)
    if unmatched in _CLOSING_BRACKETS and value.startswith(unmatched):
        closed = way(f"{text}{_CLOSING_BRACKETS[unmatched]}", instead_of=text)
        return f"{text} opens a {unmatched} that is not closed. Type {closed}, or, if it is one text, {as_text}."
    if unmatched in "'\"" and unmatched and value.count(unmatched) == 1 and _PLAIN_ITEM.fullmatch(
        plain := value.strip(unmatched)
    ):
        plain_word = way(f"{key}={plain}", instead_of=text)
        return f"{text} has a quote that is not closed. Write {plain_word}, or, if it belongs to the text, {as_text}."
    if unmatched:
        sign_words = "a quote" if unmatched in "'\"" else f"a {unmatched}"
        fault = (
            f"closes {sign_words} that is not open"
            if unmatched in _CLOSING_BRACKETS.values()
            else f"has {sign_words} that is not closed"
        )
        return f"{text} {fault}. If it belongs to the text, {as_text}."
    if value[:1] + value[-1:] == "()":
        as_list = way(f"{key}=[{value[1:-1].rstrip(',')}]", instead_of=text)
        return f"{text} has ( ), and a list stands in [ ] here. Write {as_list}."
    special = " ".join(sorted({sign for sign in value if sign in _SPECIAL_CHARACTERS}))
    if not special:
        return f"{text!r} is not an override ({key!r} is not a valid key). Write key=value or group=choice."
    return f"{text} cannot be read, since {special} must be quoted within a value. If it is one text, {as_text}."


def _first_unmatched(value: str) -> str:
    """Return the first character of `value` that is a quote or bracket without its partner; "" if all have one."""
    stack: list[str] = []
    quote = ""
    for position, sign in enumerate(value):
        if quote:
            quote = "" if sign == quote and value[position - 1] != "\\" else quote
        elif sign in "'\"":
            quote = sign
        elif sign in _CLOSING_BRACKETS:
            stack.append(sign)
        elif sign in _CLOSING_BRACKETS.values() and (not stack or _CLOSING_BRACKETS[stack.pop()] != sign):
            return sign
    return quote or (stack[-1] if stack else "")
