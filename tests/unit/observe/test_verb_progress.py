"""How far a verb is: figures from reports and a clock, lines at even times, what Ctrl-C leaves behind."""

from __future__ import annotations

import io
import pty
import re
import threading
from time import sleep

import pytest
from rich.console import Console

from lmtrain.observe.screen.command_progress import ProgressReporter, progress
from lmtrain.runtime.processes import command_watch
from tests.unit.observe.test_training_view import drain


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=40), out


def test_the_time_left_goes_on_between_reports() -> None:
    clock = Clock()
    shown = ProgressReporter("written", "bytes", clock)
    assert shown.text() == "written 0s elapsed"
    clock.now_s += 10
    shown(10 << 20, 40 << 20)
    assert shown.text() == "written 10.0 of 40.0 MiB, 1.0 MiB/s, 10s elapsed, 30s left"
    clock.now_s += 4
    assert shown.text() == "written 10.0 of 40.0 MiB, 1.0 MiB/s, 14s elapsed, 26s left"
    clock.now_s += 100
    assert shown.text().endswith(", 1m54s elapsed")  # what should be over says no time


def test_what_was_there_before_is_neither_speed_nor_time() -> None:
    clock = Clock()
    shown = ProgressReporter("written", "bytes", clock)
    clock.now_s += 50  # loading
    shown(512 << 10, 3 << 20, earlier=512 << 10)
    clock.now_s += 2
    shown(1536 << 10, 3 << 20, earlier=512 << 10)
    assert shown.text() == "written 1.5 of 3.0 MiB, 512.0 KiB/s, 52s elapsed, 3s left"


def test_the_next_part_of_the_work_begins_anew() -> None:
    clock = Clock()
    shown = ProgressReporter("read", "documents", clock)
    clock.now_s += 1
    shown(1000)
    assert shown.text() == "read 1k documents, 1k/s, 1s elapsed"
    shown(1001, 1001)
    assert shown.text().endswith("1s elapsed")
    shown(1, 1)
    assert shown.text().startswith("read 1 of 1 document, ")
    shown.set_activity("learning 500 pieces")
    clock.now_s += 61
    assert shown.text() == "learning 500 pieces 1m02s elapsed"
    shown(0, 10)
    clock.now_s += 2
    shown(5, 10)
    assert shown.text().endswith("5 of 10 documents, 2.5/s, 1m04s elapsed, 2s left")


def test_a_silence_prints_the_innermost_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_watch, "INTERVAL_S", 0.0)  # a line whenever the thread looks
    printed = threading.Event()

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            printed.set()
            return super().write(text)

    out = Out()
    with progress(Console(file=out, width=40), "[matching]"):
        assert printed.wait(10)
    assert set(out.getvalue().splitlines()) == {"[matching] 0s elapsed"}


def test_what_ends_soon_says_nothing() -> None:
    console, out = plain()
    with progress(console, "matching") as shown:
        for done in range(1000):
            shown(done, 1000)
    assert out.getvalue() == ""


def test_ctrl_c_leaves_one_line_that_says_how_to_go_on() -> None:
    console, out = plain()
    with pytest.raises(KeyboardInterrupt), progress(console, "matching", stop_note="the same command goes on."):
        raise KeyboardInterrupt
    assert out.getvalue() == "stopped: the same command goes on.\n"


def test_on_a_terminal_one_line_ticks_and_goes_away() -> None:
    host, terminal = pty.openpty()
    with open(terminal, "w", encoding="utf-8") as file:
        console = Console(file=file, width=80, height=24, force_terminal=True)
        with pytest.raises(KeyboardInterrupt), progress(console, "written", "bytes", stop_note="go on.") as shown:  # noqa: PT012
            shown(1 << 20, 3 << 20)
            sleep(0.4)
            raise KeyboardInterrupt
    text = drain(host)
    assert "written 1.0 of 3.0 MiB" in text
    assert "━" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0  # the cursor is shown again
    assert re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").rstrip().endswith("stopped: go on.")
