"""The journal of an interrupted reshard."""

from __future__ import annotations

from pathlib import Path

from lmtrain.checkpoint.reshard.journal import Journal


def test_a_journal_of_other_work_is_none(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "a")
    assert journal.read() is None
    journal.begin()
    journal.add(3, {"f": {0: b"\x01" * 32}})
    assert journal.read() == {3: {"f": {0: b"\x01" * 32}}}
    assert Journal(tmp_path / "journal", "b").read() is None
