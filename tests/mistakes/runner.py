"""A process without torch that runs command lines one after another, as JSON lines.

A command that asks for torch is ended there: all that is to be refused without torch has been refused by then, so it
has been accepted. In a world of its own a command that starts another process is ended likewise; files that it made are
removed, and files that it changed put back.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

from tests.cli.at_work_lines import without_at_work_lines

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20  # of computing, for a command to be refused, or to begin its work; ten times as long by the clock


PARSED_ONLY = ("demo",)  # verbs that do much before they ask for torch: accepted once their words are read


class Accepted(BaseException):
    """The command begins its work."""


@dataclass(frozen=True)
class Outcome:
    code: int
    text: str
    is_accepted: bool
    torch: bool = False  # it asked for torch
    # for each problem of the error: the ways out as (new words, what they replace, whether it is an example)
    ways: list[list[tuple[list[str], list[str], bool]]] = field(default_factory=list)
    values: list[str] = field(default_factory=list)  # all values of the parsed options, and of the composed settings
    written: list[str] = field(default_factory=list)  # files and folders of the world that are others than before


class Runner:
    """Runs lines in a child process: in the folder `world`, which stays as it is, or in the repository."""

    def __init__(self, world: Path | None = None) -> None:
        self._world = world

    def __enter__(self) -> Runner:
        if self._world is not None:
            self._world.mkdir(exist_ok=True)
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mistakes.runner", *(["world"] if self._world else [])],
            cwd=self._world or ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def __call__(self, words: Sequence[str], env: Mapping[str, str] | None = None) -> Outcome:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([list(words), dict(env or {})]) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))


class _NoTorch(MetaPathFinder, Loader):
    """Finds torch, since code may look whether it is there, and ends the command that imports it."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name) if name == "torch" else None
        if spec is not None:
            spec.loader = self
        return spec

    def exec_module(self, module: object) -> None:
        raise Accepted("torch")


def _begin_work(*_: object, **__: object) -> None:
    raise Accepted("a process")


def run(words: list[str], env: dict[str, str], *, in_world: bool = False) -> Outcome:
    from lmtrain.cli import main as command_line

    output, before, errors = io.StringIO(), dict(os.environ), list[Any]()
    print_error = command_line.print_error  # type: ignore

    def seen(error: Any, advice: str = "") -> None:
        errors.append(error)
        print_error(error, advice)

    command_line.print_error = seen  # type: ignore
    os.environ.update(env)
    code: object = 0
    is_accepted = asks_for_torch = False
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(10 * SECONDS)
    try:
        with redirect_stdout(output), redirect_stderr(output):
            if in_world and words[:1] and words[0] in PARSED_ONLY:
                _stub_callback(words[0])
            command_line.main(list(words))
        is_accepted = True
    except SystemExit as end:
        code = end.code or 0
        is_accepted = code == 0
    except Accepted as end:
        is_accepted, asks_for_torch = True, str(end) == "torch"
    except BaseException:
        output.write(traceback.format_exc())
        code = 1
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        command_line.print_error = print_error  # type: ignore
        os.environ.clear()
        os.environ.update(before)
    ways = [
        [(list(w.new), list(w.old), w.is_example or w.is_form) for w in each] for error in errors for each in error.ways
    ]
    values = _values(words) if is_accepted and in_world else []
    code = code if isinstance(code, int) else 1
    return Outcome(code, without_at_work_lines(output.getvalue()), is_accepted, asks_for_torch, ways, values)


def _stub_callback(verb: str) -> None:
    """Let a verb end where its words have been read."""
    from lmtrain.cli.subcommands import build_verb

    build_verb(verb).callback = _begin_work


def _values(words: Sequence[str]) -> list[str]:
    """Return every single value that the command has got: of its options, and of the settings that it composes."""
    from lmtrain.cli.settings_keys.parse_typed_line import command_of, parse_line

    command, verb = command_of(words)
    if command is None or "--help" in words:
        return list(words)
    params = command.make_context(" ".join(verb), list(words[len(verb) :])).params
    values = list(_leaves(params))
    if parse_line(words).verb == ("pretrain",) and "-m" not in words and "--multirun" not in words:
        import yaml

        from lmtrain.config.compose_run_settings import group_choices

        output = io.StringIO()
        try:
            with redirect_stdout(output), redirect_stderr(io.StringIO()):
                from lmtrain.cli.main import main

                main([*(word for word in words if word != "--json"), "--print-config"])
            # because: a group has the name of its choice in no setting
            groups = group_choices()
            values = [value for value in values if value.partition("=")[0] in groups or "=" not in value]
            values += _leaves(yaml.safe_load(output.getvalue()))
        except SystemExit:
            pass
    return values


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield str(value)


def _put_back(world: Path, copy: Path, before: Mapping[str, tuple[int, int]]) -> list[str]:
    """Make the folder what it was: remove new files, and take changed ones from the copy. Return the paths of both."""
    after = _state(world)
    new = sorted(after.keys() - before.keys(), reverse=True)
    for path in new:
        full = world / path
        full.rmdir() if full.is_dir() and not full.is_symlink() else full.unlink()
    changed = [path for path, state in before.items() if after.get(path) != state]
    for path in changed:
        if (copy / path).is_file():
            (world / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(copy / path, world / path)
    return [*new, *changed]


def _state(world: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for folder, folders, files in os.walk(world):
        for name in (*folders, *files):
            status = os.lstat(os.path.join(folder, name))
            key = os.path.relpath(os.path.join(folder, name), world)
            found[key] = (status.st_size, status.st_mtime_ns) if name in files else (0, 0)
    return found


def _late(*_: object) -> None:
    raise TimeoutError(f"not refused within {SECONDS} s")


def _serve(lines: TextIO, answers: TextIO) -> None:
    for line in lines:
        print(json.dumps(vars(run(*json.loads(line)))), flush=True, file=answers)


def _serve_in_world(lines: TextIO, answers: TextIO) -> None:
    subprocess.Popen.__init__ = BaseProcess.start = os.fork = _begin_work  # type: ignore
    world = Path.cwd()
    copy = world.with_name(f"{world.name}_copy_{os.getpid()}")
    shutil.copytree(world, copy)
    before = _state(world)
    for line in lines:
        outcome = run(*json.loads(line), in_world=True)
        written = _put_back(world, copy, before)
        print(json.dumps(vars(outcome) | {"written": written}), flush=True, file=answers)
    shutil.rmtree(copy)


if __name__ == "__main__":
    answers, sys.stdin, lines = sys.stdout, io.TextIOWrapper(io.BytesIO()), sys.stdin
    signal.signal(signal.SIGALRM, _late)
    signal.signal(signal.SIGPROF, _late)
    sys.meta_path.insert(0, _NoTorch())
    (_serve_in_world if sys.argv[1:] else _serve)(lines, answers)
