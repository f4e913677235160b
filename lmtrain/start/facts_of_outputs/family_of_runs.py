"""`lmtrain runs --tree`: runs in the order of their families, each branch below the run from which it began, and merged
checkpoints below the run of their newest parent.

Called by runs_command.py with the rows of the runs that are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.describe_merge import describe_merge, is_checkpoint, read_merge
from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.checkpoint.find_and_prune import load_manifest
from lmtrain.errors import LmtrainError
from lmtrain.runfolder.folder_reader import RunFolder, is_run, read_run
from lmtrain.runfolder.lineage import MERGED, Parent, parse_lineage, read_lineage

Row = dict[str, Any]
GONE = "gone"  # state of a run, or of a merged checkpoint, whose folder is not there any more
MERGE, CHECKPOINT = "merged", "checkpoint"  # states of folders that are no runs


def family_rows(rows: Sequence[Row], describe: Callable[[RunFolder], Row], *, with_merges: bool = False) -> list[Row]:
    """Return `rows`, one for each run of a list, in the order of a family tree: each run is followed by those that
    began from its checkpoints. Ancestors that are not listed are added (for a run, by `describe`), and with
    `with_merges` the merged checkpoints beside the runs. Each row gets `depth` (0: no parent), `parent` (a folder or
    None) and `branch_step`.
    """
    nodes = {Path(row["run"]).resolve(): row for row in rows}
    lineages = {folder: read_lineage(folder) for folder in nodes}
    places = {folder.parent: Path(row["name"]).parent for folder, row in nodes.items()} if with_merges else {}
    merges = dict(_merges_in(places))
    nodes |= {path: _row_of_checkpoint(path, str(places[path.parent] / path.name), "") for path in merges}
    parents: dict[Path, Parent | None] = {}
    for folder, lineage in (lineages | merges).items():
        for depth, parent in enumerate(lineage):
            if parent.folder not in nodes:
                is_merge = depth > 0 and lineage[depth - 1].kind == MERGED
                nodes[parent.folder] = _row_of_parent(parent, describe, "a merged checkpoint" * is_merge)
            parents.setdefault(parent.folder, lineage[depth - 1] if depth else None)
        parents[folder] = lineage[-1] if lineage else None
    return [*_in_order(nodes, parents)]


def _merges_in(places: Iterable[Path]) -> Iterator[tuple[Path, list[Parent]]]:
    """Yield (folder, its ancestors, oldest first) for each merged checkpoint directly in one of the folders `places`.
    Skip folders that cannot be read.
    """
    for place in sorted(places):
        with suppress(OSError):
            for folder in sorted(place.iterdir()):
                with suppress(LmtrainError):
                    if read_merge(folder) is not None:
                        yield folder, parse_lineage(load_manifest(folder).state.get("lineage"), folder / MANIFEST)


def _row_of_parent(parent: Parent, describe: Callable[[RunFolder], Row], note: str) -> Row:
    """Return a table row for an ancestor that is not among the listed runs: of a run by `describe`, else of a merged
    checkpoint. If its folder is gone, the row says so, with `note` as the reason.
    """
    if is_run(parent.folder):
        return describe(read_run(parent.folder, parent.run))
    return _row_of_checkpoint(parent.folder, parent.run, note)


def _row_of_checkpoint(folder: Path, name: str, note: str) -> Row:
    """Return a table row, titled `name`, for a folder that is not a run: a merged checkpoint with how it was made,
    another checkpoint, or a folder that is gone, with the text `note`.
    """
    empty = dict.fromkeys(("step", "steps", "stage", "loss", "loss/valid", "tokens_per_s", "tokens", "last_row"))
    row: Row = {"run": str(folder), "name": name, "state": GONE, **empty, "why": note, "missing": []}
    if (record := read_merge(folder)) is not None:
        row |= {"state": MERGE, "step": record.parents[-1].step, "why": describe_merge(folder)}
        return row | {"merged": record.to_dict()}
    return row | ({"state": CHECKPOINT, "why": ""} if is_checkpoint(folder) else {})


def _in_order(nodes: dict[Path, Row], parents: dict[Path, Parent | None]) -> Iterator[Row]:
    """Yield a copy of each row in the order of the tree, each run before those that began from it, which are sorted by
    the step of the checkpoint. Add its depth, parent folder and branch step.
    """
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

    roots = [folder for folder in nodes if parents.get(folder) is None]
    for folder in [*roots, *nodes]:  # because: folders that were used again may seem to descend from each other
        if folder not in shown:
            yield from below(folder, 0)
