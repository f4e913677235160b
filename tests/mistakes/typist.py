"""Types what an error advises, again and again, and judges where that ends.

The line that an error prints below `Type:` is typed as it stands. Now and then another of the ways that the error holds
is taken, or the example that it shows.
"""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from lmtrain import units
from lmtrain.cli.settings_keys.parse_typed_line import parse_line
from lmtrain.config.compose_run_settings import group_choices
from lmtrain.config.name_suggestions import is_near
from lmtrain.errors import REFUSED_CODES, Way, shell_quoted
from lmtrain.start.other_tools.typed_line import fits
from tests.mistakes.grammar import Line, right_value, settings
from tests.mistakes.runner import Outcome

ROUNDS = 2  # lines to type until a command is accepted, or refused for good
# words of the libraries below, which nobody who makes a mistake should have to read, and marks that should be gone
RAW = (
    "Traceback", "mismatched input", "token recognition", "no viable", "extraneous input", "omegaconf", "OmegaConf",
    "while scanning", "while parsing", "ScannerError", "ParserError", "defaults list_", "full_key", "object_type",
    "LexerNoViable", "ConfigComposition", "Could not override", "Could not append", "MissingConfig", "hydra.errors",
    "Unsupported interpolation", "GrammarParseError", "InterpolationKey", "codec can't", "Errno", "search path:",
    "Value error,", "\x02", "\x03", "\\x02", "\\x03",
)  # fmt: skip
# a setting or an option with a value that can be typed, and no place in capitals
_ADVICE = re.compile(r"(?:^|\s)(?:[a-z_]+\.)[a-z_.]+=(?![A-Z\[{])\S|(?:Use|Write|Add|Type|type|Set|set) --[a-z]")
# what to type for a place in capitals
_PLACES = {
    "N": "2", "PREFIX": "data/train", "DIR": "out3", "FILE": "notes.txt", "PATH": "out3", "RUN": "runs/a",
    "TEXT": "words", "CHECKPOINT": "runs/a", "INPUT": "docs.jsonl", "TOKENIZER": "tokenizer", "KEY": "text",
}  # fmt: skip
# the begin of a problem about an option with a value
_OPTION_WITH_VALUE = re.compile(r"(?:^error: |^  \d+\. )(--[a-z-]+)[ =](\S*) (?:is|does|has)\b", re.MULTILINE)
OFF = ("null", "[]", "{}", "false", "none", "")
ASKS_OFF = (*OFF, "none.yaml", "other/none", "0", "no", "off", "0.0", "nul")


