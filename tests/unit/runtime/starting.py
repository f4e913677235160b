"""Small programs that a RankStarter starts, for the tests of the server and its forks, and a way to run one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.runtime.processes.start_rank_processes import OrphanAdoption, Program, RankStarter

MODULE = "tests.unit.runtime.launched"


@dataclass
class Place:
    """A folder for the programs of a test, and what the launcher was told about its server."""

    folder: Path
    said: list[str] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)
    others: list[int] = field(default_factory=lambda: children())  # processes of other tests

    def children(self) -> list[int]:
        """Return the living children of this process that this test has started."""
        return [pid for pid in children() if pid not in self.others]

    def program(self, body: str, *, imported: str | None = None) -> Program:
        """Return a program that runs `body`; the server imports a module with the text `imported` before it forks."""
        (self.folder / "body.py").write_text(body)
        if imported is None:
            return Program([str(self.folder / "body.py")], module=MODULE)
        (self.folder / "imported_first.py").write_text(imported)
        return Program([str(self.folder / "body.py")], module=MODULE, imports=["imported_first"])

    @contextmanager
    def starter(self, program: Program, **options: Any) -> Iterator[RankStarter]:
        shared = ProcessEnv().shared_environment()
        shared["PYTHONPATH"] = os.pathsep.join([str(self.folder), shared.get("PYTHONPATH", "")])
        with OrphanAdoption():
            found = RankStarter(
                program, shared, "here", report=self.said.append, explain_no_server=self.explained.append, **options
            )
            with closing(found):
                yield found

    def run(
        self, starter: RankStarter, environment: Mapping[str, str] | None = None, **options: Any
    ) -> tuple[int, str, str]:
        """Start the program and wait; return its exit code, negative for a signal, its output and its errors."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, open(os.devnull) as nothing:
            streams = (nothing.fileno(), output.fileno(), errors.fileno())
            pid = starter.start(streams, environment or {}, title="a test", name="a test", **options)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            read = [os.pread(file.fileno(), 1 << 20, 0).decode() for file in (output, errors)]
        return code, read[0], read[1]


def children() -> list[int]:
    """Return the living children of this process; those that have ended and that nobody has waited for are none."""
    text = "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    return [pid for pid in map(int, text.split()) if not _has_ended(pid)]


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
