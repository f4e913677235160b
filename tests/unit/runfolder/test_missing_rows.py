"""Whatever reads metrics.jsonl is right about the rows that are there, whichever are missing.

A seed draws what a run has done: starts that log, validate, evaluate and save at intervals of their own, of which some
are killed and lose their last rows, go back, or go on under other settings. Each reader's answer is compared with the
history by step, which was written down as it happened.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from io import StringIO
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from rich.console import Console

import lmtrain
from lmtrain.cli.report.draw_curves import build_charts, evaluation_tables
from lmtrain.cli.runs.plot_command import _read_curves
from lmtrain.cli.runs.watch_command import _print_lines
from lmtrain.exchange.huggingface.model_card import _rows_of_run
from lmtrain.observe.history.read_metrics_columns import compare_records, read_record
from lmtrain.runfolder.folder_reader import read_runs
from lmtrain.runfolder.metrics_rows import RowFollower, read_last_rows, read_metrics, rows_in_force
from lmtrain.runfolder.settings_differences import first_start, read_settings_history
from lmtrain.runfolder.tensorboard_metric_names import score_by_step
from lmtrain.start.facts_of_outputs.facts_of_run_folder import run_facts
from lmtrain.start.plans.calibrate_on_runs import _WARMUP_STEPS, _step_times
from lmtrain.start.sweep_runs import summarize_run
from lmtrain.train.record.changed_settings_and_rate import _learning_rate_of_step
from lmtrain.train.record.facts_of_recorded_runs import row_of_run
from lmtrain.train.record.metrics_writer import scores_before_resume, start_number
from lmtrain.train.step_and_save_durations import _NUM_KEPT, EVALUATION, VALIDATION, Durations
from tests.unit.train.test_stages import composed

SEEDS = range(30)
Row = dict[str, Any]
By = dict[tuple[str, int, str], Row]  # by event, step that it is about, and name


class History:
    """History of a drawn run by step, and the metrics.jsonl in `folder` that the run has left of it."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw, self.folder = random.Random(seed), folder
        folder.mkdir()
        self.by: By = {}  # rows that count, the newest last
        self.start_of: dict[int, int] = {}  # step -> the start that did it last
        self.seconds: dict[tuple[int, int], float] = {}  # of each start's steps
        self.written: list[Row] = []
        self.starts: list[int] = []  # the step at which each began
        for attempt in range(1, self.draw.randint(1, 4) + 1):
            self.train(attempt, self.draw.choice([0, *(step for event, step, _ in self.by if event == "save")]))
        text = "".join(json.dumps(row).replace("NaN", '"nan"') + "\n" for row in self.written)
        torn = self.draw.choice(["", '{"event": "step", "step": 9', '{"event": "valid"'])
        (folder / "metrics.jsonl").write_text(text + torn)
        (folder / "config.json").write_text(json.dumps({"checkpoint": {"best_by": "loss/valid"}}))

    def train(self, attempt: int, begin: int) -> None:
        """Do a start of the run from step `begin`."""
        draw, elapsed, rows = self.draw, 0.0, list[Row]()
        every = {event: draw.choice(steps) for event, steps in INTERVALS.items()}
        self.starts.append(begin)
        self.by = {key: row for key, row in self.by.items() if key[0] == "start" or key[1] <= begin}
        self.start_of = {step: number for step, number in self.start_of.items() if step <= begin}
        settings = {"optim": {"lr": draw.randint(1, 3)}, "kept": 1}
        rows.append({"event": "start", "step": begin, "tokens": 100 * begin, "settings": settings})
        end = begin + draw.choice([0, 1, draw.randint(2, 24)])
        for step in range(begin + 1, end + 1):
            self.start_of[step] = attempt
            self.seconds[attempt, step] = 1 + draw.random()
            elapsed += self.seconds[attempt, step]
            measured = {event: step % interval == 0 for event, interval in every.items()}
            loss = 9 - step / 64 + attempt % 2 / 1024
            if measured["step"]:
                values = {"loss": draw.choice([loss] * 9 + [math.nan]), "lr": 1 / step + attempt, "tokens": 100 * step}
                values |= {"tokens_per_s": float(draw.randint(90, 110)), "grad_norm": draw.random()}
                for missing in draw.sample(["lr", "tokens_per_s", "grad_norm"], draw.choice([0, 0, 0, 1])):
                    del values[missing]
                rows.append({"event": "step", "step": step, "elapsed_s": elapsed, **values})
            if measured["valid"]:
                seconds, loss = draw.random(), draw.choice([draw.random()] * 9 + [math.nan])
                rows.append({"event": "valid", "step": step, "loss": loss, "ppl": loss + 1, "seconds": seconds})
                elapsed += seconds
            for name in ("wiki", "books") if measured["eval"] else ():
                measures, seconds = {"ppl": draw.randint(1, 9), "accuracy": draw.random()}, draw.random()
                about = {"event": "eval", "step": step, "name": name, "headline": "ppl"}
                rows.append({**about, "measures": measures, "seconds": seconds})
                elapsed += seconds
            if measured["save"]:
                saved = {"saved_step": step, "write_s": draw.random(), "stall_s": draw.random()}
                rows.append({"event": "save", "step": min(step + draw.randint(0, 2), end), **saved})
        rows = rows[: max(1, len(rows) - draw.choice([0, 0, 1, 2, 3]))]  # because: what a killed writer held is lost
        for row in rows:
            row |= {"attempt": attempt, "time": f"2026-01-01T00:00:00.{len(self.written):06}Z"}
            key = row["event"], row["saved_step" if "saved_step" in row else "step"], str(row.get("name", ""))
            self.by.pop(key, None)
            self.by[key] = row
            self.written.append(row)

    def rows(self, event: str, name: str = "") -> dict[int, Row]:
        """Return step -> row for the rows of an event that count."""
        return {step: row for (kind, step, of), row in sorted(self.by.items()) if (kind, of) == (event, name)}

    def column(self, event: str, key: str, name: str = "") -> dict[int, float]:
        """Return step -> finite value."""
        rows = {step: row.get("measures", row).get(key, math.nan) for step, row in self.rows(event, name).items()}
        return {step: value for step, value in rows.items() if not math.isnan(value)}

    @property
    def values(self) -> dict[str, dict[int, float]]:
        """The finite values of each measure by its name."""
        found = {key: self.column("step", key) for key in ("loss", "lr", "grad_norm", "tokens_per_s", "attempt")}
        found |= {"loss/valid": self.column("valid", "loss"), "valid/ppl": self.column("valid", "ppl")}
        return found | {
            f"eval/{name}/{key}": self.column("eval", key, name)
            for name in ("wiki", "books")
            for key in ("ppl", "accuracy")
        }


