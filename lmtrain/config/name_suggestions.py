"""Suggestions for misspelled setting names, across all groups and from the names that other tools use.

Called by build for an unknown key and by the command line for an unknown option. The answers are text to type.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, Union, get_args, get_origin

from lmtrain.config.foreign_names import FOREIGN_NAMES
from lmtrain.config.ideas_without_counterpart import idea_of
from lmtrain.config.names_without_counterpart import (
    is_environment_variable,
    sentence_about,
    sentence_about_variable,
)
from lmtrain.config.settings_base import Choice, Settings, classes_of, kinds
from lmtrain.errors import leave_out, spelling_hint, way

_KEY_BY_FOREIGN_NAME = {name: key for key, names in FOREIGN_NAMES.items() for name in names.split()}
_VALUE_BY_FOREIGN_VALUE = {
    "bert": "bert_base", "adamw_torch": "adamw", "swish": "silu", "gelu_new": "gelu_tanh", "wandb": "online",
    "gpu": "cuda", "nvidia": "cuda", "half": "fp16", "float16": "fp16", "16": "fp16", "16-mixed": "fp16",
    "bfloat16": "bf16", "float32": "fp32", "float": "fp32", "32": "fp32", "rope": "rotary", "absolute": "learned",
    "1F1B": "1f1b", "zero_bubble": "zb_h1", "selective": "attention", "linear_decay": "linear", "noop": "none",
    "transformers": "hf", "huggingface": "hf", "safetensors": "hf", "mcore": "megatron", "gpu:0": "cuda",
    "false": "none", "no": "none", "off": "none", "true": "full", "yes": "full", "on": "full",
    "none": "constant", "null": "constant", "const": "constant", "fixed": "constant", "flat": "constant",
    **dict.fromkeys(
        ("bertwordpiecetokenizer", "bertwordpiece", "bertwordpiececase", "bertwordpiecelowercase", "berttokenizer",
         "berttokenizerfast"), "wordpiece",
    ),
    **dict.fromkeys(
        ("gpt2bpetokenizer", "bytelevelbpetokenizer", "bytelevelbpe", "bytelevel", "gpt2tokenizer", "gpt2tokenizerfast",
         "byte-level-bpe"), "bpe",
    ),
}  # fmt: skip


_WORDS_FOR_NUMBERS = ("null", "none", "auto", "inf", "nan", "half", "never", "all")
_SWITCHED = ("true", "false", "yes", "no", "on", "off")
ANOTHER_KIND = "It is one of "  # the begin of the answer for a key that one other kind of its group has


@dataclasses.dataclass(frozen=True)
class SettingNames:
    """The names to suggest for a misspelled setting: all keys of the settings class `root`, and the choices of its
    groups.
    """

    root: type[Settings]
    groups: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    typed: Mapping[str, str] = dataclasses.field(default_factory=dict)  # key -> value as typed on the command line

    def suggest_overrides(self, path: str, value: str) -> list[str]:
        """Return up to three overrides `key=value` that the user may have meant by the unknown key `path` with the
        value `value`; [] if none is close.
        """
        parent, _, name = path.rpartition(".")
        word = name.lower().replace("-", "_")
        # because: only a plan has a machine's figures, and stages are named by the user
        known_keys = {
            key: hint for key, hint in types_by_key(self.root).items()
            if get_origin(hint) is not dict and (not key.startswith("hardware.") or parent == "hardware")
        }  # fmt: skip
        if parent in self.groups and value in self.groups[parent]:
            return [f"{parent}={value}"]
        if word in self.groups and not parent:
            return [self._suggested_choice(word, value)]
        without_repeats = ".".join(part for part, _ in groupby(path.split(".")))  # files may repeat their group's name
        if without_repeats in known_keys:
            return [self._suggested_override(without_repeats, value)]
        if (dotted := path.lower().replace("_", ".", 1)) in known_keys and path.lower() not in _KEY_BY_FOREIGN_NAME:
            return [self._suggested_override(dotted, value)]
        below = [key for key in known_keys if key.endswith(f".{path}")] if parent else []  # the key without its group
        matches = below or [key for key in known_keys if key.rpartition(".")[2] == word]
        # because: in its own group, decay is more likely a part of a name, weight_decay, than the name in another group
        in_group = [key for key in known_keys if key.rpartition(".")[0] == parent and key.endswith(f"_{word}")]
        if parent and len(in_group) == 1 and not any(key.startswith((f"{parent}.", "train.")) for key in matches):
            matches = in_group
        matches = [key for key in matches if _may_be(value, known_keys.get(key, str))] or matches
        if len(matches) > 3:
            matches = [key for key in matches if key.startswith(f"{parent}.")] or matches[:3]
        if parent:  # because: it is misspelt
            matches.sort(key=lambda key: difflib.SequenceMatcher(None, key, path).ratio(), reverse=True)
        # because: a user who types `train.batch_size` does not mean the batch size of evaluations
        if word in _KEY_BY_FOREIGN_NAME and not (parent and any(key.startswith(f"{parent}.") for key in matches)):
            matches = [_KEY_BY_FOREIGN_NAME[word]]
        matches = matches or [key for key in _near_keys(path, known_keys) if _may_be(value, known_keys.get(key, str))]
        return [self._suggested_override(key, value) for key in matches]

    def refusal(self, path: str, value: str, known_keys: typing.Iterable[str]) -> str:
        """Return the whole error message that the dotted key `path` is not a setting, with a suggestion what to type
        instead. `value` is the text typed for it, `known_keys` are the valid keys of its group.
        """
        if (stage := self._split_stage_key(path)) is None:
            return f"{path}={value} is not a setting. {self.way_out(path, value, known_keys)}"
        prefix, key = stage
        group, names = key.partition(".")[0], list(known_keys)
        if group not in names and (key in types_by_key(self.root) or key in self.groups):
            whole = way(f"{key}={value}", instead_of=path)
            return f"{path}={value} cannot differ between the stages of a run. Set {whole} for the whole run."
        if "." not in key and (closest := _near_sibling(key, names)):
            near = way(f"{prefix}.{closest}={value}", instead_of=path)
            return f"{path}={value} is not a setting. Did you mean {near}?"
        words = [word for word in self.suggest_overrides(key, value) if word.partition(".")[0] in names]
        ways = [way(f"{prefix}.{word}", instead_of=path) for word in words]
        way_out = f"Did you mean {' or '.join(ways)}?" if ways else ""
        return f"{path}={value} is not a setting. {way_out or spelling_hint(key, names)}"

    def _keys_of(self, group: str, kind: str) -> frozenset[str]:
        """Return the dotted keys of the settings that a kind of a group has; none if the group has no such kind."""
        base = typing.get_type_hints(self.root).get(group)
        if not isinstance(base, type) or not issubclass(base, Choice) or base.kind:
            return frozenset()
        cls = kinds(base).get(kind)
        return frozenset(key for key, _ in _iter_key_types(cls, group)) if cls else frozenset()

    def _split_stage_key(self, path: str) -> tuple[str, str] | None:
        """Split a key such as "stages.decay.optim.lr" into ("stages.decay", "optim.lr"). Return None for keys that are
        not within a training stage.
        """
        field, _, rest = path.partition(".")
        name, _, key = rest.partition(".")
        hint = typing.get_type_hints(self.root).get(field)
        return (f"{field}.{name}", key) if key and get_origin(hint) is dict else None

    def way_out(self, path: str, value: str, known_keys: typing.Iterable[str]) -> str:
        """Return a sentence, the end of an error message, that tells the user what to type in place of the unknown key
        `path`. `value` is the text typed for it, `known_keys` are the valid keys of its group.
        """
        if is_variable(path, self.root):
            return sentence_about_variable(f"{path}={value}")
        if sentence := sentence_about(path.lower().replace("-", "_")):
            return sentence
        if path in types_by_key(self.root):  # the key belongs to another kind of its group
            group = path.partition(".")[0]
            owners = [kind for kind in self.groups.get(group, ()) if path in self._keys_of(group, kind)]
            if len(owners) == 1 and group not in self.typed:
                either = f"add that, or {leave_out(path, shown='leave it out')}."
                return f"{ANOTHER_KIND}{way(f'{group}={owners[0]}')}; {either}"
            others = f"`lmtrain config explain {path}` lists those that have it."
            return f"{leave_out(path)}, or choose another {group}; {others}"
        words = self.suggest_overrides(path, value)
        ways = [way(word, instead_of=path) for word in words]
        if ways:
            return f"Did you mean {' or '.join(ways)}?"
        if sentence := idea_of(path) or idea_of(value):
            return sentence
        near = nearest_name(path.rpartition(".")[2], known_keys := sorted(known_keys))
        return f"Did you mean {near}?" if near else spelling_hint("", known_keys)

    def _suggested_override(self, key: str, value: str) -> str:
        """Return the override `key=value` to suggest to the user. If the key accepts only certain values, an invalid
        `value` is replaced by the nearest of them.
        """
        if "." not in key:
            return self._suggested_choice(key, value)
        options = union_members(types_by_key(self.root).get(key))
        if float in options and value.endswith("%") and (share := number_meant(value)):
            return f"{key}={share}"
        choices = [str(choice) for option in options if get_origin(option) is Literal for choice in get_args(option)]
        return f"{key}={closest_value(value, choices) or value if choices else value}"

    def _suggested_choice(self, group: str, value: str) -> str:
        """Return the override `group=choice` to suggest, with the nearest existing choice, or `group=NAME` if none is
        close.
        """
        choices = self.groups.get(group, ())
        return f"{group}={value if value in choices else closest_value(value, choices) or 'NAME'}"


def is_variable(name: str, root: type[Settings]) -> bool:
    """Return whether a name is written as environment variables are, and is no setting of `root` in capitals."""
    return is_environment_variable(name) and name.lower() not in {key.rpartition(".")[2] for key in types_by_key(root)}


def _may_be(value: str, hint: Any) -> bool:
    """Return whether a value may be meant for a setting with this type hint: a word is not meant for a number."""
    options = {*union_members(hint)}
    if value.lower() in _SWITCHED:
        return bool in options or not options <= {int, float, type(None)}
    is_word = re.fullmatch(r"[A-Za-z_]{3,}", value) and value.lower() not in _WORDS_FOR_NUMBERS
    return not is_word or not options <= {int, float, bool, type(None)}


def _near_keys(path: str, known_keys: Iterable[str]) -> list[str]:
    """Return the keys that the unknown key `path` may be misspelled for, in its own group, as a whole, in the words of
    another tool or without its group; [] if none is near, as for a name of something else.
    """
    parent, _, name = path.rpartition(".")
    word = name.lower().replace("-", "_")
    known_keys = list(known_keys)
    siblings = {key.rpartition(".")[2]: key for key in known_keys if parent and key.rpartition(".")[0] == parent}
    if near := _near_sibling(name, siblings) or _near_sibling(word, siblings):
        return [siblings[near]]
    groups = {key.rpartition(".")[0] for key in known_keys} - {""}
    if parent and (group := nearest_name(parent, groups)) and group != parent:
        return _near_keys(f"{group}.{name}", known_keys)
    if near := nearest_name(word, _KEY_BY_FOREIGN_NAME):
        return [_KEY_BY_FOREIGN_NAME[near]]
    # because: the settings within a group's part, such as train.rampup.samples, are not meant by a name alone
    near = nearest_name(word, {key.rpartition(".")[2] for key in known_keys if key.count(".") == 1})
    return [key for key in known_keys if key.rpartition(".")[2] == near][:3]


def _near_sibling(word: str, names: Iterable[str]) -> str | None:
    """Return the one of a group's `names` that `word` is misspelled or cut short for; None if there is none."""
    names = sorted(names)
    if near := nearest_name(word, names) or next((name for name in names if is_shortened(word, name)), None):
        return near
    longer = [name for name in names if word and name.startswith(word)]
    return longer[0] if len(longer) == 1 else None


