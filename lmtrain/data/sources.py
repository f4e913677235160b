"""The datasets of a run as the sources of its loss: which of many are shown, tokens read of each, and epochs.

Called by the records of training, by validation and by preflight. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Protocol

from lmtrain.data.assemble_training_data import TrainingData
from lmtrain.data.data_settings import REST, DataChoice
from lmtrain.units import plural

MAX_SHOWN = 8  # sources that have values of their own in rows, curves and on the screen
_MAX_WARNED = 3  # sources that the warning on data.max_epochs names


class NamedShare(Protocol):
    """A dataset of a blend: its name and its share of the samples."""

    @property
    def name(self) -> str: ...
    @property
    def share(self) -> Fraction: ...


def shown_sources(sources: Sequence[NamedShare]) -> dict[str, list[int]]:
    """Return name -> indices in `sources` for the values that are shown: the sources with the largest shares, each by
    itself, and all others together under the name "rest". Names are in the order of the settings.
    """
    by_share = sorted(range(len(sources)), key=lambda index: -float(sources[index].share))
    shown = sorted(by_share[:MAX_SHOWN] if len(sources) > MAX_SHOWN + 1 else by_share)
    rest = sorted(set(by_share) - set(shown))
    return {sources[index].name: [index] for index in shown} | ({REST: rest} if rest else {})


def tokens_of_order(data: TrainingData, num_samples: int, num_tokens: int) -> dict[str, int]:
    """Return source key -> tokens read, for a run without stages that has read `num_samples` samples with `num_tokens`
    tokens and did not count them by source. The numbers are exact if samples have equally many tokens; else the tokens
    are divided in proportion to the samples.
    """
    tokens: dict[str, int] = {}
    for part, count in zip(data.parts, data.samples_per_dataset(num_samples), strict=True):
        tokens[part.key] = tokens.get(part.key, 0) + num_tokens * count // max(num_samples, 1)
    return tokens


def tokens_at_end(
    data: TrainingData, seq_len: int, tokens_before: Mapping[str, int], samples_before: int = 0
) -> dict[str, int]:
    """Return source key -> tokens read at the end of the run, or of the stage whose data is `data`. `tokens_before` is
    the same before its first sample, or after `samples_before` of its samples. `seq_len` is the number of tokens in a
    sample.
    """
    tokens = dict(tokens_before)
    counts_before = data.samples_per_dataset(samples_before)
    for part, facts, count_before in zip(data.parts, data.contributions(seq_len), counts_before, strict=True):
        left = facts["run_samples"] - count_before
        to_read = facts["run_tokens"] * left // max(facts["run_samples"], 1)
        tokens[part.key] = tokens.get(part.key, 0) + to_read
    return tokens


def epoch_warnings(
    stages: Sequence[tuple[DataChoice, TrainingData, int]], tokens_before: Mapping[str, int], samples_before: int = 0
) -> Iterator[str]:
    """Yield a warning if the run reads a source more often than data.max_epochs says. `stages` has the settings, the
    data and the sample length of each stage that is left; a run without stages is one of them. The other arguments are
    those of `tokens_at_end` for the first stage.
    """
    if all(settings.max_epochs is None for settings, _, _ in stages):
        return  # because: counting the tokens of padded samples takes a second
    limit, excess = float("inf"), dict[str, float]()
    for settings, data, seq_len in stages:
        tokens_before = tokens_at_end(data, seq_len, tokens_before, samples_before)
        samples_before = 0
        if settings.max_epochs is None:
            continue
        limit = min(limit, settings.max_epochs)
        for part in data.parts:
            epochs = tokens_before[part.key] / max(part.num_tokens, 1)
            if epochs > settings.max_epochs:
                excess[part.name] = epochs
    yield from excess_warnings(excess, limit)


def excess_warnings(epochs: Mapping[str, float], limit: float) -> Iterator[str]:
    """Yield a warning if the epochs of a source exceed `limit`, the value of data.max_epochs. `epochs` has the epochs
    of sources by name.
    """
    excess = {name: times for name, times in epochs.items() if times > limit}
    names = sorted(excess, key=lambda name: -excess[name])
    if names:
        texts = [f"{name} for {excess[name]:.3g} epochs" for name in names[:_MAX_WARNED]]
        more = len(names) - len(texts)
        sources = ", ".join(texts) + f" and {plural(more, 'further source')}" * (more > 0)
        yield (
            f"The run reads {sources}, which is more than data.max_epochs={limit:g}. Use more data, a shorter run or a "
            "smaller share of that data, or data.max_epochs=null for no limit."
        )
