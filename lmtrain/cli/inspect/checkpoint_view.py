"""`lmtrain inspect` for a checkpoint, or for two to compare: facts as plain data, and their printing."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.checkpoint.compare_or_verify_checkpoints import (
    missing_names,
    raise_problems,
    type_differences,
    value_differences,
    verify_checkpoints,
)
from lmtrain.checkpoint.disk.checkpoint_format import ITEM_BYTES, MANIFEST
from lmtrain.checkpoint.find_and_prune import resolve_checkpoint
from lmtrain.checkpoint.read_merge_record import merge_record
from lmtrain.checkpoint.read_verified_contents import Contents, layout_of
from lmtrain.checkpoint.view_with_ema_as_weights import AVERAGE_PREFIX, WeightSet, average_facts
from lmtrain.cli.inspect.dataset_view import describe_tokenizer
from lmtrain.cli.inspect.merged_checkpoint_view import merge_lines
from lmtrain.cli.inspect.run_folder_view import describe_model, lineage_lines
from lmtrain.cli.screen.print_messages_and_json import echo
from lmtrain.runfolder.lineage import parse_lineage
from lmtrain.runfolder.run_facts import RunFacts, facts_of_checkpoint, parameters_text
from lmtrain.runfolder.settings_differences import differences
from lmtrain.train.run_config import config_of_checkpoint
from lmtrain.units import format_bytes, plural

if TYPE_CHECKING:
    from rich.tree import Tree

_OTHER_TENSORS = (("optimizer's", "optim."), ("average's", AVERAGE_PREFIX))
_AVERAGE_NOTES = {"model": "; --weights ema reads it", "ema": "; the tensors are the average's"}
_MAX_LINES = 40  # per section of a comparison


def checkpoint_facts(path: Path, verify: bool, weights: WeightSet = "model") -> dict[str, Any]:
    """Return the contents of a checkpoint's manifest as a dict of JSON values: step, layout, model, settings, files,
    tensors, and how it was merged or averaged. With `verify`, first check all its files and raise an error if any is
    damaged. With `weights` "ema", describe the averaged weights in place of the weights.
    """
    if verify:
        raise_problems(verify_checkpoints(path))
    contents = Contents(path, weights=weights)
    manifest, place = contents.manifest, path / MANIFEST
    state, parallel = manifest.state, layout_of(manifest.state)
    now = facts_of_checkpoint(config_of_checkpoint(state), state | {"step": manifest.step})
    tensors: dict[str, dict[str, Any]] = {
        name: {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "bytes": math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype],
            "files": sorted({piece.file for piece in tensor.pieces}),
        }
        for name, tensor in sorted(manifest.tensors.items())
    }
    return {
        "checkpoint": str(path),
        "verified": verify,
        **now.to_dict(),
        "facts": now,
        "samples": state.get("samples"),
        "layout": parallel.layout_text if parallel else None,
        "digest": manifest.digest,
        "parameters": sum(math.prod(t["shape"]) for name, t in tensors.items() if name.startswith("model.")),
        "bytes": sum(entry.size for entry in manifest.files.values()),
        "model": state.get("model"),
        "tokenizer": state.get("tokenizer"),
        "settings": state.get("settings"),
        "lineage": [parent.to_dict() for parent in parse_lineage(state.get("lineage"), place)],
        **contents.describe_weights(),
        "average": average.to_dict() if (average := average_facts(state, place)) else None,
        "merged": record.to_dict() if (record := merge_record(state, place)) else None,
        "files": {name: entry.size for name, entry in manifest.files.items()},
        "tensors": tensors,
    }


def print_checkpoint(facts: dict[str, Any], show_all: bool) -> None:
    """Print a checkpoint's description on stdout. `facts` is the dict of `checkpoint_facts`; its settings, files and
    tensors are printed only with `show_all`.
    """
    from lmtrain.cli.screen.print_facts_and_tables import PlainConsole, print_facts, print_tree

    lines = [
        (key, f"{facts[key]:,}" if isinstance(facts[key], int) else "-") for key in ("step", "samples", "tokens")
    ]
    now: RunFacts = facts["facts"]
    lines += [("stage", now.stage.text)] if now.stage and now.stage_name else []
    lines += [("batch", now.batch_text), ("data", now.data or "")] if now.batch_text else []
    lines += [("learning rate", f"{now.lr:.2e}")] if now.lr is not None else []
    lines += [(key, str(facts[key] or "-")) for key in ("layout", "digest")]
    parameters = parameters_text(facts["parameters"], now.padded_parameters).replace(" parameters", "")
    lines.append(("parameters", f"{parameters}{now.embeddings_text}"))
    size, files, names = format_bytes(facts["bytes"]), len(facts["files"]), facts["tensors"]
    kinds = [kind for kind, prefix in _OTHER_TENSORS if any(name.startswith(prefix) for name in names)]
    other_tensors = f" with the {' and the '.join(kinds)}" if kinds else ""
    lines.append(("on disk", f"{size} in {plural(files, 'file')}, {plural(len(names), 'tensor')}{other_tensors}"))
    if facts["average"]:
        lines += [("average", f"{facts['average']['summary']}{_AVERAGE_NOTES[facts.get('weights', 'model')]}")]
    if facts["merged"]:
        lines += merge_lines(facts["merged"])
    if isinstance(facts["model"], dict):
        lines.append(("model", describe_model(facts["model"])))
    match facts["tokenizer"]:
        case {"vocab_size": int(pieces), "fingerprint": str(fingerprint), "eod_id": int() | None as eod}:
            lines.append(("tokenizer", describe_tokenizer(pieces, eod, fingerprint)))
    lines += lineage_lines(facts["lineage"])
    lines.append(("verified", "every hash" if facts["verified"] else "no; add --verify to read every byte"))
    if not show_all:
        lines.append(("more", "--all lists settings, files and tensors"))
    print_facts(f"checkpoint {facts['checkpoint']}", lines)
    if show_all:
        for key in ("model", "settings"):
            if isinstance(facts[key], dict):
                print_tree(key, facts[key])
        print_tree("files", {name: format_bytes(size) for name, size in facts["files"].items()})
        PlainConsole().print(_tensor_tree(facts["tensors"]), highlight=False, soft_wrap=True)


def _tensor_tree(tensors: dict[str, dict[str, Any]]) -> Tree:
    """Return a rich Tree of tensors, nested by the dotted parts of their names; each branch shows how many tensors it
    has and their total bytes. `tensors` maps a name to a dict with dtype, shape, bytes and files.
    """
    from rich.text import Text
    from rich.tree import Tree

    def add_branch(tree: Tree, part: str, names: list[str], depth: int) -> None:
        if len(names) == 1:
            tensor, rest = tensors[names[0]], ".".join(names[0].split(".")[depth:])
            label = f"{part}.{rest}" if rest else part
            where = tensor["files"][0] if len(tensor["files"]) == 1 else f"{len(tensor['files'])} files"
            tree.add(Text(f"{label}  {tensor['dtype']} {tensor['shape']}  {format_bytes(tensor['bytes'])}  {where}"))
            return
        total = format_bytes(sum(tensors[name]["bytes"] for name in names))
        branch = tree.add(Text(f"{part}  {plural(len(names), 'tensor')}  {total}"))
        for inner_part, inner_names in _group_by_part(names, depth):
            add_branch(branch, inner_part, inner_names, depth + 1)

    root = Tree("tensors")
    for part, names in _group_by_part(list(tensors), 0):
        add_branch(root, part, names, 1)
    return root


def _group_by_part(names: list[str], depth: int) -> list[tuple[str, list[str]]]:
    """Group tensor names by the word at index `depth` (from 0) of their dotted names; return sorted pairs (word,
    names). Words that are numbers are sorted as numbers. A shorter name goes into the group "".
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault((name.split(".") + [""] * depth)[depth], []).append(name)
    return sorted(groups.items(), key=lambda item: (int(item[0]) if item[0].isdecimal() else -1, item[0]))