@dataclass
class Trial:
    """The trial of one wrong line: how it ended, the faults of the answers, and all lines typed with their answers."""

    line: Line
    end: str = ""  # accepted, open (the advice leaves the value to the user), taken (it was no mistake)
    faults: list[str] = field(default_factory=list)
    steps: list[tuple[list[str], str]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # what the typist has chosen to leave out

    def __str__(self) -> str:
        steps = "".join(f"  $ lmtrain {shlex.join(words)}\n{said[-1500:]}" for words, said in self.steps)
        return f"{', '.join(self.faults)} [{', '.join(self.line.kinds)}]\n{steps}"


def try_line(runner: Callable[[list[str]], Outcome], line: Line, rng: random.Random, end_text: str = "") -> Trial:
    """Type the line, and then what its errors advise. `end_text` is the error with which the right line of this verb
    ends, if it cannot be accepted.
    """
    trial, words, seen, is_guessed = Trial(line), list(line.words), set[tuple[str, ...]](), False
    for round_ in range(ROUNDS + 1):
        seen.add(tuple(words))
        outcome = runner(words)
        trial.steps.append((words, "" if outcome.is_accepted else outcome.text))
        trial.faults += _faults(outcome, words)
        if line.kinds == ("other word",) and "--help` lists its options" in outcome.text:
            trial.faults.append("knows nothing of other tools")
        if trial.faults:
            return trial
        if outcome.is_accepted or (end_text and outcome.text == end_text):
            trial.end = "accepted" if round_ else "taken"
            lost = list(_lost(line, trial, outcome)) if outcome.is_accepted else []
            if lost and (not line.meant or runner(list(line.meant)).is_accepted):
                trial.faults += [f"lost {value}" for value in lost]
            return trial
        if is_guessed:
            trial.end = "open"  # because: what was filled in is not the answer's fault
            return trial
        is_guessed = bool(re.search(r"\nType, with .*VALUE.* filled in:", outcome.text))
        following = _next_words(words, outcome, rng if round_ == 0 else None, trial)
        if isinstance(following, str):
            trial.faults.append(following)
            return trial
        if following is None:
            trial.end = "open"
            return trial
        if tuple(following) in seen:
            trial.faults.append("a circle")
            return trial
        words = following
    trial.faults.append("advice that is refused")
    return trial


def _faults(outcome: Outcome, words: Sequence[str]) -> Iterator[str]:
    yield from (f"says {word!r}" for word in RAW if word in outcome.text)
    if outcome.code == 1 and not outcome.is_accepted:
        yield "no user's error"
    if outcome.written and outcome.code in REFUSED_CODES:
        yield f"is refused and has written {outcome.written}"
    if len(outcome.ways) == 1 and not outcome.ways[0] and (shown := _ADVICE.search(_advice_of(outcome.text))):
        yield f"unheld advice {shown[0].strip()}"
    typed = {form for word in words for part in (word, word.partition("=")[2]) for form in _forms(part)}
    yield from (
        f"names {option} {value}, which was not typed"
        for option, value in _OPTION_WITH_VALUE.findall(outcome.text)
        if not set(_forms(value)) & typed and value not in " ".join(words) and value.lstrip(".") not in " ".join(words)
    )
    subjects = re.findall(r"^  \d+\. (\S+=\S*)", outcome.text, re.MULTILINE)
    yield from (f"two entries for {subject}" for subject in {s for s in subjects if subjects.count(s) > 1})


def _advice_of(text: str) -> str:
    """Return what an error says after its first sentence, without commands in backticks and on lines of their own."""
    message = re.sub(r"`[^`]*`", "", text.partition("error: ")[2].partition("\nType")[0].partition("\n ")[0])
    return message.partition(". ")[2]


def _next_words(words: list[str], outcome: Outcome, rng: random.Random | None, trial: Trial) -> list[str] | str | None:
    """Return the line to type next, None if the error leaves that to the user, or the fault of its advice. With `rng`
    it may follow from another way than the one in the line shown.
    """
    shown = shown_line(outcome.text)
    ways = [[Way(tuple(new), tuple(old), example) for new, old, example in each] for each in outcome.ways]
    command = parse_line(words)
    if shown is not None and (rng is None or rng.random() < 0.7):
        following = shown
    elif rng is None:
        return None
    else:
        for each in ways:
            possible = [way for way in each if fits(command, way)]
            if not possible:
                return shown
            way = rng.choice(possible)
            before, command = command, parse_line(command.apply(way).words)
            gone = command.lost_units(before) if not way.new else []
            trial.dropped += [" ".join(map(shell_quoted, unit)) for unit in gone]
        if not ways:
            return shown
        following = command.words
    says_so = "eave it out" in outcome.text or "exactly one of them must be set" in outcome.text
    return ("" if says_so else _switches_off(words, following)) or following


def shown_line(text: str) -> list[str] | None:
    """Return the words of the line below `Type:`, as a shell reads them, with places such as PREFIX filled in. Return
    None if there is none, or what its places stand for is not known.
    """
    found = re.search(r"\nType(?:, with (.+) filled in)?:\n(.*)", text, re.DOTALL)
    if not found:
        return None
    words = shlex.split(found[2].replace("\\\n", " "))[1:]
    filled = [_filled(word, found[1].split(" and ") if found[1] else ()) for word in words]
    return None if None in filled else [word for word in filled if word is not None]


def _filled(word: str, places: Sequence[str]) -> str | None:
    """Return a word with the place in capitals filled in, if it is one of `places`; None if nothing is known for it."""
    key, sign, place = word.rpartition("=")
    if place not in places:
        return word
    if place == "NAME" and key in group_choices():
        return f"{key}={group_choices()[key][0]}"
    if place == "VALUE" and key in settings():
        value = right_value(settings()[key][0], random.Random(key))
        return None if value[0] in "[{" else f"{key}={value.replace('false', 'true')}"
    return f"{key}{sign}{_PLACES[place]}" if place in _PLACES else None


def _switches_off(before: Sequence[str], after: Sequence[str]) -> str:
    """Return a fault if a setting that asked for something is one that asks for nothing."""
    asked = {word.partition("=")[0]: word.partition("=")[2] for word in before if "=" in word}
    asked_off = {key.rpartition(".")[2] for key, value in asked.items() if value.lower() in ASKS_OFF}
    for word in after:
        key, _, value = word.partition("=")
        if (
            "=" in word
            and key in asked
            and key.rpartition(".")[2] not in asked_off
            and value.lower() in OFF
            and asked[key].lower().strip("[]'\",;=") not in ASKS_OFF
            and not any(is_near(asked[key].lower(), off) for off in OFF[:1] + OFF[3:5])
            and not asked[key].lstrip("[").startswith(("-", "0"))
        ):
            return f"switches off {key}"
    return ""


def _lost(line: Line, trial: Trial, outcome: Outcome) -> Iterator[str]:
    """Yield each value of the line that the accepted command has not got, and that no answer says was left out. What
    there is a right line for need not be left out.
    """
    parts = (part for value in outcome.values for part in (value, *re.split(r"[\[\]{}=, ]+", value)))
    got = {form for part in parts for form in _forms(part)}
    text = " ".join((*outcome.values, *trial.dropped)).lower()
    said = "" if line.has_right_words else "\n".join(
        part for _, answer in trial.steps
        for part in re.findall(r"Left out:.*?(?=\nType|\Z)|[^\n]* too much for |[^\n]*eave it out", answer, re.DOTALL)
    )  # fmt: skip
    for value in line.kept:
        if not set(_forms(value)) & got and value.lower() not in text and value not in said:
            yield value


def _forms(value: str) -> Iterator[str]:
    """Yield how a value may be written: as it is, as a number, as a count or a size."""
    yield value.strip("'\"").lower()
    for parse in (float, units.parse_count, units.parse_bytes, units.parse_seconds):
        with suppress(ValueError, OverflowError):
            yield str(float(parse(value)))
