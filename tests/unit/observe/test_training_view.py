"""The panel at common widths, the plain lines elsewhere, and the log file that both write."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from rich.console import Console

from lmtrain.observe.screen.live_panel import RunPanel, SaveSchedule
from lmtrain.observe.screen.training_view import LiveView, RunLog, RunView, build_view
from lmtrain.runtime.processes import command_watch

FACTS = {"run": "runs/first", "model": "gpt2_small", "parameters": "124M", "device": "1 x NVIDIA H200, bf16"}


def _row(step: int) -> dict[str, Any]:
    return {
        "event": "step", "step": step, "loss": 10.0 - step / 400, "lr": 3e-4, "grad_norm": 0.84,
        "tokens_per_s": 412345.0, "flops_per_s": 4.12e14, "mfu": 0.4164, "data_wait_s": 0.0012,
        "memory_bytes": 61 << 30, "samples": 512 * step, "tokens": 524288 * step, "elapsed_s": 1.3 * step,
        "eta_s": 996.0, "skipped": 0,
    }  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _panel(width: int, steps: int = 1234, later_s: float = 0.0, stopped: bool = False) -> str:
    clock = Clock()
    panel = RunPanel(FACTS, 2000, clock)
    for step in range(1, steps + 1):
        panel.show_row(_row(step))
    if steps:
        panel.show_row({"event": "valid", "step": 1000, "loss": 3.3012})
        panel.show_row({"event": "save", "saved_step": 1200})
    if stopped:
        panel.freeze()
    clock.now_s += later_s
    console = Console(width=width, record=True, file=io.StringIO(), legacy_windows=False)
    console.print(panel)
    return console.export_text()


def drain(host: int) -> str:
    """All that a terminal was sent, read once its other end is closed."""
    data = b""
    with contextlib.suppress(OSError):  # Linux says EIO at the end
        while chunk := os.read(host, 1 << 16):
            data += chunk
    os.close(host)
    return data.decode(errors="replace")


def test_a_save_after_the_last_row_is_not_of_the_future() -> None:
    clock = Clock()
    panel, console = RunPanel(FACTS, 2000, clock), Console(width=120, record=True, file=io.StringIO())
    panel.show_row(_row(1200))
    clock.now_s += 5.0
    panel.show_row({"event": "save", "saved_step": 1200})
    clock.now_s += 1140.0
    panel.freeze(at_last_row=True)
    console.print(panel)
    assert "step 1200, 0s ago" in console.export_text()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_panel_shows_every_figure_whole(width: int) -> None:
    text = _panel(width)
    for figure in (
        "runs/first", "124M", "step 1234/2000", "left 16m36s", "6.9150", "3.3012 at step 1000", "3.00e-04", "0.840",
        "last 50 steps 412k tokens/s", "412 TFLOP/s, MFU 41.6%", "1.2 ms a step", "61.0 GiB", "26m44s, 647M tokens",
        "smoothed loss 6.9375", "step 1200, 0s ago", "Ctrl-C stops after a step",
    ):  # fmt: skip
        assert figure in text
    assert "…" not in text
    assert re.search("█[▁-█]+▁", text)
    *panel, last = text.splitlines()
    assert {len(line) for line in panel} == {width}
    assert len(last.rstrip()) < width - 10  # where ^C is echoed, which must not begin a new line


def test_facts_break_between_two_of_them() -> None:
    """A fact that is torn apart reads as two."""
    facts = {"run": "runs/a", "model": "gpt 7.23M parameters", "device": "AMD EPYC fp32"}
    facts["data"] = "5.18k samples of 64 ids"
    console = Console(width=80, record=True, file=io.StringIO(), legacy_windows=False)
    console.print(RunPanel(facts, 2000))
    assert "| data 5.18k samples of 64 ids " in console.export_text().replace("│", "|")


def test_two_columns_at_80_and_one_below_70() -> None:
    assert len(_panel(80).splitlines()) == 12
    assert len(_panel(66).splitlines()) > 15


def test_the_clock_ticks_between_rows_and_stands_still_at_the_end() -> None:
    later = _panel(80, later_s=5.0)
    for figure in ("left 16m31s", "26m49s", "step 1200, 5s ago"):
        assert figure in later
    assert "left 0s" in _panel(80, later_s=2000.0)
    ended = _panel(80, later_s=5.0, stopped=True)
    assert "left 16m36s" in ended
    assert "Ctrl-C" not in ended


def test_an_empty_panel_has_dashes() -> None:
    assert _panel(80, steps=0).count(" -  ") >= 9


def test_off_a_terminal_there_are_plain_lines_and_a_log(tmp_path: Path) -> None:
    out, log = io.StringIO(), RunLog(tmp_path / "log.txt")
    view = build_view(Console(file=out, width=40, force_terminal=True), FACTS, 2000, log=log)
    assert type(view) is RunView
    with view:
        view.show_row(_row(100))
        view.show_row({"event": "valid", "step": 100, "loss": 3.3})
        view.show_note("saved [bold]step_00000100")
    log.close()
    lines = out.getvalue().splitlines()
    assert [line[:22] for line in lines] == [
        "run runs/first  model ", "step  100/2000  loss 9", "valid at step 100  los", "saved [bold]step_00000"
    ]  # fmt: skip
    assert "\x1b" not in out.getvalue()
    assert [line.split("Z  ", 1)[1] for line in (tmp_path / "log.txt").read_text().splitlines()] == lines


@pytest.mark.parametrize("no_color", [False, True])
def test_on_a_terminal_there_is_a_live_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    host, terminal = pty.openpty()
    with open(terminal, "w", encoding="utf-8") as file:
        log = RunLog(tmp_path / "log.txt")
        view = build_view(Console(file=file, width=80, height=24), FACTS, 2000, log=log)
        assert isinstance(view, LiveView)
        with view:
            view.show_row(_row(100))
            view.show_row({"event": "save", "saved_step": 100})
            view.show_note("saved step_00000100")
            view.show_activity("SIGINT: stopping after this step")
            sleep(0.4)
    log.close()
    shown = drain(host)
    assert "saved step_00000100" in shown
    assert "step 100/2000" in shown
    assert "SIGINT: stopping after this step" in shown
    assert ("\x1b[36m" in shown) is not no_color
    assert "step  100/2000  loss" in (tmp_path / "log.txt").read_text()


def test_the_terminal_is_given_back_after_an_error() -> None:
    host, terminal = pty.openpty()
    with open(terminal, "w", encoding="utf-8") as file:
        console = Console(file=file, width=80, height=24, force_terminal=True)
        with pytest.raises(KeyError), LiveView(console, FACTS, 10) as view:
            view.show_row({"event": "valid", "loss": 1.0})  # lacks its step
    shown = drain(host)
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0  # the cursor is shown again


def test_domains_and_evaluations_are_shown(tmp_path: Path) -> None:
    domains = {"wiki": {"loss": 3.0}, "code": {"loss": 3.5}}
    valid = {"event": "valid", "step": 8, "loss": 3.25, "domains": domains, "ema": {"loss": 3.125}}
    measures = {"bits_per_byte": 1.5, "whole_word_accuracy": 0.25}
    row = {"event": "eval", "step": 8, "name": "lambada/x", "headline": "whole_word_accuracy", "measures": measures}
    panel, console = RunPanel(FACTS, 2000), Console(width=120, record=True, file=io.StringIO())
    panel.show_row(valid)
    panel.show_row(row | {"step": 4})
    panel.show_row(row)
    console.print(panel)
    drawn = console.export_text()
    assert "3.2500 at step 8 [wiki 3.0000, code 3.5000]" in drawn
    assert "average       3.1250 with averaged weights" in drawn
    assert "lambada/x  whole word accuracy 25.00 %, bits per byte 1.5000 at step 8" in drawn
    assert "at step 4" not in drawn
    view = RunView(Console(file=io.StringIO()), FACTS, 2000, RunLog(tmp_path / "log.txt"))
    view.show_row(valid)
    view.show_row(row)
    told = (tmp_path / "log.txt").read_text()
    assert "valid at step 8  loss 3.2500 [wiki 3.0000, code 3.5000]" in told
    assert "eval at step 8  lambada/x  whole word accuracy 25.00 %, bits per byte 1.5000" in told


SLOW = {
    "straggler_slowest": 37, "straggler_slowest_by": 0.1023, "straggler_bubble": 0.0812, "straggler_exposed": 0.0341,
    "memory_rank": 511, "limit_left_s": 11000.0,
}  # fmt: skip
NAMED = {
    "straggler_rank": 37, "straggler_host": "node-b7", "straggler_coordinate": {"pp": 1, "dp_shard": 2, "tp": 1},
    "straggler_span": "backward", "straggler_by": 0.1023, "straggler_span_s": 0.0882, "straggler_usual_s": 0.08,
    "straggler_ranks": [37, 38], "straggler_link": [3, 7], "straggler_link_s": 0.0123, "straggler_link_usual_s": 0.002,
}  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_panel_of_many_ranks(width: int) -> None:
    panel = RunPanel(FACTS, 2000, Clock(), SaveSchedule(500, 3600.0))
    panel.show_row(_row(1234) | SLOW | NAMED)
    console = Console(width=width, record=True, file=io.StringIO(), legacy_windows=False)
    console.print(panel)
    text = console.export_text()
    for figure in ("rank 37: +10.2%", "8.1% of a step", "3.4%, not hidden", "61.0 GiB on rank 511", "in 3h03m"):
        assert figure in text
    words = " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())
    assert "at step 1500, in 5m45s" in words
    assert (
        "slow rank rank 37 on node-b7 (pp 1, dp_shard 2, tp 1) and 1 more: +10.2%, most of all backward, 88.2 ms "
        "beside 80.0 ms a step"
    ) in words
    assert "slow link ranks 3 and 7: 12.3 ms there and back, others 2.0 ms" in words


def test_what_a_row_does_not_know_has_no_line() -> None:
    text = _panel(120)
    for name in ("slowest rank", "slow rank", "slow link", "bubble", "communication", "time is up", "next save"):
        assert name not in text


@pytest.mark.parametrize(
    ("saves", "step", "expected"),
    [
        (SaveSchedule(500), 1234, 1500), (SaveSchedule(500), 1500, 2000), (SaveSchedule(500), 1999, 2000),
        (SaveSchedule(0), 7, 2000),
        (SaveSchedule(None), 7, None), (SaveSchedule(3000), 7, 2000),
    ],
)  # fmt: skip
def test_the_step_of_the_next_save(saves: SaveSchedule, step: int, expected: int | None) -> None:
    assert saves.next_step(step, 2000) == expected


def test_the_time_to_a_save_and_to_the_end_runs_down() -> None:
    clock = Clock()
    panel = RunPanel(FACTS, 2000, clock, SaveSchedule(0, 600.0))
    panel.show_row(_row(1234) | {"limit_left_s": 90.0})
    panel.show_row({"event": "save", "saved_step": 1200}, age_s=60.0)
    clock.now_s += 30
    console = Console(width=120, record=True, file=io.StringIO(), legacy_windows=False)
    console.print(panel)
    text = console.export_text()
    assert "in 8m30s at the latest" in text
    panel.saves = SaveSchedule(300, 600.0)
    console.print(panel)
    assert "at step 1500, in 5m15s" in (sooner := console.export_text())
    assert "at the latest" not in sooner
    assert "in 1m" in text
    assert "step 1200, 1m30s ago" in text


@pytest.mark.parametrize("columns", [80, 120])
def test_the_panel_names_the_stage_from_its_beginning_on(columns: int) -> None:
    stages = {"trunk": 1000, "a_name_of_some_length": 1500, "long": 2000}
    for row, words in (
        ({}, "trunk 1/3 to step 1000"),
        ({"step": 1900, "stage": "long"}, "long 3/3 to step 2000"),
        ({"step": 1900, "stage": "unknown"}, "unknown"),
    ):  # fmt: skip
        console = Console(width=columns, record=True, file=io.StringIO())
        panel = RunPanel(FACTS, 2000, stages=stages, start={"step": 700, "stage": "trunk"})
        if row:
            panel.show_row({"event": "step", **row})
        console.print(panel)
        shown = console.export_text()
        assert words in shown
        assert f"step {row.get('step', 700)}/2000" in shown


def test_what_a_run_does_between_its_rows_is_said_in_a_pipe() -> None:
    """A line about each measurement and save while it takes long; its time counts from its beginning."""
    clock, out = Clock(), io.StringIO()
    view = RunView(Console(file=out), FACTS, 2000, clock=clock)
    activities: list[Callable[[], None]] = [
        lambda: None,
        lambda: view.show_row(_row(100)),
        lambda: view.show_activity("validating on 64 samples"),
        lambda: view.show_activity("evaluating lambada: 40%"),
        lambda: view.show_row({"event": "eval", "step": 100, "name": "lambada", "headline": "x", "measures": {"x": 1}}),
    ]
    for activity in activities:
        activity()
        clock.now_s += 65.0
        view._print_activity()
    lines = [line for line in out.getvalue().splitlines() if line.endswith("so far")]
    assert lines == [
        "computing the first step, 1m05s so far", "training, 1m05s so far",
        "validating on 64 samples, 1m05s so far", "evaluating lambada: 40%, 2m10s so far", "training, 1m05s so far",
    ]  # fmt: skip


@pytest.mark.parametrize("live", [False, True])
def test_a_silence_of_a_run_prints_its_activity_but_for_a_panel(live: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=live)
    with (LiveView if live else RunView)(console, FACTS, 2000) as view:
        print_line = command_watch._lines[-1]
        assert print_line == (None if live else view._print_activity)
    assert not command_watch._lines
