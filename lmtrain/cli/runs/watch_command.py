"""`lmtrain watch RUN`: show a run's progress from another terminal, by reading the files in its folder.

On a terminal it shows the run's panel and sends only changed lines; elsewhere it prints lines. The run is not affected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from lmtrain.cli.inspect.run_folder_view import age_s, describe_state, ingredient_lines
from lmtrain.cli.screen.print_facts_and_tables import PlainConsole
from lmtrain.cli.screen.print_messages_and_json import print_message
from lmtrain.errors import MissingInputError, UsageError, join_few, own
from lmtrain.observe.screen.live_panel import RunPanel, SaveSchedule
from lmtrain.observe.screen.metrics_row_text import eval_line, step_line, valid_line
from lmtrain.runfolder.file_names import CONFIG, METRICS
from lmtrain.runfolder.folder_reader import find_runs, is_run, not_a_run, read_run_state, read_settings, record_errors
from lmtrain.runfolder.metrics_rows import RowFollower, read_last_rows, rows_in_force
from lmtrain.start.slurm_job.queued_job import QueuedJob
from lmtrain.train.record.facts_of_recorded_runs import facts_of_run

EXAMPLES = (
    ("lmtrain watch runs/a", "the panel of a run that is going on, until it ends or you press Ctrl-C"),
    ("lmtrain watch runs/a --every 30", "less often, over a slow line"),
    ("lmtrain watch runs/a --once", "how it is now"),
    ("lmtrain watch runs/a && lmtrain eval runs/a ...", "what follows, once the run has finished"),
)
_MIN_INTERVAL_S = 0.2
_LIVE_STATES, _BROKEN_STATES = ("running", "out of sight"), ("failed", "killed")


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, on this machine or a shared disk.")],
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds between updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show the current state once and exit.")] = False,
) -> None:
    """Watch a run's progress from another terminal: a live panel, or one line for each logged step.

    It ends with the run, with exit code 1 if that failed or was killed, and 0 otherwise.
    """
    from lmtrain.observe.screen.command_progress import is_live

    if not every >= _MIN_INTERVAL_S:
        raise UsageError(f"--every={every:g} must be at least {_MIN_INTERVAL_S:g} seconds. Use {own(2)}.")
    console = PlainConsole()
    try:
        _wait_for_run(run, every, console, may_wait=is_live(console) and not once)
        with record_errors(run):
            state = (_show_panel if is_live(console) else _print_lines)(run, every, once, console)
        if state in _BROKEN_STATES and not once:
            raise typer.Exit(1)
    except KeyboardInterrupt:
        print_message(console, "the watching ends here; the run is left as it is")


def _wait_for_run(run: Path, interval_s: float, console: Console, *, may_wait: bool) -> None:
    """Return once a run has begun in the folder. If there is none yet, look again every `interval_s` seconds with
    `may_wait`, else raise MissingInputError. Raise UsageError if the folder only contains folders of runs.
    """
    if _has_begun(run):
        return
    if runs := [str(path) for path in find_runs(run) if path != run]:
        raise UsageError(
            f"{run} is not a run folder but contains runs: {join_few(runs)}. Give one of them, or list them with "
            "`lmtrain runs`."
        )
    if not may_wait or (run.exists() and not run.is_dir()):
        hint = (
            "Give the run.dir of a run; without --once, and on a terminal, `lmtrain watch` waits for a run to begin in "
            "a folder."
        )
        raise MissingInputError(not_a_run(run, f"no run has begun there, as it has no {METRICS}", hint))
    print_message(console, f"waiting for a run to begin in {run}, which has no {METRICS} yet. Ctrl-C ends the waiting.")
    while not _has_begun(run):
        time.sleep(interval_s)


def _has_begun(run: Path) -> bool:
    """Return whether a run has begun in a folder; a config.json alone may be a model's."""
    return is_run(run) and (run / CONFIG).is_file()


def _show_panel(run: Path, interval_s: float, only_once: bool, console: Console) -> str:
    """Show a panel about the run's progress on the terminal, and redraw it every `interval_s` seconds until the run
    ends. With `only_once` draw it once. Return the run's state.
    """
    follower, redrawer, panel = RowFollower(run / METRICS), Redrawer(console), _build_panel(run)
    job = QueuedJob(run)
    while True:
        state, rows = read_run_state(run), rows_in_force(follower.rows())
        if any(row["event"] in ("start", "stage") for row in rows) and panel.row:
            panel = _build_panel(run)  # because: a new start may have other settings, and a stage has others
        for row in rows:
            panel.show_row(row, age_s(row["time"]) if "time" in row else 0.0)
        panel.activity, is_over = _describe_row_state(state, panel.row), state["state"] not in _LIVE_STATES
        if is_over and not only_once and (wait := job.describe_wait(state)):
            panel.activity, is_over = wait, False
        if is_over:
            panel.freeze(at_last_row=True)
        # because: a panel that is no longer live does not show its `now` line
        redrawer.draw(Group(panel, Text(f"  {panel.activity}", style="dim")) if is_over else panel)
        if is_over or only_once:
            return str(state["state"])
        time.sleep(interval_s)


