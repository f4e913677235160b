"""A file of spans in a test's folder, and one process that records into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmtrain.observe.spans.span_file import Header, SpanFile
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.current_phase import ThreadPosition

Open = Callable[[int], SpanFile]


@pytest.fixture
def open_file(tmp_path: Path) -> Iterator[Open]:
    files: list[SpanFile] = []

    def open_file(capacity: int) -> SpanFile:
        header = Header(0, 8, (0, 0, 0, 0), (8, 1, 1, 1, 1), "here", 1, 0, 0, 0, capacity, "1f1b", 4)
        files.append(SpanFile(tmp_path / "trace" / f"{len(files)}.spans", header))
        return files[-1]

    yield open_file
    for file in files:
        file.close()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Marks as of a process that begins, and nothing that records them afterwards."""
    main = ThreadPosition(0)
    monkeypatch.setattr(current_phase, "main", main)
    monkeypatch.setattr(current_phase, "enter", main.enter)
    yield
    current_phase.set_recorder(None)
    current_phase.set_step_callback(None)
