"""`lmtrain report`: write one HTML file about one or more runs, to open in a browser or send by mail."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from lmtrain.checkpoint.describe_merge import describe_origin, read_merge
from lmtrain.cli.inspect.run_folder_view import ingredient_lines
from lmtrain.cli.page.html_document import (
    PAGE_FILE,
    SVG_FILE,
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
from lmtrain.cli.page.svg_line_charts import Charts, draw_figure, figure_element, format_value
from lmtrain.cli.report.draw_curves import (
    MAX_EVAL_FIGURES,
    build_charts,
    evaluation_tables,
    headline_titles,
    source_table,
)
from lmtrain.cli.report.rank_timeline_and_memory_sections import kernel_parts, layout_parts, memory_parts, trace_parts
from lmtrain.cli.screen.print_messages_and_json import echo
from lmtrain.cli.shared_options import (
    Overwrite,
    check_output_file,
    parse_output_file,
    refuse_unused_overwrite,
)
from lmtrain.config.settings_base import show
from lmtrain.errors import LmtrainError, MissingInputError, UsageError, shorten, way
from lmtrain.observe.history.read_metrics_columns import Record, read_record
from lmtrain.runfolder.file_names import LINEAGE
from lmtrain.runfolder.folder_reader import RunFolder, expand_runs, read_runs
from lmtrain.runfolder.lineage import Parent, read_lineage
from lmtrain.runfolder.metrics_rows import read_last_rows, rows_in_force
from lmtrain.runfolder.run_facts import RunFacts, finite_or_none
from lmtrain.runfolder.settings_differences import changed_histories, differences, flatten
from lmtrain.runtime.files.atomic_files import atomic_file, storage_errors
from lmtrain.runtime.files.existing_output import check_output
from lmtrain.runtime.files.similar_path import refuse_lists
from lmtrain.train.record.facts_of_recorded_runs import facts_of_run
from lmtrain.units import format_bytes, format_count, format_seconds, plural

EXAMPLES = (
    ("lmtrain report runs/a", "write runs/a/report.html, while the run goes on or afterwards"),
    ("lmtrain report runs/a runs/b --output ab.html", "curves of both, and the settings that differ"),
    ("lmtrain report runs/a --svg figures", "each picture as a file for a paper too"),
)
_MAX_MARKS = 30
_MAX_EVAL_ROWS = 2000  # rows of evaluations in the page; the rest stays in metrics.jsonl
_SHORTCUTS = (
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
    overwrite: Overwrite = False,
) -> None:
    """Write an HTML page about one or more runs: curves, saves, faults, layout, settings, evaluations.

    It is one file without references to any other. Runs may be running, killed or damaged: the page shows everything
    that was recorded and states what is missing.
    """
    if out is not None and out.suffix.lower() not in ("", ".html", ".htm"):
        raise UsageError(
            f"--output {out} would be a page of HTML under another suffix, {out.suffix}. Use "
            f"{way('--output', str(out.with_suffix('.html')))}; `lmtrain.metrics(RUN)` gives the numbers in Python."
        )
    refuse_unused_overwrite(overwrite, out, svg, subject="the default file, which is replaced if it is a report")
    refuse_lists(runs)
    _refuse_merged(runs)
    found_runs = read_runs(expand_runs(runs))
    if svg is not None:
        with storage_errors(svg, "Making"):
            svg.mkdir(parents=True, exist_ok=True)
    is_default, out = out is None, out or runs[0] / "report.html"
    check_output_file("--output", out, PAGE_FILE, overwrite=overwrite, is_default=is_default)
    records = [read_record(run.metrics) for run in found_runs]
    charts = build_charts([run.name for run in found_runs], records, [run.stop for run in found_runs])
    parts = [*page_parts(found_runs, records, charts)]
    pictures = {} if svg is None else dict(_pictures(svg, charts, parts))
    for path in pictures:
        check_output(path, SVG_FILE, overwrite=overwrite)
    with atomic_file(out) as file:
        file.write(_encode(build_page(page_title(found_runs), parts, more_style=read_asset("report.css"))))
    missing = sum(len(run.problems) + len(record.problems) for run, record in zip(found_runs, records, strict=True))
    several = f"; {missing} things are missing, and it says which"
    note = several if missing > 1 else "; it says what is missing" * missing
    echo(f"{out}: {plural(len(charts.figures), 'figure')}, {format_bytes(out.stat().st_size)}{note}")
    if svg is not None:
        for path, picture in pictures.items():
            with atomic_file(path) as file:
                file.write(_encode(standalone_svg(picture.svg)))
        echo(f"{svg}: {len(pictures)} pictures as SVG")


def _pictures(folder: Path, charts: Charts, parts: Sequence[Part]) -> Iterator[tuple[Path, Picture]]:
    """Yield (file in `folder`, picture) for each figure and each other picture of the page."""
    curves = [Picture(figure.key, draw_figure(charts, figure, 760, 360)) for figure in charts.figures]
    for picture in [*curves, *(part for part in parts if isinstance(part, Picture))]:
        yield folder / f"{re.sub('[ /]', '_', picture.name)}.svg", picture


def _refuse_merged(paths: Sequence[Path]) -> None:
    """Raise MissingInputError if one of the paths is a merged checkpoint, which has no metrics to report."""
    for path in paths:
        if (record := read_merge(path)) is not None:
            run = record.parents[-1].run
            raise MissingInputError(
                f"{path} is a merged checkpoint, the {record.summary}, and no run, so it has no metrics. Use "
                f"{way(run, instead_of=str(path))} for the run of the newest of them; `lmtrain inspect {path}` "
                "describes the merge."
            )


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")  # because: a file's name may be no text


def page_title(runs: Sequence[RunFolder]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"


def page_parts(runs: Sequence[RunFolder], records: Sequence[Record], charts: Charts) -> Iterator[Part]:
    yield f"<h1>{escape(page_title(runs))}</h1>"
    rows = [run_summary(run, record) for run, record in zip(runs, records, strict=True)]
    if len(runs) == 1:
        facts = ((key.lstrip("<"), value) for key, value in rows[0].items() if key != "<run")
        yield fact_list([*facts, *_configuration_facts(runs[0])])
    else:
        yield html_table(rows)
    yield from _problem_box(runs, records)
    yield '<div class="tools" id="tools"><noscript>Zooming and reading values need JavaScript.</noscript></div>'
    yield f'<div class="figures">{"".join(figure_element(charts, figure) for figure in charts.figures)}</div>'
    if not charts.figures:
        yield '<p class="soft">No number has been recorded yet.</p>'
    yield from _event_section(runs, charts)
    for run, record in zip(runs, records, strict=True):
        title_suffix = _title_suffix(run, runs)
        details = [
            *memory_parts(run, record, title_suffix), *trace_parts(run, title_suffix), *kernel_parts(run, title_suffix)
        ]  # fmt: skip
        if title_suffix and details:  # because: runs are compared by what stands above
            details = [f"<details><summary>Time and memory{escape(title_suffix)}</summary>", *details, "</details>"]
        yield from details
    layouts = [[run.settings.get(group) for group in ("parallel", "model")] for run in runs]
    for run in runs[:1] if all(layout == layouts[0] for layout in layouts) else runs:
        yield from layout_parts(run, _title_suffix(run, runs))
    for run in runs:
        if stages := [stage.cells() for stage in _now(run).named_stages]:
            title = f"Stages{_title_suffix(run, runs)}"
            yield section_heading(title, "As the settings of the last start plan them.", "stages")
            yield html_table(stages)
    if sources := source_table(records, [run.name for run in runs]):
        yield section_heading("Sources", "The newest numbers of each dataset of the blend.", "sources")
        yield html_table(sources)
    yield from _evaluation_section(runs, records)
    yield from _settings_section(runs, records)
    yield from _environment_section(runs)
    shortcuts = "".join(f"<span><kbd>{escape(key)}</kbd> {escape(effect)}</span>" for key, effect in _SHORTCUTS)
    yield f'{section_heading("Keys", anchor="keys")}<div class="keys">{shortcuts}</div>'
    yield json_element(charts.to_json(), "figures")
    yield script_element("chart.js")


def _title_suffix(run: RunFolder, runs: Sequence[RunFolder]) -> str:
    """Return what a heading about one run adds to its title on a page about several."""
    return f" of {run.name}" if len(runs) > 1 else ""


def run_summary(run: RunFolder, record: Record) -> dict[str, str]:
    """Return the main facts about a run as column title -> text: state, step, losses, speed, time trained, origin,
    number of starts. Facts that are not recorded have no column.
    """
    facts = {"<run": run.name, "<state": f"{run.state}{f': {run.end_reason}' * bool(run.end_reason)}"[:400]}
    now = _now(run)
    last_step = int(record.steps[-1]) if record.steps.size else 0
    facts["step"] = f"{now.step:,}" + (f" of {now.steps:,} ({now.step / now.steps:.0%})" if now.steps else "")
    if now.stage_name:
        facts["<stage"] = now.stage.text if now.stage else now.stage_name
    rows = record.rows.get("valid", [])
    validations = [(row["loss"], row["step"]) for row in rows if finite_or_none(row.get("loss")) is not None]
    if validations:
        facts["best validation"] = f"{min(validations)[0]:.4f} at step {min(validations)[1]:,}"
    for key, name, form in (("loss", "loss", "number"),):
        steps, values = record.column(key)
        if values.size:
            facts[name] = format_value(float(values[-1]), form)  # type: ignore[arg-type]  # because: names of forms
        non_finite = {key: value for step, key, value in record.non_finite if step == last_step}
        if key in non_finite:
            facts[name] = f"{non_finite[key]}" + (f"; {facts[name]} at step {int(steps[-1]):,}" if values.size else "")
    if now.tokens:
        facts["tokens"] = format_count(now.tokens)
    if now.lr is not None:
        facts["learning rate"] = f"{now.lr:.3g}"
    if now.tokens_per_s is not None:
        median = format_count(float(np.median(record.column("tokens_per_s")[1])))
        facts["speed"] = f"{now.speed_text}; median {median}"
    if (values := record.column("mfu")[1]).size:
        facts["median MFU"] = f"{float(np.median(values)):.1%}"
    seconds = record.columns.get("seconds", np.empty(0))
    if seconds.size and np.isfinite(seconds[-1]):
        facts["time trained"] = format_seconds(float(seconds[-1]))
    if lineage := _lineage(run):
        facts["<began from"] = describe_origin([parent.to_dict() for parent in lineage])
    if now.starts > 1:
        facts["starts"] = f"{now.starts}"
    return facts


def _now(run: RunFolder) -> RunFacts:
    """Return what the run is at its newest step."""
    return facts_of_run(run.settings, rows_in_force(read_last_rows(run.metrics)), run.state)


def _lineage(run: RunFolder) -> list[Parent]:
    """Return the runs from which this run was branched, directly or through others, oldest first; [] if there are none.
    If the record of them cannot be read, add a message to `run.problems` and return [].
    """
    try:
        return read_lineage(run.path)
    except (LmtrainError, OSError) as error:
        run.problems.append(f"{LINEAGE} cannot be read ({shorten(error, 120)}): where it began is not known")
        return []


def _configuration_facts(run: RunFolder) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for a run's model, data, layout, batch and optimizer, from its settings; nothing if it has
    none recorded.
    """
    if not run.settings:
        return
    yield from ingredient_lines(_now(run), run.settings)
    optim = group if isinstance(group := run.settings.get("optim"), dict) else {}
    yield "optimizer", str(optim.get("kind", "-"))


