"""`lmtrain report`: one HTML file of a run, or of several, that is looked at in a browser and sent by mail."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmtrain.cli.options import check_place
from lmtrain.cli.screen.terminal import echo

if TYPE_CHECKING:
    from lmtrain.page.document import Picture

EXAMPLES = (
    ("lmtrain report runs/a", "write runs/a/report.html, while the run goes on or afterwards"),
    ("lmtrain report runs/a runs/b --out ab.html", "curves of both, and the settings that differ"),
    ("lmtrain report runs/a --svg figures", "each picture as a file for a paper too"),
)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs, in any state.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it. [default: report.html in the first RUN]")
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
    from lmtrain.cli.report.page import figures_of, page, parts_of
    from lmtrain.cli.runs.run_seen import see_all
    from lmtrain.observe.history.record import read_record
    from lmtrain.page.chart import drawn
    from lmtrain.page.document import Picture
    from lmtrain.runtime.files.files import atomic_file, storage_errors
    from lmtrain.units import format_bytes

    seen = see_all([*{path.resolve(): path for path in runs}.values()])
    if svg is not None:
        with storage_errors(svg, "Making"):
            svg.mkdir(parents=True, exist_ok=True)
    out = out or seen[0].path / "report.html"
    check_place("--out", out)
    records = [read_record(one.path / "metrics.jsonl") for one in seen]
    found = figures_of(seen, records)
    parts = [*parts_of(seen, records, found)]
    with atomic_file(out) as file:
        file.write(_bytes(page(seen, parts)))
    missing = sum(len(one.problems) + len(record.problems) for one, record in zip(seen, records, strict=True))
    few = f"; {missing} things are missing, and it says which" if missing > 1 else "; it says what is missing" * missing
    echo(f"{out}: {len(found.figures)} figures, {format_bytes(out.stat().st_size)}{few}")
    if svg is not None:
        curves = [Picture(figure.key, drawn(found, figure, 760, 360)) for figure in found.figures]
        _write_pictures(svg, [*curves, *(part for part in parts if isinstance(part, Picture))])


def _write_pictures(folder: Path, pictures: Sequence[Picture]) -> None:
    from lmtrain.page.document import for_a_paper
    from lmtrain.runtime.files.files import atomic_file

    for picture in pictures:
        with atomic_file(folder / f"{re.sub('[ /]', '_', picture.name)}.svg") as file:
            file.write(_bytes(for_a_paper(picture.drawn)))
    echo(f"{folder}: {len(pictures)} pictures as SVG")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")  # because: a file's name may be no text
