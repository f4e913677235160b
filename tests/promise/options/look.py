"""What can be seen of a command: its exit code, what it prints, the files that it leaves, the pools that it starts.

Times, rates, process numbers and the folder's own name are taken out of all of it: they differ in any case.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lmtrain.config.settings_base import plugins
from tests.cli.harness import ROOT, outcome, start
from tests.promise.options.small_world import PLUGIN, World


@dataclass(frozen=True)
class Line:
    """A command line, and what is run before it."""

    words: tuple[str, ...]
    before: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    has_own_process: bool = False  # of commands that start processes


@dataclass(frozen=True)
class Seen:
    code: object
    text: str
    files: Mapping[str, str]
    pools: tuple[int, ...]  # how many workers each pool of threads or processes may have


class Looker:
    """Runs commands, each in a folder of its own, with copies of what it names of the world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.kept: dict[Line, Seen] = {}

    def see(self, line: Line) -> Seen:
        """Return what is seen of a command line, which is run only once."""
        if line not in self.kept:
            self.kept[line] = self.look(line)
        return self.kept[line]

    def look(self, line: Line) -> Seen:
        place = self.world.folder.parent / "look"  # because: some files hold hashes of paths
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        self.world.bring(" ".join([*line.before, *line.words]), place)
        with _standing_in(place):
            for earlier in line.before:
                code, text = outcome(*shlex.split(earlier))
                assert code == 0, text
            run = _own_process if line.has_own_process else outcome
            with _counted_pools() as pools:
                # because: what is started from here is to be this tree's
                code, text = run(*line.words, env={"PYTHONPATH": str(ROOT), **dict(line.env)})
            files = {str(path.relative_to(place)): path for path in sorted(place.rglob("*")) if path.is_file()}
            return Seen(code, normalized(text, place), {n: _content(p, place) for n, p in files.items()}, tuple(pools))


def _own_process(*words: str, env: Mapping[str, str]) -> tuple[object, str]:
    process = start(*words, env=env, fresh=True)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


@contextmanager
def _standing_in(place: Path) -> Iterator[None]:
    before, path = Path.cwd(), list(sys.path)
    os.chdir(place)
    sys.path.insert(0, str(place))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        sys.modules.pop(PLUGIN, None)
        plugins.pop(PLUGIN, None)


@contextmanager
def _counted_pools() -> Iterator[list[int]]:
    found: list[int] = []
    with ExitStack() as stack:
        for pool in (concurrent.futures.ThreadPoolExecutor, concurrent.futures.ProcessPoolExecutor):
            stack.enter_context(patch.object(pool, "__init__", _counting(pool.__init__, found)))
        yield found


def _counting(init: Any, found: list[int]) -> Any:
    def counted(pool: Any, max_workers: int | None = None, *rest: Any, **more: Any) -> None:
        found.append(max_workers or 0)
        init(pool, max_workers, *rest, **more)

    return counted


_CHANGING = (
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?([+-]\d\d:\d\d|Z)?", "DATE"),
    (r'("[\w/]*(?:seconds|_s|_at|time|date|pid|tokens_per_s|mfu|tflops|memory|rss|peak)\w*"): *'
     r'(?:-?[\d.e+-]+|"[^"]*"|null)', r"\1: N"),
    (r"\b(?:[\d.]+[dhms])+ ago", "AGO"),  # before TIME, which takes "59.9s" and leaves "1m00s"
    (r"\b\d[\d.,]*(e-?\d+)?[kMG]? ?(?:s|ms|us|µs|min|h|seconds?|tokens/s|(?:[kMG]i?)?B/s)\b", "TIME"),
    (r"\b[\d.]+ ?[kMGT]? ?(?:FLOP|tok)/s|\bmem [\d.]+ [kMG]iB", "RATE"),
    (r" +", " "), (r" (?=\n)", ""),  # columns are as wide as the numbers in them
    (r'"(key|made_from)": "[0-9a-f]{64}"', "KEY"),  # of the steps of a corpus: a hash of times too
    (r"\bpid \d+|(?<=seconds ) *[\d.]+", "N"),
)  # fmt: skip


def normalized(text: str, place: Path) -> str:
    text = text.replace(str(place.resolve()), "HERE").replace(str(place), "HERE")
    for pattern, word in _CHANGING:
        text = re.sub(pattern, word, text)
    return text


def _content(path: Path, place: Path) -> str:
    data = path.read_bytes()
    try:
        return normalized(data.decode(), place)
    except UnicodeDecodeError:
        return hashlib.sha256(data).hexdigest()
