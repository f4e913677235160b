"""Options that are human sizes. Called by verbs; a wrong one is a wrong command line."""

from __future__ import annotations

from collections.abc import Callable

from lmtrain.errors import UsageError
from lmtrain.units import parse_bytes


def parse_size(option: str, text: str, parse: Callable[[str], int] = parse_bytes) -> int:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option} {text} {error}.") from error
