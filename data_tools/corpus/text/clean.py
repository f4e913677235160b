"""The step `clean`: mends text, takes boilerplate lines out, and leaves out documents that break a rule.

Called by `lmtrain corpus clean`. What each rule cost is counted under its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from data_tools.corpus.flow.reading import Documents, to_line
from data_tools.corpus.flow.steps import Tally
from data_tools.corpus.text.mend import mend
from data_tools.corpus.text.quality import GROUPS, LINE_RULES, RULES, Facts
from data_tools.scripts import check_script, script_shares
from lmtrain.errors import UsageError, nearest

DEFAULT_RULES = ("gopher", "lines_ending_in_punctuation")
_BLANK_LINES = re.compile(r"\n{3,}")


@dataclass(frozen=True)
class Clean:
    """Rules by name with their limits; scripts that are welcome, with the least share of letters they must have."""

    rules: tuple[tuple[str, float], ...] = ()
    line_rules: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
    min_script_share: float = 0.5
    mend: bool = True
    name: ClassVar[str] = "clean"
    files: ClassVar[Sequence[str]] = ("documents",)

    def run(self, documents: Documents, key: str, tally: Tally) -> dict[str, bytes]:
        lines = []
        for _, document in documents:
            text = mend(document[key], tally.changed) if self.mend else document[key]
            text = self._without_lines(text, tally)
            cause = self.cause(text)
            if cause is None:
                tally.keep(text)
                lines.append(to_line(document | {key: text}))
            else:
                tally.drop(cause)
        return {"documents": b"".join(lines)}

    def cause(self, text: str) -> str | None:
        """The first rule that the text breaks, or None for one that stays."""
        if not text.strip():
            return "empty"
        facts = Facts(text)
        broken = next((name for name, limit in self.rules if RULES[name].breaks(facts, limit)), None)
        if broken is None and self.scripts:
            shares = script_shares(text)
            if sum(shares.get(script, 0.0) for script in self.scripts) < self.min_script_share:
                return f"script: {next(iter(shares), 'none')}"
        return broken

    def _without_lines(self, text: str, tally: Tally) -> str:
        if not self.line_rules:
            return text
        kept = []
        for line in text.split("\n"):
            broken = next((name for name in self.line_rules if line.strip() and LINE_RULES[name](line)), None)
            if broken is None:
                kept.append(line)
            else:
                tally.changed[f"lines taken out: {broken}"] += 1
        return _BLANK_LINES.sub("\n\n", "\n".join(kept)).strip("\n") if len(kept) < text.count("\n") + 1 else text


def build_clean(words: Iterable[str], scripts: Sequence[str] = (), min_script_share: float = 0.5) -> Clean:
    """From words as one types them: groups (gopher), rules (min_words), limits (min_words=20), line rules."""
    rules: dict[str, float] = {}
    line_rules: list[str] = []
    for word in words:
        name, _, limit = word.partition("=")
        if name == "none":
            continue
        if name == "c4_lines":
            line_rules += [rule for rule in LINE_RULES if rule not in line_rules]
        elif name in LINE_RULES:
            line_rules += [name] if name not in line_rules else []
        elif name in GROUPS and not limit:
            rules |= {rule: RULES[rule].limit for rule in GROUPS[name] if rule not in rules}
        elif name in RULES:
            rules[name] = _limit(word, limit) if limit else RULES[name].limit
        else:
            known = [*RULES, *GROUPS, *LINE_RULES, "c4_lines", "none"]
            raise UsageError(f"--rule={word} is no rule. {nearest(name, known)}")
    if not 0 <= min_script_share <= 1:
        raise UsageError(f"--min-script-share={min_script_share} is not a share. Give a number from 0 to 1.")
    welcome = tuple(name.lower() for name in scripts)
    for name in welcome:
        check_script(name)
    return Clean(tuple(rules.items()), tuple(line_rules), welcome, min_script_share)


def _limit(word: str, limit: str) -> float:
    try:
        return float(limit)
    except ValueError as error:
        raise UsageError(f"--rule={word} has no number behind the sign. Write it as min_words=20.") from error
