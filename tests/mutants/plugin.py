"""Plugin of pytest that notes in a copy which test is running, which failed, and how long each took."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NOTES = "LMTRAIN_MUTANT_NOTES"  # the folder for notes


@dataclass
class Told:
    """The notes, read back."""

    tests: list[str] = field(default_factory=list)  # tests and shared fixtures, by number from 1
    failed: list[str] = field(default_factory=list)
    durations: dict[str, float] = field(default_factory=dict)
    fixtures: dict[str, list[str]] = field(default_factory=dict)  # of each test, the shared fixtures that it uses
    running: str = ""


class Notes:
    """The plugin. A fixture for several tests counts as a test of its own: what it reaches, all its users reach."""

    def __init__(self, folder: Path) -> None:
        self.lines = (folder / "tests.jsonl").open("a", buffering=1)
        self.current = os.open(folder / "current", os.O_RDWR)
        self.count = 0

    def _enter(self, name: str) -> bytes:
        before = os.pread(self.current, 4, 0)
        self.count += 1
        self._say(test=name)
        os.pwrite(self.current, self.count.to_bytes(4, "little"), 0)
        return before

    def _say(self, **facts: Any) -> None:
        self.lines.write(json.dumps(facts) + "\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        began = time.monotonic()
        self._enter(item.nodeid)
        answer = yield
        fixtures = getattr(item, "fixturenames", [])
        self._say(ended=item.nodeid, seconds=round(time.monotonic() - began, 3), fixtures=fixtures)
        return answer

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._enter(f"fixture {fixturedef.baseid} {fixturedef.argname}")
        try:
            return (yield)
        finally:
            os.pwrite(self.current, before, 0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._say(failed=report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._say(failed=f"collecting {report.nodeid}")


def pytest_configure(config: pytest.Config) -> None:
    if NOTES in os.environ:
        config.pluginmanager.register(Notes(Path(os.environ[NOTES])), "notes of a copy")


def read(folder: Path) -> Told:
    told = Told()
    file = folder / "tests.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        facts = json.loads(line)
        if "test" in facts:
            told.tests.append(facts["test"])
            told.running = facts["test"]
        elif "failed" in facts:
            if facts["failed"] not in told.failed:
                told.failed.append(facts["failed"])
        else:
            told.durations[facts["ended"]] = facts["seconds"]
            told.fixtures[facts["ended"]] = facts["fixtures"]
            told.running = ""
    return told
