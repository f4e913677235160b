"""The options of other tools in peers/, each typed alone beside a right line of the verb at which it is typed.

A file has a section for each verb, `[preprocess]`, and in it one option a line with a usual value; `!` says that the
option stands for the verb's argument, `~` that it stands for the options of the right line that are not required. Only
names are taken from these tools.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lmtrain.cli.settings_keys.parse_typed_line import parse_line
from lmtrain.start.other_tools.option_synonyms import option_named
from tests.mistakes.grammar import verbs
from tests.mistakes.runner import Runner
from tests.mistakes.typist import RAW, shown_line
from tests.mistakes.world import right_line

_HELP = re.compile(r"--help` (lists|shows)")
_PARTS = re.compile(r"[^\w./@]+")


@dataclass(frozen=True)
class PeerOption:
    """An option of the tool `peer`, with its value, as its users type it at a verb of lmtrain."""

    peer: str
    verb: tuple[str, ...]
    option: tuple[str, ...]
    instead_of: str  # "!" or "~", or ""

    def __str__(self) -> str:
        return f"{self.peer}: {' '.join((*self.verb, *self.option))}"

    @property
    def words(self) -> list[str]:
        """The verb's right line with the option, in place of the argument that it stands for."""
        units = parse_line(right_line(self.verb, verbs()[self.verb])).units
        params = {name: param for param in verbs()[self.verb].params for name in param.opts}
        options = [
            unit for unit in units
            if len(unit) > 1 and not (self.instead_of == "~" and not params[unit[0]].required)
            and not (unit[0] == self.meant and params[unit[0]].multiple)
        ]  # fmt: skip
        arguments = [unit for unit in units if len(unit) == 1 and self.instead_of != "!"]
        return [*self.verb, *(word for unit in (*arguments, *options) for word in unit), *self.option]

    @property
    def own(self) -> set[str]:
        """The options of the verb."""
        return {name for param in verbs()[self.verb].params for name in (*param.opts, *param.secondary_opts)}

    @property
    def meant(self) -> str | None:
        """The verb's option of which this is a synonym."""
        return option_named(self.option[0].partition("=")[0], self.own)


def peer_options() -> Iterator[PeerOption]:
    """Yield every option of the files."""
    for file in sorted((Path(__file__).parent / "peers").glob("*.txt")):
        verb: tuple[str, ...] = ()
        for line in file.read_text().splitlines():
            if line.startswith("["):
                verb = tuple(line.strip("[]").split())
            elif not line.startswith("#"):
                sign = line[0] if line[:2] in ("! ", "~ ") else ""
                yield PeerOption(file.stem, verb, tuple(shlex.split(line.removeprefix(f"{sign} "))), sign)


def faults(option: PeerOption, run: Runner) -> list[str]:
    """Type an option's line, and what the answer advises. Return what is wrong with the answer."""
    return [*_faults(option, run)]


def _faults(option: PeerOption, run: Runner) -> Iterator[str]:
    said = run(option.words)
    name, values = option.option[0].partition("=")[0], [*option.option[1:], option.option[0].partition("=")[2]]
    if said.is_accepted or name in option.own:
        return
    yield from (f"says {raw}" for raw in RAW if raw in said.text)
    if _HELP.search(said.text):
        yield "only names --help"
    for meant in re.findall(r"Did you mean (--[\w-]+)", said.text):
        if meant not in (f"--{name.lstrip('-').replace('_', '-').lower()}", option.meant):
            yield f"looks like {meant}"
    if (shown := shown_line(said.text)) is None:
        if " are wrong:" in said.text and "\nType, with " not in said.text:
            yield "an error that follows from the option"
        return
    following = run(shown)
    if following.code == 2 and following.text != run(right_line(option.verb, verbs()[option.verb])).text:
        yield f"advice that is refused: {following.text}"
    left_out = "eave it out" in said.text or "Left out:" in said.text or " ".join(option.option) in said.text
    text = " ".join(shown)
    parts = [part for value in values for part in _PARTS.split(value) if part]
    if parts and not left_out and not any(part in text for part in parts):
        yield f"{' '.join(option.option)} is lost"
