"""One mistake, what is asked of every answer to one, and a typist who does what the answer says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CODES = {2, 65, 66, 73, 74, 78}
# words of the libraries below, which nobody who makes a mistake should have to read
RAW = (
    "Traceback", "mismatched input", "token recognition", "no viable", "extraneous input", "omegaconf", "OmegaConf",
    "while scanning", "while parsing", "ScannerError", "ParserError", "defaults list_", "full_key", "object_type",
    "LexerNoViable", "ConfigComposition", "Could not override", "Could not append", "MissingConfig", "hydra.errors",
    "Unsupported interpolation", "GrammarParseError", "InterpolationKey", "codec can't", "Errno", "search path:",
    "Value error,", "Input should",
)  # fmt: skip
_FRAGMENT = re.compile(r""""[^"\s=]+=[^"]*"|'[^'\s=]+=[^ ]*'|[\w.+~/-]+=(?:\[[^\]]*\]|[^\s,]*[^\s,.?])""")
_PLACES = {"VALUE": "1", "TEXT": "some", "NAME": "some", "FOLDER": "some", "PATH": "some"}


@dataclass(frozen=True)
class Mistake:
    name: str
    words: tuple[str, ...]  # `{here}` is the mistake's own folder
    says: tuple[str, ...]  # the key or file, and the value, as the message must name them
    wrong: str = ""  # the word that the way out takes the place of
    code: int = 2
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    mended: Mapping[str, str | bytes] | None = None  # the files after what the message says to do
    instead: tuple[str, ...] | None = None  # what to type, where the message says it in other words
    env: Mapping[str, str] = field(default_factory=dict)
    code_after: int | None = 0  # None: further, wherever that is

    def at(self, folder: Path) -> list[str]:
        self.write(folder, self.files)
        return [word.replace("{here}", str(folder)) for word in self.words]

    def write(self, folder: Path, files: Mapping[str, str | bytes]) -> None:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())


def problem_of(text: str) -> str:
    """The message without `error:`, or the first of several."""
    said = text.partition("error: ")[2].strip()
    several = re.match(r"\d+ settings are wrong:\s+1\. (.*)", said)
    return several[1].strip() if several else said


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[^.])[.?]\s+(?=[A-Z`])", problem_of(text))[0]


def type_the_way_out(mistake: Mistake, text: str, words: Sequence[str]) -> list[str] | None:
    """The command line after what the message says, or None where it says nothing that can be typed."""
    said = problem_of(text)[len(first_sentence(text)) :]
    fragments = [match[0] for match in _FRAGMENT.finditer(said)]
    wrong = mistake.wrong
    if fragments:
        word = shlex.split(fragments[0])[0]
        key, _, value = word.partition("=")
        word = f"{key}={_PLACES.get(value, value)}"
        kept = [one for one in words if one != wrong or re.search(rf"\bAdd {re.escape(fragments[0])}", said)]
        return [*(one for one in kept if one.lstrip("+~").partition("=")[0] != key), word]
    key = wrong.partition("=")[0]
    for pattern in (r"Did you mean (\S+?)\?", r"Known: (\S+?)[,.]", r"Use (\S+?)[,.]?(?: |$)", r"Write (\S+?)\.?$"):
        if match := re.search(pattern, said):
            value = match[1]
            word = value if value.startswith("-") or "=" not in wrong else f"{key}={value}"
            return [word if one == wrong else one for one in words]
    return None
