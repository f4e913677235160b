"""The outcome of one evaluation, with everything needed to repeat it. Called by the runner; read by report and tests.

No key says just "perplexity": each measure's name says what it is divided by.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from lmtrain import __version__
from lmtrain.eval.task import Facts

ONE_PROCESS = "one process"


@dataclass(frozen=True, kw_only=True)
class BaselineResult:
    """A count-based model on the same targets."""

    name: str
    nll_sum_nats: float
    bits_per_byte: float
    token_perplexity: float
    model_bits_ratio: float  # the model's bits per byte over this baseline's: below 1 the model is better
    model_token_perplexity_ratio: float


@dataclass(frozen=True, kw_only=True)
class Result(Facts):
    """A number and what it means: the facts of its text, the model's, and how it was counted."""

    task: str = ""
    protocol_version: str = "1"
    data: str
    num_targets: int
    num_items: int = 0
    seq_len: int
    dtype: str
    layout: str = ONE_PROCESS
    tokenizer_fingerprint: str
    nll_sum_nats: float
    headline: str
    measures: dict[str, float]
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)  # empty where there is only one item
    intervals_rule: str = "none"
    loss_by_position: tuple[dict[str, Any], ...] = ()
    seconds: float = 0.0  # of scoring
    tokens_per_s: float = 0.0  # fed to the model in that time
    padding_share: float = 0.0  # of all that was fed
    lmtrain: str = __version__
    baselines: tuple[BaselineResult, ...] = ()
    groups: dict[str, dict[str, float]] = field(default_factory=dict)  # by source, its measures

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which knows no infinity: what is not finite becomes null."""
        return {key: finite(value) for key, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Result:
        """As `to_dict` has it, but for what was not finite."""
        baselines = tuple(BaselineResult(**one) for one in plain["baselines"])
        return cls(**{**plain, "baselines": baselines})


def finite(value: Any) -> Any:
    """The same with null for what is not a finite number."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
