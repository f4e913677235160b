"""Every fuzzer for a case, and then for a few: damaged input is refused in words, or its numbers are right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.__main__ import made, names, report, tried
from tests.fuzz.fuzzer import Runner, generator

SEED = 1
LATER = ("foreign", "preprocess_leftovers", "reshard_leftovers", "runs")  # their honest inputs take seconds to make
CASES = [
    pytest.param(name, cases, id=f"{name}-{cases}", marks=pytest.mark.wide if cases.start or name in LATER else ())
    for name in names() for cases in (range(1), range(1, 60))
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(tmp_path_factory.mktemp("runner")) as runner:
        yield runner


@pytest.mark.parametrize(("name", "cases"), CASES)
def test_nothing_damaged_is_believed(name: str, cases: range, run: Runner, tmp_path: Path) -> None:
    fuzzer, wrong = made(name, tmp_path / "honest", run), []
    for index in cases:
        case, ran, found = tried(fuzzer, run, generator(name, SEED, index), tmp_path / f"case{index}")
        if found:
            wrong.append(report(name, SEED, index, case, ran, found))
    assert not wrong, "\n".join(wrong)
