"""`lmtrain watch RUN`: how a run goes, from another terminal, out of what it writes into its folder.

On a terminal its panel, of which only changed lines are sent; elsewhere lines as they come. The run knows nothing of
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from lmtrain.cli.inspect.run_view import age_s, model_words, planned, state_words
from lmtrain.cli.screen.console import PlainConsole
from lmtrain.cli.screen.terminal import print_message
from lmtrain.errors import MissingInputError, UsageError, join_few
from lmtrain.observe.screen.panel import RunPanel, Saves
from lmtrain.observe.screen.row_text import eval_line, step_line, valid_line
from lmtrain.runfolder.folder import find_runs, read_run_state, read_settings, record_errors
from lmtrain.runfolder.names import CONFIG, METRICS
from lmtrain.runfolder.rows import RowFollower

EXAMPLES = (
    ("lmtrain watch runs/a", "the panel of a run that is going on, until it ends or you press Ctrl-C"),
    ("lmtrain watch runs/a --every 30", "less often, over a slow line"),
    ("lmtrain watch runs/a --once", "how it is now"),
)
_LEAST_S = 0.2
_GOING_ON = ("running", "out of sight")


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, on this machine or a shared disk.")],
    every: Annotated[float, typer.Option(metavar="SECONDS", help="How often to look.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show how it is now, and end.")] = False,
) -> None:
    """Watch a run from another terminal, over a slow line too: its panel, or a line for each step that is logged."""
    from lmtrain.observe.screen.verb_progress import is_live

    if not every >= _LEAST_S:
        raise UsageError(f"--every={every:g} is how often to look, at least {_LEAST_S:g} seconds. Use --every=2.")
    console = PlainConsole()
    try:
        _wait_for(run, every, console, waits=is_live(console) and not once)
        with record_errors(run):
            (_draw if is_live(console) else _print)(run, every, once, console)
    except KeyboardInterrupt:
        print_message(console, "the watching ends here; the run is left as it is")


def _wait_for(run: Path, every: float, console: Console, *, waits: bool) -> None:
    if (run / CONFIG).is_file():
        return
    if inside := [str(one) for one in find_runs(run) if one != run]:
        raise UsageError(f"{run} is not a run but holds runs: {join_few(inside)}. Give one, or type `lmtrain runs`.")
    there = f"is no run's folder (it has no {CONFIG})" if run.exists() else "does not exist"
    if not waits or (run.exists() and not run.is_dir()):
        raise MissingInputError(
            f"{run} {there} yet, and only a terminal waits for a run to begin. Give the folder of a run, its run.dir."
        )
    print_message(console, f"{run} {there} yet: waiting for a run to begin there. Ctrl-C ends the waiting.")
    while not (run / CONFIG).is_file():
        time.sleep(every)


def _draw(run: Path, every: float, once: bool, console: Console) -> None:
    followed, drawn, panel = RowFollower(run / METRICS), Redrawn(console), _panel(run)
    while True:
        state, rows = read_run_state(run), followed.rows()
        if any(row["event"] == "start" for row in rows) and panel.row:
            panel = _panel(run)  # because: it may go on with other settings
        for row in rows:
            _take(panel, row)
        panel.now, over = _words(state, panel.row), state["state"] not in _GOING_ON
        if over:
            panel.stop(when_last_heard=True)
        # because: a panel that stands still has no line of its own for what happens now
        drawn.show(Group(panel, Text(f"  {panel.now}", style="dim")) if over else panel)
        if over or once:
            return
        time.sleep(every)


def _print(run: Path, every: float, once: bool, console: Console) -> None:
    """Print the newest step of each look, and everything else that happened."""
    from lmtrain.observe.screen.training_view import print_line
    from lmtrain.observe.stragglers.judge import slow_link_line, slow_rank_line

    followed, total, slow, first = RowFollower(run / METRICS), _panel(run).total_steps, "", True
    lines: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "valid": valid_line, "eval": eval_line, "save": lambda row: f"saved step {row['saved_step']}",
    }  # fmt: skip
    while True:
        state, rows = read_run_state(run), followed.rows()
        steps = [row for row in rows if row["event"] == "step"]
        for row in rows if not first else rows[-1:]:
            if row["event"] in lines:
                print_line(console, lines[row["event"]](row))
        for row in steps[-1:]:
            print_line(console, step_line(row, total))
            named = "; ".join(filter(None, [slow_rank_line(row), slow_link_line(row)]))
            if named != slow:
                print_line(console, f"slow: {named}" if named else "all keep pace again")
            slow = named
        over = once or state["state"] not in _GOING_ON
        if over or first:
            print_line(console, _words(state, steps[-1] if steps else {}))
        if over:
            return
        first = False
        time.sleep(every)


def _panel(run: Path) -> RunPanel:
    """Build a panel from the settings of the run's last start, as far as this version knows them."""
    settings = read_settings(run)
    facts, saves = planned(run, settings), settings.get("checkpoint", {})
    words = model_words(settings.get("model", {}), facts["parameters"])
    title = {"run": str(run), "model": words} | ({"layout": facts["layout"]} if facts["layout"] else {})
    return RunPanel(title, int(facts["steps"] or 0), saves=Saves(saves.get("interval_steps"), saves.get("interval_s")))


def _take(panel: RunPanel, row: dict[str, Any]) -> None:
    """Show a row in the panel, with its age by this machine's clock."""
    age = age_s(row["time"]) if "time" in row else 0.0
    match row["event"]:
        case "step":
            panel.step(row, age)
        case "valid":
            panel.valid(row)
        case "eval":
            panel.evaluated(row)
        case "save":
            panel.saved(row, age)


def _words(state: dict[str, Any], row: Mapping[str, Any]) -> str:
    return state_words(state | {"last_row_time": row.get("time")})


class Redrawn:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: list[str] = []
        self._size = console.size

    def show(self, what: RenderableType) -> None:
        console = self._console
        with console.capture() as captured:
            console.print(what)
        lines = captured.get().split("\n")[:-1]
        if console.size != self._size or len(lines) > console.height - 1:
            self._size, self._lines = console.size, []
        console.file.write(difference(self._lines, lines))
        console.file.flush()
        self._lines = lines


def difference(before: list[str], now: list[str]) -> str:
    """Return what to write so that `now` replaces `before`, with the cursor below it before and after."""
    now = now + [""] * (len(before) - len(now))
    sent, at = "", len(before)  # `at`: the line that the cursor is on
    for number, line in enumerate(now):
        if number >= len(before):
            sent, at = f"{sent}{_move(number - at)}\r{line}\n", number + 1
        elif line != before[number]:
            sent, at = f"{sent}{_move(number - at)}\r{line}\x1b[K", number
    return sent + (_move(len(now) - at) + "\r" if sent else "")


def _move(lines: int) -> str:
    return f"\x1b[{abs(lines)}{'B' if lines > 0 else 'A'}" if lines else ""
