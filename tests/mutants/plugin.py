"""Plugin of pytest that notes in a copy which test runs, which failed, how long each took, and what it reached."""

from __future__ import annotations

import base64
import json
import mmap
import os
import time
import zlib
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NOTES = "LMTRAIN_MUTANT_NOTES"  # the folder for notes


@dataclass
class Told:
    """The notes, read back."""

    failed: list[str] = field(default_factory=list)
    durations: dict[str, float] = field(default_factory=dict)
    fixtures: dict[str, list[str]] = field(default_factory=dict)  # of each test, the shared fixtures that it uses
    reached: dict[str, str] = field(default_factory=dict)  # of each test and shared fixture, packed flags
    running: str = ""
    since: float = 0.0


class Notes:
    """The plugin. A fixture for several tests counts as a test of its own: what it reaches, all its users reach."""

    def __init__(self, folder: Path) -> None:
        self.lines = (folder / "tests.jsonl").open("a", buffering=1)
        self.flags: mmap.mmap | None = None
        if (file := folder / "flags").exists():
            with file.open("r+b") as opened:
                self.flags = mmap.mmap(opened.fileno(), 0)

    def _say(self, **facts: Any) -> None:
        self.lines.write(json.dumps(facts) + "\n")

    def _take(self) -> bytes:
        """Return the flags that were set, and leave none."""
        if self.flags is None:
            return b""
        found = self.flags[:]
        self.flags[:] = bytes(len(found))
        return found

    def _say_reached(self, name: str, flags: bytes) -> None:
        if flags:
            bits = np.packbits(np.frombuffer(flags, np.uint8))
            self._say(name=name, reached=base64.b64encode(zlib.compress(bits.tobytes())).decode())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        began = time.monotonic()
        self._say(test=item.nodeid, at=time.time())
        self._take()
        answer = yield
        self._say_reached(item.nodeid, self._take())
        fixtures = getattr(item, "fixturenames", [])
        self._say(ended=item.nodeid, seconds=round(time.monotonic() - began, 3), fixtures=fixtures)
        return answer

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._take()
        try:
            return (yield)
        finally:
            self._say_reached(f"fixture {fixturedef.baseid} {fixturedef.argname}", self._take())
            if self.flags is not None:
                self.flags[:] = before

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
    """Return what was noted; a last line that a kill cut short is left out."""
    told = Told()
    file = folder / "tests.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            facts = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "test" in facts:
            told.running, told.since = facts["test"], facts["at"]
        elif "failed" in facts:
            if facts["failed"] not in told.failed:
                told.failed.append(facts["failed"])
        elif "reached" in facts:
            told.reached[facts["name"]] = facts["reached"]
        else:
            told.durations[facts["ended"]] = facts["seconds"]
            told.fixtures[facts["ended"]] = facts["fixtures"]
            told.running = ""
    return told
