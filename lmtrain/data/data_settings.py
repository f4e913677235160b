"""Where training data lies and how it is cut. Torch-free; found by the configs under conf/data/."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lmtrain.config.base import Choice, Problem, problem_if, show


@dataclass(frozen=True, kw_only=True)
class DataSettings(Choice):
    """One dataset, split by documents into training, validation and test parts."""

    room = "lmtrain.data"
    kind = "dataset"

    path: str
    valid_path: str | None = None
    tokenizer: str | None = None
    split: tuple[float, ...] = (0.98, 0.02, 0.0)
    document_mask: bool = False
    prefetch_steps: int = 2

    def problems(self) -> Iterator[Problem]:
        listed = "[" + ",".join(show(share) for share in self.split) + "]"
        fair = 1 <= len(self.split) <= 3 and all(0 <= share < float("inf") for share in self.split)
        yield from problem_if(
            not (fair and self.split[0] > 0),
            "split",
            listed,
            "must be one to three shares (training, validation, test), none negative and the first above 0",
            "Use data.split=[0.98,0.02,0].",
        )
        yield from problem_if(self.path == "", "path", "", "names no dataset", "Give a .bin's path without the suffix.")
        ahead = self.prefetch_steps
        yield from problem_if(ahead < 0, "prefetch_steps", ahead, "must be at least 0", "Use 2, or 0 to read in turn.")
