"""An evaluation as a person reads it: the number, and beneath it the recipe without which it means nothing.

Called by `lmtrain eval`. Fits 80 columns; everything it shows is also in the JSON.
"""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmtrain.eval.result import Result
from lmtrain.eval.task import Task
from lmtrain.observe.words import show_measure


def render(result: Result, model: dict[str, Any]) -> RenderableType:
    parts: list[RenderableType] = [_headline(result), _measures(result)]
    if result.baselines:
        parts.append(_baselines(result))
    return Group(*parts, _recipe(result, model))


def render_tasks(tasks: dict[str, Task]) -> RenderableType:
    """Every task with the file it needs and its recipe."""
    table = Table(box=box.SIMPLE_HEAD, show_lines=True)
    table.add_column("--task", no_wrap=True, style="bold")
    table.add_column("--data and recipe", overflow="fold")
    for name, task in tasks.items():
        recipe = "\n".join(f"{key}: {rule}" for key, rule in task.recipe.items())
        table.add_row(name, Text(f"{task.data}\n") + Text(recipe, style="dim"))
    return table


def _headline(result: Result) -> Text:
    value = show_measure(result.headline, result.measures[result.headline])
    return Text.assemble((result.protocol, "bold"), "  ", (f"{result.headline} {value}", "bold green"))


def _measures(result: Result) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in result.measures.items():
        table.add_row(name, show_measure(name, value))
    return table


def _baselines(result: Result) -> Table:
    """The same targets scored by counting; a ratio is the model's number over the baseline's."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("on the same targets", no_wrap=True)
    for title in ("bits per byte", "ratio", "token perplexity", "ratio"):
        table.add_column(title, justify="right", no_wrap=True)
    bits, per_token = result.measures["bits_per_byte"], result.measures["token_perplexity"]
    table.add_row("model", f"{bits:.4f}", "", f"{per_token:,.2f}", "", style="bold")
    for row in result.baselines:
        table.add_row(
            row.name,
            f"{row.bits_per_byte:.4f}",
            f"{row.model_bits_ratio:.3f}",
            f"{row.token_perplexity:,.2f}",
            f"{row.model_token_perplexity_ratio:.3f}",
        )
    return table


def _recipe(result: Result, model: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)  # because: a hash then fits 80
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold", style="dim")
    for name, value in [*model.items(), *_recipe_rows(result)]:
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    return table


def _recipe_rows(result: Result) -> list[tuple[str, str]]:
    stride = "none" if result.stride is None else f"{result.stride:,}"
    notes = dict(result.notes)
    of = [str(notes.pop(key)) for key in ("text_sha256_of",) if key in notes]
    words = "" if result.num_words is None else f"{result.num_words:,}; "
    return [
        ("protocol", f"{result.protocol}, version {result.version}"),
        ("data", result.data),
        ("text sha256", "\nof ".join([result.text_sha256, *of])),
        ("documents", f"{result.num_documents:,}"),
        ("words", f"{words}{result.words_rule}"),
        ("bytes", f"{result.num_bytes:,}; {result.bytes_rule}"),
        ("tokens", f"{result.num_tokens:,}, of which scored as targets: {result.num_targets:,}"),
        ("windows", f"seq_len {result.seq_len:,}, stride {stride}"),
        ("prefix", result.prefix),
        ("denominator", result.denominator),
        ("sum of NLL", f"{result.nll_sum_nats:.6f} nats"),
        ("dtype", result.dtype),
        ("tokenizer", result.tokenizer_fingerprint),
        *((name.replace("_", " "), str(value)) for name, value in notes.items()),
    ]
