"""What `lmtrain corpus build` reads from its YAML file: which steps run, and how. A step not named does not run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lmtrain.config.base import Problem, Settings


@dataclass(frozen=True, kw_only=True)
class CleanSettings(Settings):
    rules: tuple[str, ...] = ("gopher", "lines_ending_in_punctuation")  # groups, rules, limits (min_words=20)
    scripts: tuple[str, ...] = ()  # welcome scripts, such as latin; none: all
    min_script_share: float = 0.5  # of the letters

    def problems(self) -> Iterator[Problem]:
        wrong = not 0 <= self.min_script_share <= 1
        yield from self.problem_if(wrong, "min_script_share", "is not a share", "Use 0 to 1.")


@dataclass(frozen=True, kw_only=True)
class DedupeSettings(Settings):
    near: bool = True  # near copies too, not exact ones only
    threshold: float = 0.8  # Jaccard similarity of runs of five words from which two texts are copies
    keep: Literal["first", "longest"] = "first"

    def problems(self) -> Iterator[Problem]:
        wrong = not 0 < self.threshold <= 1
        yield from self.problem_if(wrong, "threshold", "is not a similarity", "Use 0.7 to 0.9.")


@dataclass(frozen=True, kw_only=True)
class DecontaminateSettings(Settings):
    against: tuple[str, ...]  # files of evaluation texts
    action: Literal["cut", "drop"] = "cut"

    def problems(self) -> Iterator[Problem]:
        yield from self.problem_if(not self.against, "against", "names no file", "List the evaluation texts.")


@dataclass(frozen=True, kw_only=True)
class SplitSettings(Settings):
    ratios: tuple[float, ...] = (0.98, 0.01, 0.01)  # train, valid, test
    by: Literal["id", "text"] = "text"

    def problems(self) -> Iterator[Problem]:
        wrong = len(self.ratios) != 3 or min(self.ratios, default=-1) < 0 or abs(sum(self.ratios) - 1) > 1e-9
        yield from self.problem_if(wrong, "ratios", "are not three shares of 1", "Use [0.98,0.01,0.01].")


@dataclass(frozen=True, kw_only=True)
class BuildSettings(Settings):
    inputs: tuple[str, ...]  # files, folders or globs
    output: str  # a folder
    key: str = "text"
    on_error: Literal["stop", "skip"] = "stop"  # at a bad line
    seed: int = 0  # of the order and the split
    clean: CleanSettings | None = None
    dedupe: DedupeSettings | None = None
    decontaminate: DecontaminateSettings | None = None
    shuffle: bool = True
    split: SplitSettings | None = None

    def problems(self) -> Iterator[Problem]:
        yield from self.problem_if(not self.inputs, "inputs", "names no file", "List files of text.")
