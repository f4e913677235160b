"""The command `lmtrain` in a fork of a server that has imported what runs need: a start costs no import of torch.

One server a pytest process, built of the product's own. What is started behaves as `python -m lmtrain` does; where the
environment or the folder differs in a way that is read when modules are imported, a process is started afresh.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import lmtrain.__main__
from lmtrain.runtime.processes.start_rank_processes import OrphanAdoption, Program, RankStarter
from lmtrain.runtime.processes.stop_signals import unblock_stops
from lmtrain.start import processes_of_command
from tests.conftest import ENVIRONMENT

MODULE = "tests.cli.forking"
# read while modules are imported, or once for all
_READ_EARLY = (
    "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "GOMP_", "KMP_", "LD_", "CUDA_", "TORCH", "PYTORCH", "LANG", "LC_", "TZ",
    "TMPDIR", "LMTRAIN_NATIVE",
)  # fmt: skip
# what each has anyway, by the harness or since the product sets it before torch is imported
_SHARED = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000", "NO_COLOR": "1", "COLUMNS": "200",
}  # fmt: skip
# what imports_of adds for some settings: a launcher that has all imports of its ranks forks their server from itself
_BY_SETTINGS = (
    processes_of_command.COMPILER_IMPORT, processes_of_command.PIPELINE_IMPORT, "lmtrain.models.bert",
    "lmtrain.models.gpt", "lmtrain.optim.adamw", "lmtrain.optim.lamb", "lmtrain.optim.muon",
)  # fmt: skip
# because: the server is started by the first test that needs it, which may have changed both for itself
_FOLDER = os.getcwd()
_ENVIRONMENT = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("PYTEST")}
_server: _Server | None = None


def main() -> None:
    """Be `python -m lmtrain` with these arguments, in the fork."""
    sys.argv[0] = str(lmtrain.__main__.__file__)
    unblock_stops()
    lmtrain.__main__.main()


class Forked(subprocess.Popen[str]):
    """`Popen` of a fork: all but the start itself is as it is of any process."""

    def __init__(self, server: _Server, arguments: Sequence[str], environment: Mapping[str, str], output: int) -> None:
        self._server, self._changes = server, environment
        super().__init__(list(arguments), stdout=output, stderr=subprocess.STDOUT, text=True)

    def _execute_child(self, args: Sequence[str], *words: Any) -> None:
        pipes = words[9:15]  # from and to standard input, output and error, -1 where a stream is this process' own
        output = pipes[3] if pipes[3] >= 0 else 1
        try:
            self.pid = self._server.starter.start(
                (0, output, output), self._changes, title="of a test", name="lmtrain", other_module=(MODULE, args)
            )
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True


class _Server:
    """A server in the environment and the folder in which the tests were started."""

    def __init__(self) -> None:
        self.environment = _ENVIRONMENT | _SHARED
        of_ranks = (*processes_of_command.TRAINING_IMPORTS, *processes_of_command.EVALUATION_IMPORTS)
        modules = sorted({*of_ranks, *_BY_SETTINGS, MODULE})
        self._adopting = OrphanAdoption()
        self._adopting.__enter__()
        self.starter = RankStarter(
            Program([], imports=modules), self.environment, "tests", report=_fail, explain_no_server=_fail
        )
        self.started: list[Forked] = []

    def changes(self, wanted: Mapping[str, str]) -> dict[str, str] | None:
        """Return the variables that a process has beside the server's; None where a fork cannot have them."""
        missing = self.environment.keys() - wanted.keys() - _SHARED.keys()
        changed = {name: value for name, value in wanted.items() if self.environment.get(name) != value}
        return None if missing or any(name.startswith(_READ_EARLY) for name in changed) else changed

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.starter.close()
        self._adopting.__exit__()


def _fail(text: str) -> None:
    raise AssertionError(text)


def forked(arguments: Sequence[str], environment: Mapping[str, str], output: int) -> Forked | None:
    """Start `lmtrain ARGUMENTS` with this environment in a fork, or return None where that would not be the same."""
    global _server
    if not sys.platform.startswith("linux") or os.environ.get("LMTRAIN_FORK") == "0" or os.getcwd() != _FOLDER:
        return None
    if _server is None:
        _server = _Server()
        atexit.register(_server.close)
    changes = _server.changes(environment)
    if changes is None:
        return None
    _server.started = [process for process in _server.started if process.returncode is None]
    _server.started.append(Forked(_server, arguments, changes, output))
    return _server.started[-1]