def difference_facts(path: Path, other: Path, weights: WeightSet = "model") -> dict[str, Any]:
    """Return the differences between two checkpoints as a dict of JSON values: training state, tensors that only one of
    them has, dtypes or shapes, and tensor values. With `weights` "ema", compare the averaged weights.
    """
    a, b = (Contents(resolve_checkpoint(folder), weights=weights) for folder in (path, other))
    only_a, only_b = missing_names(a, b)
    facts: dict[str, Any] = {
        "checkpoint": str(a.path),
        "other": str(b.path),
        **a.describe_weights(),
        "state": dict(sorted(differences(_comparable_states(a, b)).items())),
        "only_in_checkpoint": only_a,
        "only_in_other": only_b,
        "kinds": {name: list(pair) for name, pair in type_differences(a, b).items()},
        "values": {name: asdict(difference) for name, difference in value_differences(a, b)},
    }
    facts["same_tensors"] = not any(facts[key] for key in ("only_in_checkpoint", "only_in_other", "kinds", "values"))
    facts["summary"] = _difference_summary(facts, len(a.manifest.tensors))
    return facts


def _difference_summary(facts: dict[str, Any], num_tensors: int) -> dict[str, Any]:
    """Return the numbers of tensors that are equal, that differ, and that only one checkpoint has, with the largest
    difference of a value and its tensor. `num_tensors` is the number of tensors of the first checkpoint.
    """
    num_different, num_only = len(facts["kinds"]) + len(facts["values"]), len(facts["only_in_checkpoint"])
    largest = max(facts["values"], key=lambda name: facts["values"][name]["largest"], default=None)
    return {
        "equal": num_tensors - num_only - num_different, "different": num_different,
        "only_in_checkpoint": num_only, "only_in_other": len(facts["only_in_other"]),
        "largest": None if largest is None else facts["values"][largest]["largest"], "largest_in": largest,
    }  # fmt: skip


