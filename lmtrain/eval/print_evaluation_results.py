"""Output of evaluations for people: tables of results with the recipe of each number, and the file of samples.

Called by `lmtrain eval`. The screen shows about six lines, or with --full everything in the JSON, in 80 columns. A file
of samples has a line per item, and comparisons read it again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from lmtrain.errors import DataError
from lmtrain.eval.statistics import LEVEL, Comparison
from lmtrain.eval.task import NOT_PUBLISHED, Columns, Prepared, Result, Task
from lmtrain.eval.windows import MaskedRequest, Request
from lmtrain.runtime.files.atomic_files import json_bytes, parse_json, read_bytes
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.units import format_count, format_measure, format_seconds, plural

_HEAD_TOKENS = 24
_MAX_BYTES = 4 << 30
_ROW_KEYS = ("result", "task", "item", "text", "target", "right")  # keys of a row that are not columns
_MAX_SOURCES = 8  # most sources shown without --full
_HASH_CHARACTERS = 12  # characters of a hash without --full


def sample_rows(
    number: int, result: Result, prepared: Prepared, columns: Columns, tokenizer: Tokenizer
) -> Iterator[dict[str, Any]]:
    """Yield a JSON row per item (document, line or question) of a result: the beginning of its text, whether the model
    was right, and the item's value in each of `columns`. `number` is the result's index in the results file.

    The text is empty for an item without requests.
    """
    heads = _item_texts(prepared, tokenizer)
    for item in range(prepared.num_items):
        values = {name: float(column[item]) for name, column in columns.items()}
        row = {"result": number, "task": result.task, "item": item, **heads.get(item, {"text": ""})}
        if "items_greedy" in values:
            row["right"] = bool(values["items_greedy"])
        yield row | values


def _item_texts(prepared: Prepared, tokenizer: Tokenizer) -> dict[int, dict[str, str]]:
    """Return item index -> {"text": the beginning of the item's text}, with a further entry "target", the part that is
    scored, if the item is not scored whole. An item is a document, line or question.
    """
    first_requests: dict[int, Request] = {}
    for request in prepared.requests:
        first_requests.setdefault(request.item, request)
    texts = {}
    for item, request in first_requests.items():
        ids = request.tokens.tolist()
        fed = ids[: request.num_fed] if isinstance(request, MaskedRequest) else ids
        texts[item] = {"text": tokenizer.decode(fed[:_HEAD_TOKENS])}
        if isinstance(request, MaskedRequest) and request.places is None:
            continue  # because: the label of a pair is no token
        if request.num_scored < len(ids) - 1:
            texts[item]["target"] = tokenizer.decode(ids[-request.num_scored :][:_HEAD_TOKENS])
    return texts


def encode_rows(rows: Iterator[dict[str, Any]]) -> bytes:
    """Encode rows as JSON, one a line."""
    return b"".join(json_bytes(row) + b"\n" for row in rows)


def read_columns(path: Path, sha256: str) -> dict[int, Columns]:
    """Return result index -> the columns of values per item, from the file of samples `path`. Raise DataError if the
    file's SHA-256 is not `sha256`, the one recorded with the results.
    """
    data = read_bytes(path, _MAX_BYTES)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DataError(
            f"{path} was changed after it was written: its SHA-256 differs. Run the evaluation again."
        )
    columns_by_result: dict[int, dict[str, list[float]]] = {}
    for line in data.splitlines():
        row = parse_json(line, path)
        if not isinstance(row, Mapping):
            raise DataError(f"{path} is damaged: it has a line that is not a JSON object. Run the evaluation again.")
        of = columns_by_result.setdefault(row["result"], {})
        for name, value in row.items():
            if name not in _ROW_KEYS:
                of.setdefault(name, []).append(value)
    return {
        number: {name: np.array(values, np.float64) for name, values in columns.items()}
        for number, columns in columns_by_result.items()
    }


def render(result: Result, model: dict[str, Any], *, full: bool = False) -> RenderableType:
    """Return a result as tables for the terminal. `model` has the facts about the model to show, such as its
    checkpoint. `full` shows everything that the JSON file has instead of a summary.
    """
    published, headline, limit = result.notes.get(NOT_PUBLISHED), result.headline, result.limit
    few = "" if limit is None else f"PARTIAL: the first {plural(limit, 'item', f'{limit:,}')}"
    parts: list[RenderableType] = [
        _TextPieces(
            Text(result.protocol, "bold"),
            Text(few, "bold yellow"),
            Text("" if published is None else f"NOT OF {published} AS PUBLISHED", "bold yellow"),
            Text(f"{headline} {format_measure(headline, result.measures[headline])}", "bold green"),
            Text(_interval_text(result, headline)),
        )
    ]
    if full:
        parts.append(_measures_table(result))
    if result.baselines:
        parts.append(_baselines_table(result))
    if result.groups and (full or len(result.groups) <= _MAX_SOURCES):
        parts.append(_groups_table(result))
    if full:
        return Group(*parts, _positions_table(result), _facts_table([*model.items(), *_recipe_rows(result)]))
    return Group(*parts, _facts_table(_short_rows(result, model)))


def render_tasks(tasks: dict[str, Task]) -> RenderableType:
    """Return a table of all evaluation tasks: the data that each needs, its recipe and its headline measure."""
    parts: list[RenderableType] = []
    for name, task in tasks.items():
        rows = [("data", task.data), *task.recipe.items(), ("measure", task.headline)]
        if task.compares:
            rows.append(("baseline", "--baseline PREFIX also scores by that dataset's counts"))
        parts += [Text(name, style="bold"), _facts_table(rows), Text()]
    return Group(*parts[:-1])


def render_comparison(comparison: Comparison, *, full: bool = False) -> RenderableType:
    """Return a table for the terminal that compares models A and B: both values of each measure, their difference with
    its 95% interval, and whether 0 is outside it. `full` shows all measures instead of the main ones.
    """
    differences = comparison.differences
    main = [name for name in (comparison.headline, "bits_per_byte") if name in differences]
    numbers = map(_right_column, ("A", "B", "B - A", f"{LEVEL:.0%} interval"))
    table = _plain_table(Column("measure", no_wrap=True), *numbers, Column("clear"))
    for name in differences if full else main or differences:
        difference = differences[name]
        table.add_row(
            name,
            format_measure(name, difference.a),
            format_measure(name, difference.b),
            _signed_text(name, difference.difference),
            " to ".join(_signed_text(name, edge) for edge in difference.interval or ()) or "one item: none",
            "-" if difference.interval is None else "yes" if difference.beyond_chance else "no",
        )
    notes = [("items", f"{comparison.num_items:,}, drawn alike for both; clear: 0 is outside the interval")]
    if comparison.left_out:
        notes.append(("left out", f"{', '.join(comparison.left_out)}: the tokenizers differ"))
    return Group(Text.assemble((comparison.protocol, "bold"), f"  {comparison.data}"), table, _facts_table(notes))


def _signed_text(name: str, value: float) -> str:
    return ("+" if value > 0 else "") + format_measure(name, value)


class _TextPieces:
    """Pieces of text side by side. A piece that does not fit begins a new line, indented like the rows below."""

    def __init__(self, *pieces: Text) -> None:
        self.pieces = [piece for piece in pieces if piece]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text()
        for piece in self.pieces:
            if line and line.cell_len + 2 + piece.cell_len > options.max_width:
                yield line
                line = Text(" " * 6)
            line = Text.assemble(line, "  " if line else "", piece)
        yield line


def _interval_text(result: Result, name: str) -> str:
    """Return the bootstrap interval of the measure `name` as text, such as "(95% interval 3.1 to 3.4, 500 items)".
    Without an interval the text is empty, or a note that there is only one item.
    """
    interval = result.intervals.get(name)
    if interval is None:
        return "(one item: no interval)" if result.num_items == 1 else ""
    low, high = (format_measure(name, value) for value in interval)
    return f"({LEVEL:.0%} interval {low} to {high}, {result.num_items:,} items)"


def _short_rows(result: Result, model: dict[str, Any]) -> list[tuple[str, str]]:
    other_measures = [f"{n} {format_measure(n, v)}" for n, v in result.measures.items() if n != result.headline]
    numbers = [(result.num_documents, "document"), (result.num_words, "word"), (result.num_bytes, "byte")]
    counts = ", ".join(plural(number, word, f"{number:,}") for number, word in numbers if number is not None)
    scope = "" if result.limit is None else "the whole text: "
    on = f"{result.dtype} on {model['device']}" if "device" in model else result.dtype
    average = ", the average of its weights" * (model.get("weights") == "ema")
    path = [f"{model['checkpoint']}{average}"] if "checkpoint" in model else []
    return [
        ("also", ", ".join(other_measures)),
        ("model", "; ".join([*path, on, result.layout])),
        ("text", f"{result.data}; sha256 {result.text_sha256[:_HASH_CHARACTERS]}; {scope}{counts}"),
        ("recipe", f"{_windows_text(result)}; prefix: {result.prefix}; divided by {result.denominator}"),
        (
            "scored",
            f"{result.num_targets:,} targets, {result.nll_sum_nats:.3f} nats; {_time_text(result)}; --full: all",
        ),
    ]


def _windows_text(result: Result) -> str:
    return f"window {result.seq_len:,}, stride {'none' if result.stride is None else f'{result.stride:,}'}"


def _time_text(result: Result) -> str:
    took = format_seconds(result.seconds)
    return f"{took}, {format_count(result.tokens_per_s)} tokens/s fed" if result.tokens_per_s else took


def _measures_table(result: Result) -> Table:
    numbers = map(_right_column, ("value", f"{LEVEL:.0%} interval"))
    return _filled(Table("measure", *numbers, box=box.SIMPLE_HEAD), (
        (name, format_measure(name, value),
         " to ".join(format_measure(name, edge) for edge in result.intervals.get(name, ())))
        for name, value in result.measures.items()
    ))  # fmt: skip


def _groups_table(result: Result) -> Table:
    """Return a table with a row for each source of items, such as an input file: its name and its value of the result's
    headline measure.
    """
    headline = result.headline
    return _filled(_plain_table(Column("by source", overflow="fold"), _right_column(headline)), (
        (name, format_measure(headline, measures.get(headline, math.nan)))
        for name, measures in result.groups.items()
    ))  # fmt: skip


def _positions_table(result: Result) -> RenderableType:
    """Return a table of the mean loss in nats by the number of tokens that precede the target in its window. Return an
    empty text if the result has no losses by position.
    """
    if not result.loss_by_position:
        return Text()
    table = Table(*map(_right_column, ("tokens before", "targets", "nats a token")), box=box.SIMPLE_HEAD)
    for row in result.loss_by_position:
        first, last = row["tokens_before_from"], row["tokens_before_to"]
        table.add_row(
            f"{first:,}" if first == last else f"{first:,} to {last:,}",
            f"{row['targets']:,}",
            f"{row['nll_per_token_nats']:.4f}",
        )
    return table


def _baselines_table(result: Result) -> Table:
    """Return a table of the bits per byte and token perplexity of the model and of the unigram and bigram baselines on
    the same targets, with the ratio of model to baseline.
    """
    table = Table(
        Column("on the same targets", no_wrap=True),
        *(
            Column(title, justify="right", no_wrap=True)
            for title in ("bits per byte", "ratio", "token perplexity", "ratio")
        ),
        box=box.SIMPLE_HEAD,
    )
    bits, per_token = result.measures["bits_per_byte"], result.measures["token_perplexity"]
    table.add_row("model", f"{bits:.4f}", "", f"{per_token:,.2f}", "", style="bold")
    return _filled(table, (
        (row.name, f"{row.bits_per_byte:.4f}", f"{row.model_bits_ratio:.3f}",
         f"{row.token_perplexity:,.2f}", f"{row.model_token_perplexity_ratio:.3f}")
        for row in result.baselines
    ))  # fmt: skip


def _facts_table(rows: list[tuple[str, Any]]) -> Table:
    """Return a table of two columns without borders; `rows` has (name, value) pairs."""
    table = _plain_table(Column(no_wrap=True, style="dim"), Column(overflow="fold", style="dim"), show_header=False)
    return _filled(table, ((name, f"{value:,}" if isinstance(value, int) else str(value)) for name, value in rows))


def _filled(table: Table, rows: Iterable[Sequence[str]]) -> Table:
    """Add the rows to the table and return it."""
    for row in rows:
        table.add_row(*row)
    return table


def _plain_table(*columns: Column, show_header: bool = True) -> Table:
    """Return a table without lines, which is narrow enough for a hash in 80 columns."""
    return Table(*columns, show_header=show_header, box=None, padding=(0, 2, 0, 0), pad_edge=False)


def _right_column(title: str) -> Column:
    return Column(title, justify="right")


def _recipe_rows(result: Result) -> list[tuple[str, str]]:
    notes = dict(result.notes)
    of = [str(notes.pop("text_sha256_of"))] if "text_sha256_of" in notes else []
    words = "" if result.num_words is None else f"{result.num_words:,}; "
    return [
        ("version", f"{result.protocol_version} of the protocol {result.protocol}"),
        ("data", result.data),
        ("text sha256", "\nof ".join([result.text_sha256, *of])),
        ("documents", f"{result.num_documents:,}"),
        ("words", f"{words}{result.words_rule}"),
        ("bytes", f"{result.num_bytes:,}; {result.bytes_rule}"),
        ("tokens", f"{result.num_tokens:,}, of which scored as targets: {result.num_targets:,}"),
        ("windows", _windows_text(result)),
        ("padding", f"{result.padding_share:.2%} of what was fed"),
        ("prefix", result.prefix),
        ("denominator", result.denominator),
        ("sum of NLL", f"{result.nll_sum_nats:.6f} nats"),
        ("intervals", result.intervals_rule),
        ("dtype", result.dtype),
        ("layout", result.layout),
        ("tokenizer", result.tokenizer_fingerprint),
        *((name.replace("_", " "), str(value)) for name, value in notes.items()),
        ("time", _time_text(result)),
        ("lmtrain", result.lmtrain),
    ]
