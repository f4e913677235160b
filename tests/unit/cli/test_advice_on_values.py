"""Advice replaces values where they stand: of an option, of a setting, in a list, or as an argument."""

from __future__ import annotations

import pytest

from lmtrain.cli.settings_keys.parse_typed_line import advised
from lmtrain.errors import UsageError, own, way


@pytest.mark.parametrize(
    ("message", "typed", "words"),
    [
        (f"No task. Did you mean {way('b', instead_of='a')}?", "eval RUN --task a --task c",
         "eval RUN --task b --task c"),
        (f"No data. Did you mean {way('b', instead_of='a')}?", "pretrain data.path=a", "pretrain data.path=b"),
        (f"No corpus. Did you mean {way('b', instead_of='a')}?", "corpus get a FILE --output d",
         "corpus get b FILE --output d"),
        (f"--by=ids is none. Use {own('id')}.", "corpus split F --by ids --output d",
         "corpus split F --by=id --output d"),
        (f"Use {way('--set', 'positions=rotary')}.", "import D --output O --set activation=gelu",
         "import D --output O --set activation=gelu --set positions=rotary"),
        (f"data.max_epochs=0 is none. Use {own(4)}, or {own('null')}.", "pretrain data.max_epochs=0",
         "pretrain data.max_epochs=4"),
        (f"data.datasets[0].path=a. Use {way('data.datasets[0].weight=1')}.", "pretrain data.datasets=[{path:a}]",
         "pretrain data.datasets=[{path: a,weight: 1}]"),
    ],
)  # fmt: skip
def test_a_value_is_replaced(message: str, typed: str, words: str) -> None:
    found = advised(UsageError(message), typed.split(" "))
    assert found is not None
    assert " ".join(found.words) == words


def test_an_argument_that_nobody_typed_is_not_added() -> None:
    assert advised(UsageError(f"Did you mean {way('b', instead_of='a')}?"), ["pretrain", "data.path=c"]) is None
