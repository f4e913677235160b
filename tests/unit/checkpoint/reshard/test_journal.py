"""The journal of an interrupted reshard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmtrain.checkpoint.reshard.journal import Journal

BLOCKS = {"f": 2}


def test_a_journal_of_other_work_is_none(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "a")
    assert journal.read(BLOCKS) is None
    journal.begin()
    journal.add({"f": {0: b"\x01" * 32}})
    journal.add({"f": {1: b"\x02" * 32}})
    assert journal.read(BLOCKS) == {"f": {0: b"\x01" * 32, 1: b"\x02" * 32}}
    assert Journal(tmp_path / "journal", "b").read(BLOCKS) is None


@pytest.mark.parametrize(
    "line", [3, {}, {"blocks": []}, {"blocks": {"g": {"0": "00" * 32}}}, {"blocks": {"f": {"2": "00" * 32}}},
             {"blocks": {"f": {"-1": "00" * 32}}}, {"blocks": {"f": {"0": "00"}}}, {"blocks": {"f": {"0": "x" * 64}}}],
)  # fmt: skip
def test_a_line_that_fits_no_file_is_not_believed(tmp_path: Path, line: object) -> None:
    journal = Journal(tmp_path / "journal", "a")
    journal.begin()
    with open(journal.path, "a") as file:
        file.write(json.dumps(line) + "\n")
    assert journal.read(BLOCKS) is None


def test_a_torn_line_is_left_out_and_cut_off(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "a")
    journal.begin()
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + b'{"blocks": {"f"')
    assert journal.read(BLOCKS) == {}
    journal.trim()
    assert journal.path.read_bytes() == whole
