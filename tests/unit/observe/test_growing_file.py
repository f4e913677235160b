"""Whole records or none, whatever the disk does; what is lost is counted and said. The limits are the system's own."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from lmtrain.errors import OutputError
from lmtrain.observe.metrics import GrowingFile, MetricsLog, read_metrics
from lmtrain.observe.screen.training_view import RunLog
from lmtrain.observe.sinks.tensorboard import EventWriter, tfrecord
from lmtrain.runtime.terminal_safe_text import warn
from tests.limited import limited

RECORD = b"0123456789\n"


def test_a_full_file_costs_records_and_says_so_once(tmp_path: Path) -> None:
    said: list[str] = []
    file = GrowingFile(tmp_path / "rows", "rows", said.append)
    with limited(resource.RLIMIT_FSIZE, 4 * len(RECORD) + 5):
        for _ in range(9):
            file.append(RECORD)
            assert set((tmp_path / "rows").read_bytes().splitlines(keepends=True)) == {RECORD}  # never half of one
    assert len(said) == 1
    assert "rows failed: a file may have 49 B here. Raise that limit" in said[0]
    assert "Training goes on" in said[0]
    file.append(RECORD)
    file.close()
    assert (tmp_path / "rows").read_bytes() == 5 * RECORD
    assert said[1:] == [f"Writing {tmp_path / 'rows'} works again; 5 rows were lost."]


def test_what_is_lost_at_the_end_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = GrowingFile(tmp_path / "rows", "rows")
    with limited(resource.RLIMIT_FSIZE, 3):
        file.append(RECORD)
    file.close()
    assert "The last 1 rows of" in capsys.readouterr().err
    assert (tmp_path / "rows").read_bytes() == b""


def test_a_warning_that_nobody_takes_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, open("/dev/full", "w", buffering=1) as full:
        patch.setattr("sys.stderr", full)
        warn("nobody hears this")
        with pytest.raises(OSError, match="No space"):
            full.flush()
        with open(os.devnull, "w") as nothing:  # or it would be tried once more when it is closed
            os.dup2(nothing.fileno(), full.fileno())


def test_the_log_tells_of_its_gap_where_the_gap_is(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.txt")
    log.write("before")
    with limited(resource.RLIMIT_FSIZE, 40):
        log.write("one that is lost")
        log.write("two that is lost")
    log.write("after")
    log.close()
    before, gap, after = (tmp_path / "log.txt").read_text().splitlines()
    assert before.endswith("before")
    assert gap.endswith("2 lines are missing here, which could not be written")
    assert after.endswith("after")


def test_rows_go_on_after_a_gap_and_are_read_as_one_story(tmp_path: Path) -> None:
    said: list[str] = []
    metrics = MetricsLog(tmp_path / "m.jsonl", said.append)
    rows = [{"event": "step", "step": step, "attempt": 1} for step in range(6)]
    metrics.append(rows[0])
    with limited(resource.RLIMIT_FSIZE, 60):
        for row in rows[1:5]:
            metrics.append(row)
    metrics.append(rows[5])
    metrics.close()
    assert read_metrics(tmp_path / "m.jsonl") == [rows[0], rows[5]]
    assert "4 rows were lost" in said[1]


def test_a_torn_row_longer_than_a_look_is_cut_away(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    whole = b'{"event": "step", "step": 1, "attempt": 1}\n'
    path.write_bytes(whole + b'{"event": "' + b"x" * 200_000)
    MetricsLog(path).close()
    assert path.read_bytes() == whole


def test_a_torn_line_of_the_log_stays_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"2031-02-01T00:00:00Z  torn of")
    log = RunLog(path)
    log.write("next")
    log.close()
    assert [line.split("  ")[1] for line in path.read_text().splitlines()] == ["torn of", "next"]


def test_events_begin_with_their_head_however_late(tmp_path: Path) -> None:
    said: list[str] = []
    with limited(resource.RLIMIT_FSIZE, 10):
        events = EventWriter(tmp_path / "late", 0, lambda: 0.0, said.append)
        events.write_scalar("loss", 9.0, 1)
    events.write_scalar("loss", 2.0, 2)
    events.close()
    in_time = EventWriter(tmp_path / "in_time", 0, lambda: 0.0)
    in_time.write_scalar("loss", 2.0, 2)
    in_time.close()
    (late,), (expected,) = ([path.read_bytes() for path in (tmp_path / name).iterdir()] for name in ("late", "in_time"))
    assert late == expected
    assert late.startswith(tfrecord(b"\x09" + bytes(8) + b"\x10\x00\x1a\x0dbrain.Event:2"))
    assert "1 values were lost" in said[1]


@pytest.mark.parametrize("make", [RunLog, MetricsLog])
def test_nothing_is_written_through_a_link(tmp_path: Path, make: type[RunLog]) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    with pytest.raises(OutputError, match="link is a symbolic link"):
        make(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="pipe is not a plain file"):
        make(tmp_path / "pipe")
    assert (tmp_path / "precious").read_text() == "mine"