def number_meant(value: object) -> str | None:
    """Return the number that a user probably meant by a text that is none: `10%` -> "0.1", `3/4` -> "0.75", `1e-3x` ->
    "1e-3". Return None if the text does not begin with a number, or if a unit such as k follows, which multiplies it.
    """
    pattern = r"\+?(-?\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*(?:(%)|/\s*([1-9]\d*)|(?![kmbt]$)[a-z_]*)"
    number = re.fullmatch(pattern, str(value).lower().rstrip(";,"))
    if number is None:
        return None
    divisor = 100 if number[2] else int(number[3] or 1)
    return number[1] if divisor == 1 else f"{float(number[1]) / divisor:g}"


def closest_value(value: str, known_values: typing.Iterable[str]) -> str | None:
    """Return the entry of `known_values` that the user probably meant by `value`: the same word, lmtrain's word for
    another tool's value, or the nearest spelling. Return None if none is close.

    Of a name on Hugging Face's hub, such as Qwen/Qwen3-0.6B, the part after the owner counts.
    """
    known_values = list(known_values)
    for word in (value, value.lower()):
        if (translated := _VALUE_BY_FOREIGN_VALUE.get(word, word)) in known_values:
            return translated
    extensions = [known_value for known_value in known_values if known_value.startswith(f"{value}_")]
    prefixes = [
        known_value
        for known_value in known_values
        if value and (value.startswith(known_value) or known_value.startswith(value))
    ]
    spellings = (value, value.rpartition("/")[2].lower())
    similar = (
        word for text in spellings for word in difflib.get_close_matches(text, known_values, n=1, cutoff=0.6)
        if word != "none" or difflib.SequenceMatcher(None, text, word).ratio() > 0.7  # because: it turns something off
    )  # fmt: skip
    return next(iter([*extensions, *similar, *prefixes]), None)