INTERVALS = {"step": (1, 1, 2, 3, 5), "valid": (2, 3, 4, 7), "eval": (4, 6), "save": (3, 5)}
Answers = tuple[Any, Any]  # what a reader says, and what the history says


def last(values: dict[int, Any], default: Any = None) -> Any:
    return values[max(values)] if values else default


def plain(rows: Any) -> list[str]:
    """Return rows as texts, in which nan equals nan."""
    return [json.dumps(row, sort_keys=True) for row in rows]


def rows(run: History) -> Answers:
    path, followed = run.folder / "metrics.jsonl", list[Row]()
    counted = plain(read_metrics(path)), plain(rows_in_force(read_last_rows(path)))
    whole, follower = path.read_bytes(), RowFollower(path)
    for cut in sorted(run.draw.randint(0, len(whole)) for _ in range(4)):
        path.write_bytes(whole[:cut])
        followed += follower.rows()
    path.write_bytes(whole)
    return (*counted, plain(followed + follower.rows())), (*[plain(run.by.values())] * 2, plain(run.written))


def python_metrics(run: History) -> Answers:
    metrics, found = lmtrain.metrics(run.folder), dict[str, dict[int, float]]()
    for name in run.values.keys() & metrics.keys():
        pairs = zip(metrics["step"].tolist(), metrics[name].tolist(), strict=True)
        found[name] = {step: value for step, value in pairs if not math.isnan(value)}
    steps = {step for event, step, _ in run.by if event in ("step", "valid", "eval")}
    wanted = {name: run.values[name] for name in found}
    assert not any(values for name, values in run.values.items() if name not in found)
    return (metrics["step"].tolist(), found), (sorted(steps), wanted)