def _event_section(runs: Sequence[RunFolder], charts: Charts) -> Iterator[str]:
    """Yield the HTML of a section that lists the last restarts, stops and faults of the runs; nothing if there were
    none.
    """
    marks = [mark for mark in charts.marks if mark.kind != "save"]
    if marks:
        note = f"The last {_MAX_MARKS} of {len(marks):,}. " * (len(marks) > _MAX_MARKS)
        yield section_heading("What happened", f"{note}Each is a line in the figures above.", "happened")
        run_cells = [{"<run": run.name} if len(runs) > 1 else {} for run in runs]
        yield html_table([
            run_cells[mark.run] | {"step": f"{mark.step:,.0f}", "<what": mark.note} for mark in marks[-_MAX_MARKS:]
        ])  # fmt: skip


def _problem_box(runs: Sequence[RunFolder], records: Sequence[Record]) -> Iterator[str]:
    """Yield the HTML of a box that lists which files or rows of the runs could not be read; nothing if all could."""
    problems = [
        f"{run.name}: {problem}" if len(runs) > 1 else problem
        for run, record in zip(runs, records, strict=True)
        for problem in (*run.problems, *record.problems)
    ]
    if problems:
        items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
        yield f'<div class="missing"><b>What is missing</b><ul>{items}</ul></div>'


