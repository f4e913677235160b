"""log.txt: one stamped line a call, appended, without terminal codes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from lmtrain.observe.screen.training_view import RunLog


def test_lines_are_stamped_in_utc_and_appended(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log.txt"
    for hour in (3, 4):
        log = RunLog(path, clock=lambda hour=hour: datetime(2031, 2, 1, hour, 5, 6, tzinfo=UTC))  # type: ignore[misc]
        log.write(f"hour {hour}")
        log.close()
    assert path.read_text() == "2031-02-01T03:05:06Z  hour 3\n2031-02-01T04:05:06Z  hour 4\n"


def test_a_line_is_there_before_the_log_is_closed(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.txt")
    log.write("now")
    assert (tmp_path / "log.txt").read_text().endswith("Z  now\n")
    log.close()


def test_terminal_codes_go_and_further_lines_are_indented(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.txt", clock=lambda: datetime(2031, 2, 1, tzinfo=UTC))
    log.write("\x1b[1;31mred\x1b[0m\rone\ntwo\n")
    log.close()
    assert (tmp_path / "log.txt").read_text() == "2031-02-01T00:00:00Z  redone\n                      two\n"
