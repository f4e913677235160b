"""What `lmtrain inspect` prints of a checkpoint, or of two compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmtrain.checkpoint.describe_merge import merge_lines
from lmtrain.checkpoint.view_with_ema_as_weights import AVERAGE_PREFIX
from lmtrain.cli.inspect.dataset_view import describe_tokenizer
from lmtrain.cli.inspect.run_folder_view import describe_model, lineage_lines
from lmtrain.cli.screen.print_messages_and_json import echo
from lmtrain.runfolder.run_facts import RunFacts, parameters_text
from lmtrain.units import format_bytes, plural

if TYPE_CHECKING:
    from rich.tree import Tree

_OTHER_TENSORS = (("optimizer's", "optim."), ("average's", AVERAGE_PREFIX))
_AVERAGE_NOTES = {"model": "; --weights ema reads it", "ema": "; the tensors are the average's"}
_MAX_LINES = 40  # per section of a comparison


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
