"""What a profiled window says in a report: which kernels took the time, by class. Called by report_page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lmtrain.cli.runs.run_seen import Seen
from lmtrain.errors import LmtrainError, brief
from lmtrain.page.chart import written
from lmtrain.page.document import NUM_COLOURS, Part, Picture, paragraph, section, table
from lmtrain.page.drawing import WIDTH, legend, rect, svg

if TYPE_CHECKING:
    from lmtrain.observe.profile.kernels import KernelTable

_FOLDER = "profile"
_MOST_TABLES = 4
_MOST_KERNELS = 15


def kernel_parts(seen: Seen, whose: str) -> Iterator[Part]:
    if not (seen.path / _FOLDER).is_dir():
        return
    yield section(f"Kernels{whose}", name=f"kernels{whose}")
    try:
        yield from _parts(seen, whose)
    except (LmtrainError, ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        yield paragraph(f"They cannot be read: {brief(error)}")


def _parts(seen: Seen, whose: str) -> Iterator[Part]:
    from lmtrain.observe.profile.kernels import read_tables

    tables = read_tables(seen.path / _FOLDER)
    if len(tables) > _MOST_TABLES:
        yield paragraph(
            f"Shown: {_MOST_TABLES} of {len(tables)} profiles, of the newest window and the lowest ranks first; "
            f"the others lie in {_FOLDER}."
        )
    for one in sorted(tables, key=lambda one: (-one.first_step, one.rank))[:_MOST_TABLES]:
        yield f"<h3>Steps {one.first_step:,} to {one.last_step:,}, rank {one.rank}</h3>"
        few = f"; the {_MOST_KERNELS} kernels that took longest" * (len(one.kernels) > _MOST_KERNELS)
        yield paragraph(f"On {one.device}, {written(one.window_s, 'seconds')} by the clock{few}.")
        yield Picture(f"kernels_{one.first_step}-{one.last_step}_rank_{one.rank}{whose}", class_bar(one))
        yield table([
            {"<kernel": kernel.name, "<class": kernel.kind, "time": written(kernel.seconds, "seconds"),
             "of the window": f"{kernel.seconds / (one.window_s or 1.0):.1%}", "calls": f"{kernel.calls:,}"}
            for kernel in one.kernels[:_MOST_KERNELS]
        ])  # fmt: skip


def class_bar(one: KernelTable) -> str:
    """The classes side by side, as long as they took."""
    total = sum(one.classes.values()) or 1.0
    used = [(name, seconds) for name, seconds in one.classes.items() if seconds > 0]

    def parts() -> Iterator[str]:
        yield from legend([(f"r{at % NUM_COLOURS}", name) for at, (name, _) in enumerate(used)], 0.0)
        x = 0.0
        for at, (name, seconds) in enumerate(used):
            wide = seconds / total * WIDTH
            said = f"{name}: {written(seconds, 'seconds')}, {seconds / total:.1%}"
            yield rect(x, 24, wide - 1, 22, f"r{at % NUM_COLOURS}", said)
            x += wide

    return svg(50, parts(), "time of kernels by class")
