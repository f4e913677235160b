"""A process that runs command lines one after another, as JSON lines, and says of each whether torch came in.

Started by tests in a process without torch, so that hundreds of mistakes cost one start of Python.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Said:
    code: int
    text: str
    torch: bool


class Runner:
    def __enter__(self) -> Runner:
        self._start()
        return self

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mistakes.runner"], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._process.communicate(timeout=60)

    def __call__(self, words: Sequence[str], env: Mapping[str, str] | None = None) -> Said:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([list(words), dict(env or {})]) + "\n")
        process.stdin.flush()
        said = Said(**json.loads(process.stdout.readline()))
        if said.torch:  # because: what comes after is to be judged by itself
            self._end()
            self._start()
        return said


def run(words: list[str], env: dict[str, str]) -> Said:
    from lmtrain.cli.main import main

    output, before = io.StringIO(), dict(os.environ)
    os.environ.update(env)
    code: object = 0
    try:
        with redirect_stdout(output), redirect_stderr(output):
            main(words)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        output.write(traceback.format_exc())
        code = 1
    finally:
        os.environ.clear()
        os.environ.update(before)
    return Said(code if isinstance(code, int) else 1, output.getvalue(), "torch" in sys.modules)


if __name__ == "__main__":
    for line in sys.stdin:
        said = run(*json.loads(line))
        print(json.dumps(vars(said)), flush=True)
