"""An evaluation item by item, as rows for a JSONL file and back: what was asked, what came out, whether it was right.

Called by the command line, which writes them, and by the comparison of two results, which reads them. Torch-free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.errors import DataError
from lmtrain.eval.result import Result
from lmtrain.eval.task import Columns, Prepared
from lmtrain.eval.text.windows import MaskedRequest, Request
from lmtrain.runtime.files.files import json_bytes, parse_json, read_bytes
from lmtrain.tokenizer.base import Tokenizer

_HEAD_TOKENS = 24
_MOST_BYTES = 4 << 30
_WORDS = ("result", "task", "item", "text", "target", "right")  # of a row; all others are columns


def sample_rows(
    number: int, result: Result, prepared: Prepared, columns: Columns, tokenizer: Tokenizer
) -> Iterator[dict[str, Any]]:
    """Items in their order. `number`: of the result in its file. An item of which nothing is asked has no text."""
    heads = _heads(prepared, tokenizer)
    for item in range(prepared.num_items):
        values = {name: float(column[item]) for name, column in columns.items()}
        row = {"result": number, "task": result.task, "item": item, **heads.get(item, {"text": ""})}
        if "items_greedy" in values:
            row["right"] = bool(values["items_greedy"])
        yield row | values


def _heads(prepared: Prepared, tokenizer: Tokenizer) -> dict[int, dict[str, str]]:
    """How an item begins, and what is asked of it where that is less than all."""
    firsts: dict[int, Request] = {}
    for request in prepared.requests:
        firsts.setdefault(request.item, request)
    found = {}
    for item, request in firsts.items():
        ids = request.tokens.tolist()
        masked = isinstance(request, MaskedRequest)
        found[item] = {"text": tokenizer.decode((ids[: request.num_fed] if masked else ids)[:_HEAD_TOKENS])}
        if isinstance(request, MaskedRequest) and request.places is None:
            continue  # because: what is asked of a pair is no token
        if request.num_scored < len(ids) - 1:
            found[item]["target"] = tokenizer.decode(ids[-request.num_scored :][:_HEAD_TOKENS])
    return found


def as_lines(rows: Iterator[dict[str, Any]]) -> bytes:
    return b"".join(json_bytes(row) + b"\n" for row in rows)


def read_columns(path: Path, sha256: str) -> dict[int, Columns]:
    """By a result's number, its columns; refused where the file is not the one that was written with the results."""
    data = read_bytes(path, _MOST_BYTES)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DataError(
            f"{path} is not the file that was written with its results: its SHA-256 is another. Evaluate once more."
        )
    found: dict[int, dict[str, list[float]]] = {}
    for line in data.splitlines():
        row = parse_json(line, path)
        if not isinstance(row, Mapping):
            raise DataError(f"{path} has a line that is no row of a sample. Evaluate once more.")
        of = found.setdefault(row["result"], {})
        for name, value in row.items():
            if name not in _WORDS:
                of.setdefault(name, []).append(value)
    return {number: {name: np.array(values, np.float64) for name, values in of.items()} for number, of in found.items()}
