"""Layouts as users type them: what is read, what stays, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmtrain.errors import LayoutError, SettingsError
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.placement.parallel_settings import check_layout, parse_layout

MODEL = GPTSettings(num_layers=5, width=24, num_heads=4, vocab_size=67, seq_len=8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp=3", "does not divide model.num_heads=4"),
        ("pp=9", "9 stages, more than model.num_layers=5"),
        ("tq=2", "Known: balance, dp_replicate"),
        ("tp=two", "tp=two is not a whole number"),
        ("tp", "Did you mean tp"),
        ("tp=2,tp=2", "repeats an axis"),
        ("dp=2,dp_shard=2", "repeats an axis"),
        ("tp=0", "must be at least 1"),
        ("zero=0,dp=2", "shards nothing"),
        ("vp=2", "needs a pipeline"),
    ],
)
def test_layouts_that_are_refused(text: str, said: str) -> None:
    with pytest.raises((LayoutError, SettingsError), match=said):
        check_layout(MODEL, parse_layout(text))


def test_what_is_no_matter_of_the_layout_stays() -> None:
    before = replace(parse_layout("tp=2,dp=2,zero=3"), timeout_s=33.0, sequence_parallel=False)
    found = parse_layout("pp=2", before)
    assert (found.pp, found.tp, found.dp_shard, found.zero) == (2, 1, 1, 1)
    assert (found.timeout_s, found.sequence_parallel) == (33.0, False)
    assert parse_layout("pp=2,vp=3").schedule == "interleaved"
