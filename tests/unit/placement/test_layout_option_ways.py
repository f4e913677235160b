"""Ways out of a wrong layout in the words of an option that holds the whole layout."""

import pytest

from lmtrain.errors import SettingsError, Way, leave_out, own, way
from lmtrain.placement.layout_option_ways import ways_in_layout_option


def _ways(layout: str, *problems: str, takes_settings: bool = False) -> list[list[Way]]:
    with pytest.raises(SettingsError) as error, ways_in_layout_option("--to", layout, takes_settings=takes_settings):
        raise SettingsError(problems)
    return [[*ways] for ways in error.value.ways]


def test_ways_of_several_problems_change_one_option() -> None:
    pp = f"parallel.pp=5 is too large. Use {way('parallel.pp=2')} or less."
    tp = f"parallel.tp=3 does not divide 4. Use {own(1)}, {own(2)} or {own(4)}."
    assert _ways("tp=3,pp=5", pp, tp) == [[Way(("--to=tp=3,pp=2",))], [Way(("--to=tp=2,pp=2",))]]


def test_a_size_can_be_added_or_left_out() -> None:
    idle = f"parallel.schedule=gpipe needs a pipeline. Use {way('parallel.pp=2')} or {leave_out()}."
    assert _ways("schedule=gpipe", idle) == [[Way(("--to=schedule=gpipe,pp=2",))]]  # an option without a layout is none
    assert _ways("tp=2,schedule=gpipe", idle)[0][1] == Way(("--to=tp=2",))


def test_other_settings_are_for_verbs_that_take_them() -> None:
    other = f"parallel.tp=3 splits the sequence. Use {way('parallel.sequence_parallel=false')}."
    assert _ways("tp=3", other) == [[]]
    assert _ways("tp=3", other, takes_settings=True) == [[Way(("parallel.sequence_parallel=false",))]]
    named = f"parallel.zero=0 shards nothing. Use {way('parallel.zero=1')}, or {way('parallel.dp_shard=1')}."
    assert _ways("zero=0", named, takes_settings=True) == [[Way(("--to=zero=1",)), Way(("parallel.dp_shard=1",))]]
