"""Derived seeds: fixed for ever, different for different purposes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.runtime.derive_random_seeds import derive_seed

parts = st.lists(st.one_of(st.integers(-5, 2**70), st.text(max_size=5)), max_size=4)


def test_values_never_change() -> None:
    """A run that is resumed by a later version must draw the same numbers."""
    assert derive_seed(1234) == 9065795962158517732
    assert derive_seed(1234, "dropout", 7, 0) == 996483809560325205


@settings(max_examples=40)
@given(parts, parts)
def test_different_parts_give_different_seeds(a: list[int | str], b: list[int | str]) -> None:
    assert (derive_seed(1, *a) == derive_seed(1, *b)) == ([(type(x), x) for x in a] == [(type(x), x) for x in b])


def test_parts_do_not_run_together() -> None:
    seeds = [derive_seed(1, *p) for p in (("a", "b"), ("ab",), ("a\0str:1:b",), (12,), ("12",), (1, 2), (), ("",))]
    assert len(set(seeds)) == len(seeds)
    assert derive_seed(11, 2) != derive_seed(1, 12)


def test_every_generator_takes_them() -> None:
    assert all(0 <= derive_seed(seed) < 2**63 for seed in range(200))
