"""Options that are human sizes. Called by verbs; a wrong one is a wrong command line."""

from __future__ import annotations

from lmtrain.errors import UsageError
from lmtrain.units import parse_bytes


def parse_size(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{option} {text} {error}.") from error