def _evaluation_section(runs: Sequence[RunFolder], records: Sequence[Record]) -> Iterator[str]:
    recipes, numbers = evaluation_tables(records, [run.name for run in runs])
    if not recipes:
        return
    tasks = len(headline_titles(records))
    note = f" The first {MAX_EVAL_FIGURES} of {tasks} tasks have a figure above." * (tasks > MAX_EVAL_FIGURES)
    yield section_heading("Evaluations", f"What was scored and how; below it every number.{note}", "evaluations")
    yield html_table(recipes)
    count_note = (
        f", the last {_MAX_EVAL_ROWS:,} of {len(numbers):,}" if len(numbers) > _MAX_EVAL_ROWS else f", {len(numbers):,}"
    )
    open_attribute = " open" * (len(numbers) <= 12)
    table = html_table(numbers[-_MAX_EVAL_ROWS:])
    yield f"<details{open_attribute}><summary>Numbers{count_note}</summary>{table}</details>"


def _settings_section(runs: Sequence[RunFolder], records: Sequence[Record]) -> Iterator[str]:
    known_runs = [run for run in runs if run.settings]
    if not known_runs:
        return
    yield section_heading("Settings", anchor="settings")
    if len(known_runs) > 1:
        differing = differences([run.settings for run in known_runs])
        difference_rows = _rows_by_key("<key", [run.name for run in known_runs], differing)
        sentence = f"{plural(len(differing), 'setting')} {'differs' if len(differing) == 1 else 'differ'}."
        yield f"<p>{sentence}</p>" + html_table(difference_rows) if differing else "<p>All settings are the same.</p>"
    for run, record in zip(runs, records, strict=True):
        if changed := changed_histories(record.rows.get("start", [])):
            yield f"<p>Settings{escape(_title_suffix(run, runs))} that changed while it trained:</p>" + html_table([
                {"<key": key, "from step": f"{step:,}", "<value": _cell_text(value)}
                for key, values in changed.items() for step, value in values
            ])  # fmt: skip
    rows = [{"<key": key, "<value": _cell_text(value)} for key, value in flatten(known_runs[0].settings)]
    title = f"All {len(rows)} settings{escape(_title_suffix(known_runs[0], known_runs))}"
    yield f"<details><summary>{title}</summary>{html_table(rows)}</details>"


def _environment_section(runs: Sequence[RunFolder]) -> Iterator[str]:
    known_runs = [run for run in runs if run.environment]
    if not known_runs:
        return
    yield section_heading("Environment", anchor="environment")
    trees = [dict(flatten(run.environment)) for run in known_runs]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    names = [run.name for run in known_runs] if len(known_runs) > 1 else ["value"]
    yield html_table(_rows_by_key("<what", names, {key: [tree.get(key) for tree in trees] for key in keys}))


def _rows_by_key(key_column: str, names: Sequence[str], values_by_key: Mapping[str, Sequence[Any]]) -> list[Cells]:
    """Return a table row (column title -> text) for each key of `values_by_key`, which maps it to its values, one for
    each run. `key_column` is the title of the first column; the others are titled by `names`, the runs' names.
    """
    return [
        {key_column: key.removeprefix("packages.")}
        | {f"<{name}": _cell_text(value) for name, value in zip(names, values, strict=True)}
        for key, values in values_by_key.items()
    ]


def _cell_text(value: Any) -> str:
    return show(value)[:400]
