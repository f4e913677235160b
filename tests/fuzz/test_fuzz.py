"""Fuzzers run for a dozen cases each: damaged input is refused in words, or its numbers are right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.__main__ import made, names, report, tried
from tests.fuzz.fuzzer import Runner, generator

SEED = 1
CASES = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(tmp_path_factory.mktemp("runner")) as runner:
        yield runner


@pytest.mark.wide  # because: a process that has imported all, and the honest inputs, take seconds before the first case
@pytest.mark.parametrize("name", names())
def test_nothing_damaged_is_believed(name: str, run: Runner, tmp_path: Path) -> None:
    fuzzer, wrong = made(name, tmp_path / "honest", run), []
    for index in range(CASES):
        case, ran, found = tried(fuzzer, run, generator(name, SEED, index), tmp_path / f"case{index}")
        if found:
            wrong.append(report(name, SEED, index, case, ran, found))
    assert not wrong, "\n".join(wrong)