def _comparable_states(a: Contents, b: Contents) -> list[dict[str, Any]]:
    """Return the training states that the manifests of checkpoints `a` and `b` record, as a list of two dicts. If
    exactly one checkpoint was merged, its record of the merge is shortened to one clause, so that a comparison shows
    one difference for it.
    """
    states = [contents.manifest.state for contents in (a, b)]
    records = [merge_record(contents.manifest.state, contents.path / MANIFEST) for contents in (a, b)]
    if all(records):
        return states
    return [
        state | ({} if record is None else {"merged": record.summary})
        for state, record in zip(states, records, strict=True)
    ]


def print_difference(facts: dict[str, Any], show_all: bool) -> None:
    """Print the differences between two checkpoints on stdout, without `show_all` at most 40 lines for each kind of
    difference, and a line that sums them up. `facts` is the dict of `difference_facts`.
    """
    averages = "the averages in " if facts.get("weights") == "ema" else ""
    echo(f"{averages}{facts['checkpoint']} and {facts['other']}")
    for title, lines in (
        ("state", [f"{key}: {a} -> {b}" for key, (a, b) in facts["state"].items()]),
        ("tensors of the first alone", facts["only_in_checkpoint"]),
        ("tensors of the second alone", facts["only_in_other"]),
        ("other types or shapes", [f"{name}: {a} -> {b}" for name, (a, b) in facts["kinds"].items()]),
        ("other values", [f"{name}: {_describe_difference(pair)}" for name, pair in facts["values"].items()]),
    ):
        num_shown = len(lines) if show_all else _MAX_LINES
        more = [f"... and {len(lines) - num_shown} more; --all lists them"] if len(lines) > num_shown else []
        for text in [title, *(f"  {line}" for line in lines[:num_shown] + more)] if lines else []:
            echo(text)
    echo(_describe_summary(facts["summary"]))
    if facts["same_tensors"]:
        echo("all tensors are the same, bit for bit")


def _describe_summary(summary: dict[str, Any]) -> str:
    """Return the line that sums up a comparison, from the dict of `_difference_summary`."""
    counts = f"{plural(summary['equal'], 'tensor')} equal, {summary['different']} different"
    missing = f"{summary['only_in_checkpoint']} only in the first, {summary['only_in_other']} only in the second"
    largest = summary["largest"]
    largest_text = "" if largest is None else f"; the largest difference is {largest:.3g}, in {summary['largest_in']}"
    return f"{counts}, {missing}{largest_text}"


def _describe_difference(difference: dict[str, Any]) -> str:
    return (
        f"{difference['num_different']:,} of {difference['num_values']:,} numbers, by at most "
        f"{difference['largest']:.3g} where the largest is {difference['scale']:.3g}"
    )