def suggest_value(value: str, known_values: typing.Iterable[str], mark: Callable[[str], str] = str) -> str:
    """Return a sentence that tells the user what to type in place of an unknown `value`: "Did you mean X?" if
    `closest_value` finds an X in `known_values`, else a list of all known values. `mark` marks X as a way out.
    """
    known_values = list(known_values)
    closest = closest_value(value, known_values)
    # because: a value that turns something off is close to more words than it is meant by
    known = f"Known: {', '.join(sorted(known_values))}."
    return f"Did you mean {mark(closest)}?" if closest else known if known_values else spelling_hint(value, ())


def types_by_key(root: type[Settings]) -> dict[str, Any]:
    """Return dotted key -> type hint for every setting below the class `root`; of a choice, the settings of all its
    kinds.
    """
    return dict(_iter_key_types(root, ""))


def _iter_key_types(cls: type[Settings], path: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, type hint) for every single setting of the class `cls` and of the settings classes nested in
    it, of all kinds if there is a choice. `path` is the dotted key of `cls` within the config, "" for the whole config.
    """
    for kind_class in classes_of(cls):
        hints = typing.get_type_hints(kind_class)
        for field in dataclasses.fields(kind_class):
            key, hint = f"{path}.{field.name}" if path else field.name, hints[field.name]
            nested = [
                option for option in union_members(hint) if isinstance(option, type) and issubclass(option, Settings)
            ]
            for option in nested:
                yield from _iter_key_types(option, key)
            if not nested:
                yield key, hint


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union type; for any other type, the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names`, which may be dotted, that `name` probably is, misspelled; None if none is near."""
    near = [(_distance(name, known), known) for known in sorted(set(names)) if is_near(name, known)]
    return min(near)[1] if near else None


