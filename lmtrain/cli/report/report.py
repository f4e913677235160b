"""`lmtrain report`: one HTML file of a run, or of several, that is looked at in a browser and sent by mail."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from lmtrain.cli.inspect.run_view import finite_or_none, ingredient_lines, settings_facts
from lmtrain.cli.options import check_output_folder, parse_output_file
from lmtrain.cli.report.figures import MOST_EVALS, charts, eval_rows, headlines
from lmtrain.cli.report.ranks import kernel_parts, layout_parts, memory_parts, trace_parts
from lmtrain.cli.screen.terminal import echo
from lmtrain.config.base import show
from lmtrain.observe.history.record import Record, read_record
from lmtrain.page.chart import Charts, draw_figure, figure_element, format_value
from lmtrain.page.document import (
    Cells,
    Part,
    Picture,
    build_page,
    fact_list,
    html_table,
    json_element,
    read_asset,
    script_element,
    section_heading,
    standalone_svg,
)
from lmtrain.runfolder.changes import changed_histories
from lmtrain.runfolder.differences import differences, flatten
from lmtrain.runfolder.folder import RunFolder, expand_runs, read_runs
from lmtrain.runtime.files.files import atomic_file, storage_errors
from lmtrain.units import format_bytes, format_count, format_seconds, plural

EXAMPLES = (
    ("lmtrain report runs/a", "write runs/a/report.html, while the run goes on or afterwards"),
    ("lmtrain report runs/a runs/b --output ab.html", "curves of both, and the settings that differ"),
    ("lmtrain report runs/a --svg figures", "each picture as a file for a paper too"),
)
_MOST_MARKS = 30
_MOST_NUMBERS = 2000  # rows of evaluations in the page; the rest stays in metrics.jsonl
_KEYS = (
    ("drag", "zoom in"), ("double click, 0, Esc", "show all"), ("+ -", "zoom"), ("← →", "move"), ("x", "next axis"),
    ("k", "log x"), ("l", "log y of the figure in focus, or of all"), ("s S", "smoother, rougher"),
    (", .", "read values in the figure in focus"), ("t", "light or dark"), ("Tab", "next figure"),
)  # fmt: skip


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs, in any state.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--output", "--out", metavar="FILE", parser=parse_output_file,
            help="Where to write it. [default: report.html in the first RUN]",
        ),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", metavar="DIR", help="Also write each picture as SVG into this folder."),
    ] = None,
) -> None:
    """Write a page with everything that runs have recorded: curves, saves, faults, layout, settings, evaluations.

    It is one file without references to any other. A run that goes on, was killed or is damaged gives what there is,
    and the page says what is missing.
    """
    seen = read_runs(expand_runs(runs))
    if svg is not None:
        with storage_errors(svg, "Making"):
            svg.mkdir(parents=True, exist_ok=True)
    out = out or runs[0] / "report.html"
    check_output_folder("--output", out)
    records = [read_record(one.metrics) for one in seen]
    found = charts([one.name for one in seen], records, [one.stop for one in seen])
    parts = [*parts_of(seen, records, found)]
    with atomic_file(out) as file:
        file.write(_bytes(build_page(title(seen), parts, more_style=read_asset("report.css"))))
    missing = sum(len(one.problems) + len(record.problems) for one, record in zip(seen, records, strict=True))
    few = f"; {missing} things are missing, and it says which" if missing > 1 else "; it says what is missing" * missing
    echo(f"{out}: {plural(len(found.figures), 'figure')}, {format_bytes(out.stat().st_size)}{few}")
    if svg is not None:
        curves = [Picture(figure.key, draw_figure(found, figure, 760, 360)) for figure in found.figures]
        pictures = [*curves, *(part for part in parts if isinstance(part, Picture))]
        for picture in pictures:
            with atomic_file(svg / f"{re.sub('[ /]', '_', picture.name)}.svg") as file:
                file.write(_bytes(standalone_svg(picture.svg)))
        echo(f"{svg}: {len(pictures)} pictures as SVG")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")  # because: a file's name may be no text


def title(seen: Sequence[RunFolder]) -> str:
    return seen[0].name if len(seen) == 1 else f"{len(seen)} runs: {', '.join(one.name for one in seen)}"


def parts_of(seen: Sequence[RunFolder], records: Sequence[Record], found: Charts) -> Iterator[Part]:
    yield f"<h1>{escape(title(seen))}</h1>"
    rows = [summary(one, record) for one, record in zip(seen, records, strict=True)]
    if len(seen) == 1:
        stands = ((key.lstrip("<"), value) for key, value in rows[0].items() if key != "<run")
        yield fact_list([*stands, *_plan_of(seen[0])])
    else:
        yield html_table(rows)
    yield from _missing(seen, records)
    yield '<div class="tools" id="tools"><noscript>Zooming and reading values need JavaScript.</noscript></div>'
    yield f'<div class="figures">{"".join(figure_element(found, figure) for figure in found.figures)}</div>'
    if not found.figures:
        yield '<p class="soft">No number has been recorded yet.</p>'
    yield from _happened(seen, found)
    for one, record in zip(seen, records, strict=True):
        whose = f" of {one.name}" if len(seen) > 1 else ""
        inside = [*memory_parts(one, record, whose), *trace_parts(one, whose), *kernel_parts(one, whose)]
        if whose and inside:  # because: runs are compared by what stands above
            inside = [f"<details><summary>Time and memory{escape(whose)}</summary>", *inside, "</details>"]
        yield from inside
    for one in seen[:1] if _alike(seen, "parallel") and _alike(seen, "model") else seen:
        yield from layout_parts(one, f" of {one.name}" if len(seen) > 1 else "")
    yield from _evaluations(seen, records)
    yield from _settings(seen, records)
    yield from _environment(seen)
    keys = "".join(f"<span><kbd>{escape(key)}</kbd> {escape(does)}</span>" for key, does in _KEYS)
    yield f'{section_heading("Keys", anchor="keys")}<div class="keys">{keys}</div>'
    yield json_element(found.to_json(), "figures")
    yield script_element("chart.js")


def _alike(seen: Sequence[RunFolder], group: str) -> bool:
    return all(one.settings.get(group) == seen[0].settings.get(group) for one in seen)


def summary(seen: RunFolder, record: Record) -> dict[str, str]:
    """Return how a run stands: state, step, losses, speed, settings."""
    found = {"<run": seen.name, "<state": f"{seen.state}{f': {seen.end_reason}' * bool(seen.end_reason)}"[:400]}
    train, last = seen.settings.get("train"), int(record.steps[-1]) if record.steps.size else 0
    total = train.get("steps") if isinstance(train, dict) else None
    share = f" of {total:,} ({last / total:.0%})" if type(total) is int and total > 0 else ""
    found["step"] = f"{last:,}{share}"
    rows = record.rows.get("valid", [])
    valid = [(row["loss"], row["step"]) for row in rows if finite_or_none(row.get("loss")) is not None]
    if valid:
        found["best validation"] = f"{min(valid)[0]:.4f} at step {min(valid)[1]:,}"
    for key, name, form in (("loss", "loss", "number"), ("tokens", "tokens", "count")):
        steps, values = record.column(key)
        if values.size:
            found[name] = format_value(float(values[-1]), form)  # type: ignore[arg-type]  # because: names of forms
        broken = {key: value for step, key, value in record.non_finite if step == last}
        if key in broken:
            found[name] = f"{broken[key]}" + (f"; {found[name]} at step {int(steps[-1]):,}" if values.size else "")
    for key, name, show_ in (("tokens_per_s", "tokens/s", format_count), ("mfu", "MFU", "{:.1%}".format)):
        if (values := record.column(key)[1]).size:
            found[name] = show_(float(np.median(values)))
    seconds = record.columns.get("seconds", np.empty(0))
    if seconds.size and np.isfinite(seconds[-1]):
        found["time trained"] = format_seconds(float(seconds[-1]))
    if (starts := len(record.rows.get("start", []))) > 1:
        found["starts"] = f"{starts}"
    return found


def _plan_of(seen: RunFolder) -> Iterator[tuple[str, str]]:
    """Yield the model, data, layout, batch and learning rate of a run, by name."""
    if not seen.settings:
        return
    yield from ingredient_lines({**settings_facts(seen.path, seen.settings), "settings": seen.settings})
    train, optim = (group if isinstance(group := seen.settings.get(key), dict) else {} for key in ("train", "optim"))
    yield "batch", f"{show(train.get('global_batch'))} samples"
    yield "optimizer", f"{optim.get('kind', '-')}, learning rate {show(optim.get('lr'))}"


def _happened(seen: Sequence[RunFolder], found: Charts) -> Iterator[str]:
    """Restarts, stops and faults, which are lines in the figures."""
    marks = [mark for mark in found.marks if mark.kind != "save"]
    if marks:
        few = f"The last {_MOST_MARKS} of {len(marks):,}. " * (len(marks) > _MOST_MARKS)
        yield section_heading("What happened", f"{few}Each is a line in the figures above.", "happened")
        whose = [{"<run": one.name} if len(seen) > 1 else {} for one in seen]
        shown = marks[-_MOST_MARKS:]
        yield html_table([whose[mark.run] | {"step": f"{mark.step:,.0f}", "<what": mark.note} for mark in shown])


def _missing(seen: Sequence[RunFolder], records: Sequence[Record]) -> Iterator[str]:
    """Yield a box with what is missing from the page, if anything is."""
    several = len(seen) > 1
    said = [
        f"{one.name}: {problem}" if several else problem
        for one, record in zip(seen, records, strict=True)
        for problem in (*one.problems, *record.problems)
    ]
    if said:
        items = "".join(f"<li>{escape(problem)}</li>" for problem in said)
        yield f'<div class="missing"><b>What is missing</b><ul>{items}</ul></div>'


def _evaluations(seen: Sequence[RunFolder], records: Sequence[Record]) -> Iterator[str]:
    recipes, numbers = eval_rows(records, [one.name for one in seen])
    if not recipes:
        return
    tasks = len(headlines(records))
    few = f" The first {MOST_EVALS} of {tasks} tasks have a figure above." * (tasks > MOST_EVALS)
    yield section_heading("Evaluations", f"What was scored and how; below it every number.{few}", "evaluations")
    yield html_table(recipes)
    many = (
        f", the last {_MOST_NUMBERS:,} of {len(numbers):,}" if len(numbers) > _MOST_NUMBERS else f", {len(numbers):,}"
    )
    opened = " open" * (len(numbers) <= 12)
    yield f"<details{opened}><summary>Numbers{many}</summary>{html_table(numbers[-_MOST_NUMBERS:])}</details>"


def _settings(seen: Sequence[RunFolder], records: Sequence[Record]) -> Iterator[str]:
    known = [one for one in seen if one.settings]
    if not known:
        return
    yield section_heading("Settings", anchor="settings")
    if len(known) > 1:
        found = differences([one.settings for one in known])
        beside = _beside("<key", [one.name for one in known], found)
        differ = f"{plural(len(found), 'setting')} {'differs' if len(found) == 1 else 'differ'}."
        yield f"<p>{differ}</p>" + html_table(beside) if found else "<p>All settings are the same.</p>"
    for one, record in zip(seen, records, strict=True):
        whose = f" of {one.name}" if len(seen) > 1 else ""
        if found := changed_histories(record.rows.get("start", [])):
            yield f"<p>Settings{escape(whose)} that changed while it trained:</p>" + html_table([
                {"<key": key, "from step": f"{step:,}", "<value": _shown(value)}
                for key, values in found.items() for step, value in values
            ])  # fmt: skip
    rows = [{"<key": key, "<value": _shown(value)} for key, value in flatten(known[0].settings)]
    whose = f" of {known[0].name}" if len(known) > 1 else ""
    yield f"<details><summary>All {len(rows)} settings{escape(whose)}</summary>{html_table(rows)}</details>"


def _environment(seen: Sequence[RunFolder]) -> Iterator[str]:
    known = [one for one in seen if one.environment]
    if not known:
        return
    yield section_heading("Environment", anchor="environment")
    trees = [dict(flatten(one.environment)) for one in known]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    names = [one.name for one in known] if len(known) > 1 else ["value"]
    yield html_table(_beside("<what", names, {key: [tree.get(key) for tree in trees] for key in keys}))


def _beside(title: str, names: Sequence[str], found: Mapping[str, Sequence[Any]]) -> list[Cells]:
    """Return a row for each key, with the value in each of the runs."""
    return [
        {title: key.removeprefix("packages.")}
        | {f"<{name}": _shown(value) for name, value in zip(names, values, strict=True)}
        for key, values in found.items()
    ]


def _shown(value: Any) -> str:
    return show(value)[:400]
