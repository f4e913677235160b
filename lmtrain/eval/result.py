"""The outcome of one evaluation, with everything needed to repeat it. Called by the runner; read by report and tests.

No key says just "perplexity": each measure's name says what it is divided by.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any


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
class Result:
    protocol: str
    version: str = "1"  # of the protocol
    data: str
    text_sha256: str
    num_documents: int
    num_words: int | None
    words_rule: str
    num_bytes: int
    bytes_rule: str
    num_tokens: int
    num_targets: int
    seq_len: int
    stride: int | None
    prefix: str
    dtype: str
    tokenizer_fingerprint: str
    denominator: str
    nll_sum_nats: float
    headline: str
    measures: dict[str, float]
    notes: dict[str, str | int]
    baselines: tuple[BaselineResult, ...] = ()
    groups: dict[str, dict[str, float]] = field(default_factory=dict)  # by source, its measures

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which knows no infinity: what is not finite becomes null."""
        plain = dataclasses.asdict(self)
        plain["baselines"] = list(plain["baselines"])
        return {key: _finite(value) for key, value in plain.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
