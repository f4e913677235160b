"""`lmtrain runs --tree`: runs in the order of their families, each branch below the run from which it began, and merged
checkpoints below the run of their newest parent.

Called by runs_command.py with the rows of the runs that are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.checkpoint.find_and_prune import load_manifest
from lmtrain.cli.inspect.merged_checkpoint_view import describe_merge, is_checkpoint, read_merge
from lmtrain.errors import LmtrainError
from lmtrain.runfolder.folder_reader import RunFolder, is_run, read_run
from lmtrain.runfolder.lineage import MERGED, Parent, parse_lineage, read_lineage

Row = dict[str, Any]
GONE = "gone"  # state of a run, or of a merged checkpoint, whose folder is not there any more
MERGE, CHECKPOINT = "merged", "checkpoint"  # states of folders that are no runs


def family_rows(rows: Sequence[Row], describe: Callable[[RunFolder], Row], *, with_merges: bool = False) -> list[Row]:
    """Return the rows of runs, and of the runs and merged checkpoints from which they descend, in the order of a tree.
    Each has `depth`, 0 for a run that began from no other, `parent`, the folder of the run from which it began, and
    `branch_step`, the step of the checkpoint. `describe` returns the row of a run that is not among `rows`.
    `with_merges` adds the merged checkpoints that lie beside the runs.
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
    """Yield (folder, lineage) for each merged checkpoint whose folder lies in one of the folders `places`. Those that
    cannot be read are skipped, since the user has not named them.
    """
    for place in sorted(places):
        with suppress(OSError):
            for folder in sorted(place.iterdir()):
                with suppress(LmtrainError):
                    if read_merge(folder) is not None:
                        yield folder, parse_lineage(load_manifest(folder).state.get("lineage"), folder / MANIFEST)


def _row_of_parent(parent: Parent, describe: Callable[[RunFolder], Row], note: str) -> Row:
    """Return the row of a run or merged checkpoint that is not listed but known as a parent. If its folder is gone, the
    row says so; `note` is what is known of it then.
    """
    if is_run(parent.folder):
        return describe(read_run(parent.folder, parent.run))
    return _row_of_checkpoint(parent.folder, parent.run, note)


def _row_of_checkpoint(folder: Path, name: str, note: str) -> Row:
    """Return the row of a folder that is no run: of a merged checkpoint with how it was made, or of one that is gone,
    with `note`.
    """
    empty = dict.fromkeys(("step", "steps", "stage", "loss", "valid_loss", "tokens_per_s", "tokens", "last_row"))
    row: Row = {"run": str(folder), "name": name, "state": GONE, **empty, "why": note, "missing": []}
    if (record := read_merge(folder)) is not None:
        row |= {"state": MERGE, "step": record.parents[-1].step, "why": describe_merge(folder)}
        return row | {"merged": record.to_dict()}
    return row | ({"state": CHECKPOINT, "why": ""} if is_checkpoint(folder) else {})


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

    roots = [folder for folder in nodes if parents.get(folder) is None]
    for folder in [*roots, *nodes]:  # because: folders that were used again may seem to descend from each other
        if folder not in shown:
            yield from below(folder, 0)
