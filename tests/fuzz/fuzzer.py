"""What a fuzzer is, how a verb is run for it, and what counts as a fault."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lmtrain.errors import LmtrainError

MORE_BYTES = 512 << 20  # above the honest call, each
MORE_SECONDS = 20
ROOT = Path(__file__).resolve().parents[2]


def _codes(kind: type[LmtrainError]) -> set[int]:
    return {kind.exit_code}.union(*map(_codes, kind.__subclasses__()))


# the table of docs/reference/errors.md; 70 is for what went wrong in ours
CODES = _codes(LmtrainError) - {70} | {0}


@dataclass(frozen=True)
class Ran:
    """How one call of `lmtrain` fared."""

    code: int
    ended: str  # "", or why it had to be ended
    cpu_s: float
    grown: int  # bytes
    touched: tuple[str, ...]  # what it did that it may not
    output: str


class Runner:
    """`lmtrain` in children of one warm process. Its own output files stand in `folder`."""

    def __init__(self, folder: Path, allowed: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.output, self.allowed = folder / "output", tuple(allowed)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.server"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def __call__(self, *arguments: object, folder: Path, writes: Sequence[Path] = (), seconds: float = 120,
                 env: Mapping[str, str] | None = None) -> Ran:  # fmt: skip
        """`lmtrain ARGUMENTS` in `folder`, which it may write to, as it may to `writes`."""
        request = {
            "arguments": [os.fsdecode(a) if isinstance(a, bytes) else str(a) for a in arguments],
            "folder": str(folder), "writes": [str(Path(p).resolve()) for p in (folder, *writes)],
            "output": str(self.output), "seconds": seconds, "env": dict(env or {}), "allowed": self.allowed,
        }  # fmt: skip
        assert self._server.stdin
        assert self._server.stdout
        print(json.dumps(request), file=self._server.stdin, flush=True)
        answer = json.loads(self._server.stdout.readline())
        answer["touched"] = tuple(answer["touched"])
        return Ran(**answer, output=self.output.read_text(errors="replace"))

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()


def nothing(ran: Ran) -> str:
    return ""


@dataclass(frozen=True)
class Case:
    """One changed input, laid out in its folder, and the call that meets it."""

    what: str  # what was changed, in words
    arguments: tuple[object, ...]
    honest: Ran  # the same call on the honest input
    wrong: Callable[[Ran], str] = nothing  # of a call that ended with 0: what is wrong with its numbers
    writes: tuple[Path, ...] = ()  # besides the case's own folder
    env: Mapping[str, str] | None = None


class Fuzzer(Protocol):
    """Makes its honest inputs once, in `folder`; then cases without an end, each a pure function of its generator."""

    def __init__(self, folder: Path, run: Runner) -> None: ...

    def case(self, rng: random.Random, folder: Path) -> Case:
        """A changed copy in `folder`, which is new and empty."""
        ...


def faults(case: Case, ran: Ran) -> list[str]:
    """Everything about this call that must not be."""
    found = []
    if ran.ended:
        found.append(ran.ended)
    elif ran.code not in CODES:
        found.append(f"exit code {ran.code}")
    if "Traceback (most recent call last)" in ran.output:
        found.append("traceback: " + ran.output.strip().splitlines()[-1][:200])
    if ran.code and not ran.output.strip():
        found.append("says nothing")
    if "canary" in ran.output:  # what the secrets of `case.env` are
        found.append("a secret of the environment is in the output")
    if raw := re.search(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]", ran.output.replace("\r\n", "\n")):
        found.append(f"raw control character {raw[0]!a} in the output")
    if ran.grown > case.honest.grown + MORE_BYTES:
        found.append(f"{ran.grown >> 20} MiB where the honest call takes {case.honest.grown >> 20}")
    if ran.cpu_s > case.honest.cpu_s + MORE_SECONDS:
        found.append(f"{ran.cpu_s:.0f} s where the honest call takes {case.honest.cpu_s:.0f}")
    found += [f"touched: {line}" for line in ran.touched]
    if ran.code == 0 and not ran.ended and (wrong := _judged(case, ran)):
        found.append(wrong)
    return found


def _judged(case: Case, ran: Ran) -> str:
    try:
        return case.wrong(ran)
    except Exception as error:  # because: what cannot be judged is not what an honest call leaves
        return f"the result cannot be judged: {type(error).__name__}: {error}"


def honest(run: Runner, *arguments: object, folder: Path, **kwargs: object) -> Ran:
    """A call that must succeed: the honest input is right, or the fuzzer is wrong."""
    ran = run(*arguments, folder=folder, **kwargs)  # type: ignore[arg-type]
    assert (ran.code, ran.ended, ran.touched) == (0, "", ()), f"{arguments}: {ran}"
    return ran


def generator(name: str, seed: int, index: int) -> random.Random:
    return random.Random(f"{name} {seed} {index}")
