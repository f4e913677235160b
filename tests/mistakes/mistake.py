"""A mistake written by hand, in a command line or in a file, and what its answer must name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

CODES = {2, 65, 66, 73, 74, 78}


@dataclass(frozen=True)
class Mistake:
    name: str
    words: tuple[str, ...]  # `{here}` is the mistake's own folder
    says: tuple[str, ...]  # the key or file, and the value, as the message must name them
    code: int = 2
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    mended: Mapping[str, str | bytes] | None = None  # the files after what the message says to do
    instead: tuple[str, ...] | None = None  # what to type, where the message leaves that to the user
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
    """The message without `error:` and without the line to type, or the first of several."""
    said = text.partition("error: ")[2].partition("\nType:\n")[0].partition("\nLeft out: ")[0].strip()
    several = re.match(r"\d+ \w+ are wrong:\s+1\. (.*)", said)
    return several[1].strip() if several else said


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[^.])[.?]\s+(?=[A-Z`])", problem_of(text))[0]