def is_near(name: str, known: str) -> bool:
    """Return whether `name` has the words of `known` in another order, or is one edit away from it, or two if both are
    long: a letter more, less or changed, or two letters swapped. Another first letter makes another word.
    """
    if sorted(_words(name)) == sorted(_words(known)):
        return True
    shortest = min(len(name), len(known))
    allowed = 0 if shortest < 2 else 1 if shortest < 9 else 2
    if abs(len(name) - len(known)) > allowed or {name[0], *name[:2]}.isdisjoint(known[:1]):
        return False
    return _distance(name, known) <= allowed


def is_shortened(name: str, known: str) -> bool:
    """Return whether `known` begins with the whole words of `name`, as warmup_steps does with warmup, or is `name`
    without some of its words.
    """
    short, long = sorted((_words(name), _words(known)), key=len)
    return long[: len(short)] == short or long[-len(short) :] == short


def _words(name: str) -> list[str]:
    return [word.removesuffix("s") for word in name.replace(".", "_").split("_")]


def _distance(first: str, second: str) -> int:
    """Return how many letters must be added, removed, changed or swapped with the next to make one text of another."""
    rows = [list(range(len(second) + 1))]
    for i, letter in enumerate(first, 1):
        row, above = [i], rows[-1]
        for j, other in enumerate(second, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != other)))
            if i > 1 and j > 1 and (letter, first[i - 2]) == (second[j - 2], other):
                row[j] = min(row[j], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]
