"""`lmtrain runs --tree`: runs in the order of their families, each branch below the run from which it began.

Called by runs_command.py with the rows of the runs that are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lmtrain.runfolder.folder_reader import RunFolder, is_run, read_run
from lmtrain.runfolder.lineage import Parent, read_lineage

Row = dict[str, Any]
GONE = "gone"  # state of a run whose folder is not there any more


def family_rows(rows: Sequence[Row], describe: Callable[[RunFolder], Row]) -> list[Row]:
    """Return the rows of runs, and of the runs from which they descend, in the order of a tree. Each has `depth`, 0 for
    a run that began from no other, `parent`, the folder of the run from which it began, and `branch_step`, the step of
    the checkpoint. `describe` returns the row of a run that is not among `rows`.
    """
    nodes = {Path(row["run"]).resolve(): row for row in rows}
    parents: dict[Path, Parent | None] = {}
    for folder in list(nodes):
        lineage = read_lineage(folder)
        for depth, parent in enumerate(lineage):
            if parent.folder not in nodes:
                nodes[parent.folder] = _row_of_parent(parent, describe)
            parents.setdefault(parent.folder, lineage[depth - 1] if depth else None)
        parents[folder] = lineage[-1] if lineage else None
    return [*_in_order(nodes, parents)]


def _row_of_parent(parent: Parent, describe: Callable[[RunFolder], Row]) -> Row:
    """Return the row of a run that is not listed but known as a parent. If its folder is gone, the row says so."""
    if is_run(parent.folder):
        return describe(read_run(parent.folder, parent.run))
    empty = dict.fromkeys(("step", "steps", "stage", "loss", "valid_loss", "tokens_per_s", "tokens", "last_row"))
    return {"run": parent.path, "name": parent.run, "state": GONE, **empty, "why": "", "missing": []}


def _in_order(nodes: dict[Path, Row], parents: dict[Path, Parent | None]) -> Iterator[Row]:
    """Yield the row of each node with its place in the tree: a run, then its branches by their first step."""
    shown: set[Path] = set()

    def below(folder: Path, depth: int) -> Iterator[Row]:
        parent = parents.get(folder)
        shown.add(folder)
        yield nodes[folder] | {
            "depth": depth, "parent": parent.path if parent else None, "branch_step": parent.step if parent else None,
            "begins_with": parent.kind if parent else None,
        }  # fmt: skip
        branches = [(each.step, path) for path, each in parents.items() if each is not None and each.folder == folder]
        for _, path in sorted(branches):
            if path not in shown:
                yield from below(path, depth + 1)

    for folder in nodes:
        if parents.get(folder) is None:
            yield from below(folder, 0)
    for folder in nodes:  # because: folders that were used again may seem to descend from each other
        if folder not in shown:
            yield from below(folder, 0)