def report(run: History) -> Answers:
    record = read_record(run.folder / "metrics.jsonl")
    charts, drawn = build_charts(["run"], [record], [None]), dict[str, Any]()
    for figure in charts.figures:
        for curve in figure.curves:
            name = "loss/valid" if curve.name == "validation" else figure.key
            drawn[name] = dict(zip(curve.points.step, curve.points.value, strict=True))
            if run.column("step", "tokens"):  # a row's tokens are 100 for each step, also between and beyond rows
                assert curve.points.tokens == pytest.approx([100 * step for step in curve.points.step])
    wanted = {name: run.values[name] for name in drawn}
    saves = [mark.step for mark in charts.marks if mark.kind == "save"]
    _, numbers = evaluation_tables([record], ["run"])
    cells = {(row["<name"], int(row["step"])): float(row["ppl"]) for row in numbers}
    ppl = {(name, step): value for name in ("wiki", "books") for step, value in run.column("eval", "ppl", name).items()}
    return (drawn, saves, cells), (wanted, sorted(run.rows("save")), ppl)


def plot(run: History) -> Answers:
    wanted = run.column("step", "loss")
    curves = _read_curves([run.folder], "loss", "tokens", False) if wanted else []
    return {round(x / 100): y for _, xs, ys in curves for x, y in zip(xs, ys, strict=True)}, wanted


def compared(run: History) -> Answers:
    other = History(run.draw.randint(0, 99), run.folder / "other")
    records = [read_record(each.folder / "metrics.jsonl") for each in (run, other)]
    found = compare_records(records[0], records[1])
    losses = [{step: str(row["loss"]) for step, row in each.rows("step").items()} for each in (run, other)]
    shared = sorted(losses[0].keys() & losses[1].keys())
    first = next((step for step in shared if losses[0][step] != losses[1][step]), None)
    before = [step for step in shared if first is not None and step < first]
    steps = found.last_shared, found.first_difference.get("loss"), found.last_equal.get("loss")
    return (found.num_shared, *steps), (len(shared), max(shared, default=None), first, max(before, default=None))


def inspected(run: History) -> Answers:
    facts = run_facts(run.folder, False)
    names = ("last_step", "last_validation", "last_save", "best_validation")
    answer = [plain([facts[name]]) for name in names]
    best = {name: row["step"] for name, row in facts["best_evaluations"].items()}
    losses = run.column("valid", "loss")
    expected = [plain([last(run.rows(event))]) for event in ("step", "valid", "save")]
    lowest = min(losses, key=losses.__getitem__, default=next(iter(run.rows("valid")), None))
    expected.append(plain([run.rows("valid").get(lowest or 0)]))
    ppl = {name: run.column("eval", "ppl", name) for name in ("wiki", "books")}
    lowest_ppl = {name: max(steps, key=lambda step: (-steps[step], -step)) for name, steps in ppl.items() if steps}
    # because: a larger perplexity is worse, and of equal ones the earliest counts
    return (answer, best, facts["starts"]), (expected, lowest_ppl, len(run.starts))


def listed(run: History) -> Answers:
    row = row_of_run(read_runs([run.folder])[0])
    newest = [*run.by.values()][-1]
    tokens = next((each["tokens"] for each in [*run.by.values()][::-1] if "tokens" in each), None)
    loss, valid = (last(run.rows(event), {}).get("loss") for event in ("step", "valid"))
    losses = ["nan" if loss is not None and math.isnan(loss) else loss for loss in (loss, valid)]
    found = [row[key] for key in ("step", "tokens", "starts", "last_row", "loss", "loss/valid")]
    return found, [newest["step"], tokens, len(run.starts), newest["time"], *losses]


def swept(run: History) -> Answers:
    row = summarize_run(run.folder, {}, "killed")
    loss, speeds = last(run.rows("step"), {}).get("loss"), run.column("step", "tokens_per_s").values()
    losses = run.column("valid", "loss").values()
    expected = max(run.rows("step"), default=0), None if loss is None or loss != loss else loss
    found = row["steps"], row["loss"], row["best_valid_loss"], row["tokens_per_s"]
    return found, (*expected, min(losses, default=None), median(speeds) if speeds else None)


