"""The flight recorder's rows, of whatever torch is here."""

from __future__ import annotations

from lmtrain.observe.hang_watch.start_companion_and_raise_verdict import flight_recorder_rows


def test_a_process_without_collectives_has_no_rows() -> None:
    assert flight_recorder_rows() == ""
