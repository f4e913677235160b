"""Each row of the page on who decides what names a module, and the files of tests that prove it."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT


def row_problems(text: str) -> list[str]:
    """Return the rows of the page on decisions that name no module which is there, or no file of tests which is."""
    found = []
    for row in re.findall(r"^\| (?!Question \|)(.+) \|$", text, re.MULTILINE):
        question, *cells = row.split(" | ")
        paths = [re.findall(r"`([\w./]+)`", cell) for cell in cells]
        modules = [path for path in paths[0] if path.startswith(("lmtrain/", "data_tools/"))] if paths else []
        proofs = paths[1] if len(paths) == 2 else []
        if not modules or not all((ROOT / path).exists() for path in modules):
            found.append(f"{question} names no module")
        if not proofs or not all(re.fullmatch(r"tests/[\w/]+/test_\w+\.py", path) for path in proofs):
            found.append(f"{question} names no file of tests")
        elif missing := [path for path in proofs if not (ROOT / path).is_file()]:
            found.append(f"{question} names {', '.join(missing)}, not there")
    return found


def test_every_row_names_what_decides_and_what_proves_it() -> None:
    text = (ROOT / "docs/explanation/who_decides_what.md").read_text("utf-8")
    assert text.count("\n| ") > 70
    assert not row_problems(text)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("`f` in `lmtrain/units.py` | `tests/unit/test_units.py`", []),
        ("`f` in `lmtrain/one.py` | `tests/unit/test_units.py`", ["Why? names no module"]),
        ("nobody | `tests/unit/test_units.py`", ["Why? names no module"]),
        ("`f` in `lmtrain/units.py`", ["Why? names no file of tests"]),
        ("`f` in `lmtrain/units.py` | `tests/torch_free.py`", ["Why? names no file of tests"]),
        ("`f` in `lmtrain/units.py` | `tests/unit/test_one.py`", ["Why? names tests/unit/test_one.py, not there"]),
    ],
)
def test_a_row_without_proof_is_found(row: str, said: list[str]) -> None:
    assert row_problems(f"| Question | Decided by | Proved by |\n|---|---|---|\n| Why? | {row} |\n") == said