def best(run: History) -> Answers:
    config = composed("checkpoint.keep_best=2", "train.valid_interval_steps=2", "data.split=[9,1]")
    step = run.draw.randint(0, 40)
    losses = {at: -loss for at, loss in run.column("valid", "loss").items()}
    found = score_by_step(read_metrics(run.folder / "metrics.jsonl"), "loss/valid")
    before = scores_before_resume(run.folder, config, step)
    return (found, before), (losses, {at: loss for at, loss in losses.items() if at <= step})


def resumed(run: History) -> Answers:
    steps, wanted = run.draw.sample(range(1, 40), 8), run.column("step", "lr")
    rates = [_learning_rate_of_step(run.folder, None, step) for step in steps]
    return (rates, start_number(run.folder)), ([wanted.get(step) for step in steps], len(run.starts) + 1)


def durations(run: History) -> Answers:
    costs = Durations()
    costs.load_earlier(run.folder)
    tasks: dict[int, dict[str, float]] = {}  # step -> task -> seconds, of the last start that did it
    for row in run.written:
        if row["event"] == "eval":
            tasks.setdefault(row["step"], {})[row["name"]] = row["seconds"]
    sums = [sum(each.values()) for each in tasks.values()]
    seconds = [row["seconds"] for row in run.written if row["event"] == "valid"]
    saves = [row["write_s"] + row["stall_s"] for row in run.written if row["event"] == "save"]
    found = costs.longest(EVALUATION), costs.longest(VALIDATION), costs.longest("save")
    return found, tuple(max(each[-_NUM_KEPT:], default=0.0) for each in (sums, seconds, saves))


def calibrated(run: History) -> Answers:
    config = composed("train.steps=100")
    found, wanted = [*_step_times(config, read_metrics(run.folder / "metrics.jsonl"))], []
    for row, following in pairwise(run.by.values()):
        attempt, step, until = row["attempt"], row["step"], following["step"]
        is_pair = row["event"] == following["event"] == "step" and attempt == following["attempt"]
        if is_pair and step - run.starts[attempt - 1] >= _WARMUP_STEPS:
            wanted.append(sum(run.seconds[attempt, at] for at in range(step + 1, until + 1)) / (until - step))
    return found, pytest.approx(wanted)


def settings(run: History) -> Answers:
    history = read_settings_history(run.folder)["optim.lr"]
    of_start = {row["attempt"]: row["settings"]["optim"]["lr"] for row in run.written if row["event"] == "start"}
    found = {step: [value for first, value in history if first <= step][-1] for step in run.start_of}
    first = first_start(row for row in run.written if row["event"] == "start")
    found[1] = first["optim"]["lr"] if first is not None and 1 in run.start_of else found.get(1)
    return found, {1: None} | {step: of_start[number] for step, number in run.start_of.items()}


def watched(run: History) -> Answers:
    shown = StringIO()
    _print_lines(run.folder, 1.0, True, Console(file=shown, width=200))
    steps = re.findall(r"^step +(\d+)", shown.getvalue(), re.MULTILINE)
    return [int(step) for step in steps], [*run.rows("step")][-1:]


def exported(run: History) -> Answers:
    found, wanted = list[tuple[str, str]](), list[Any]()
    for step in run.draw.sample(range(1, 40), 8):
        found += _rows_of_run(run.folder / "checkpoints" / "step", step, "model")
        wanted += [f"{row['loss']:.4f}" for at, row in run.rows("valid").items() if at == step]
        wanted += [row["name"] for row in run.by.values() if (row["event"], row["step"]) == ("eval", step)]
    return [name if name in ("wiki", "books") else text for name, text in found], wanted


READERS: list[Callable[[History], Answers]] = [
    rows, python_metrics, report, plot, compared, inspected, listed, swept, best, resumed, durations, calibrated,
    settings, watched, exported,
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_a_reader_is_right_about_the_rows_that_are_there(reader: Callable[[History], Answers], tmp_path: Path) -> None:
    for seed in SEEDS:
        found, expected = reader(History(seed, tmp_path / str(seed)))
        assert found == expected, f"seed {seed}"