def _print_lines(run: Path, interval_s: float, only_once: bool, console: Console) -> str:
    """Print a line for the newest training step, and for each new validation, evaluation, save and stage, every
    `interval_s` seconds until the run ends. With `only_once` print the newest. Return the run's state.
    """
    from lmtrain.observe.screen.print_one_line import print_line
    from lmtrain.observe.stragglers.find_slow_ranks import slow_link_line, slow_rank_line

    follower, total, slow_before, first = RowFollower(run / METRICS), _build_panel(run).total_steps, "", True
    job, wait = QueuedJob(run), ""
    lines: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "valid": valid_line, "eval": eval_line, "save": lambda row: f"saved step {row['saved_step']}",
        "stage": lambda row: f"the stage {row.get('stage')} begins after step {row['step']}",
    }  # fmt: skip
    while True:
        state, rows = read_run_state(run), rows_in_force(follower.rows())
        steps = [row for row in rows if row["event"] == "step"]
        for row in rows if not first else rows[-1:]:
            if row["event"] in lines:
                print_line(console, lines[row["event"]](row))
        for row in steps[-1:]:
            print_line(console, step_line(row, total))
            slow_now = "; ".join(filter(None, [slow_rank_line(row), slow_link_line(row)]))
            if slow_now != slow_before:
                print_line(console, f"slow: {slow_now}" if slow_now else "all keep pace again")
            slow_before = slow_now
        is_over = only_once or state["state"] not in _LIVE_STATES
        wait_before, wait = wait, job.describe_wait(state) if is_over and not only_once else ""
        is_over = is_over and not wait
        if is_over or first or (wait and not wait_before):
            print_line(console, _describe_row_state(state, steps[-1] if steps else {}))
        if wait and wait != wait_before:
            print_line(console, wait)
        if is_over:
            return str(state["state"])
        first = False
        time.sleep(interval_s)


def _build_panel(run: Path) -> RunPanel:
    """Return a panel for the terminal that is titled with the run's folder, model and layout, from the settings of its
    last start. A layout that this version of lmtrain cannot read is left out.
    """
    settings = read_settings(run)
    now = facts_of_run(settings, rows_in_force(read_last_rows(run / METRICS)), str(read_run_state(run)["state"]))
    saves, title = settings.get("checkpoint", {}), dict(ingredient_lines(now, settings))
    return RunPanel(
        {"run": str(run)} | title, now.steps or 0, stages={stage.name: stage.last_step for stage in now.named_stages},
        saves=SaveSchedule(saves.get("interval_steps"), saves.get("interval_s")),
    )


def _describe_row_state(state: dict[str, Any], row: Mapping[str, Any]) -> str:
    """Describe the run's state; `row` is its newest step row."""
    return describe_state(state | {"last_row_time": row.get("time")})


class Redrawer:
    """Draws a rich renderable again and again at the same place of a terminal; sends only the lines that changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: list[str] = []
        self._size = console.size

    def draw(self, renderable: RenderableType) -> None:
        console = self._console
        with console.capture() as captured:
            console.print(renderable)
        lines = captured.get().split("\n")[:-1]
        if console.size != self._size or len(lines) > console.height - 1:
            self._size, self._lines = console.size, []
        console.file.write(redraw_text(self._lines, lines))
        console.file.flush()
        self._lines = lines


def redraw_text(before: list[str], after: list[str]) -> str:
    """Return the text with escape codes that changes a terminal which shows the lines `before` so that it shows the
    lines `after`. Only changed lines are sent; "" if none has changed.

    The cursor is below the lines before and after.
    """
    after = after + [""] * (len(before) - len(after))
    output, cursor = "", len(before)  # the line that the cursor is on
    for number, line in enumerate(after):
        if number >= len(before):
            output, cursor = f"{output}{_cursor_move(number - cursor)}\r{line}\n", number + 1
        elif line != before[number]:
            output, cursor = f"{output}{_cursor_move(number - cursor)}\r{line}\x1b[K", number
    return output + (_cursor_move(len(after) - cursor) + "\r" if output else "")


def _cursor_move(lines: int) -> str:
    """Return the escape code that moves the cursor down by `lines`, up if negative."""
    return f"\x1b[{abs(lines)}{'B' if lines > 0 else 'A'}" if lines else ""
