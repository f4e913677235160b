"""Every mutant can be planted in the code of today, and the set is spread as it should be."""

from __future__ import annotations

import pytest

from tests.mutants.mutant import mutants_of, room_names


@pytest.mark.parametrize("room", room_names())
def test_every_mutant_applies(room: str) -> None:
    found = mutants_of(room)
    assert len({mutant.name for mutant in found}) == len(found)
    for mutant in found:
        mutant.check()
