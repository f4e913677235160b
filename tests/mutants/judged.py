"""Drawn mistakes that were read and found to be nothing: no input makes a number, a file or an answer another.

Each stands in judged.json once, by its name, with the reason. Whatever a test notices is something, and needs no judge.
"""

from __future__ import annotations

import json
from pathlib import Path

JUDGED = Path(__file__).with_name("judged.json")


def judged_as_nothing() -> set[str]:
    """Return the names of these mistakes."""
    return set(json.loads(JUDGED.read_text()))
