"""A copy of the checkout with an environment of its own, in which a mistake is planted and tests are run.

The environment has the packages of this one, but finds `lmtrain`, `data_tools` and `tests` in the copy, from whatever
folder and by whatever child a test starts Python: see hook.py, which each of its processes runs first. A copy outlives
the run that made it and is brought up to date at the next.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.mutants import hook, plugin
from tests.mutants.mutant import ROOT

# because: a machine that is busy with something else is slow as well
SLOWER, SLOWER_S = 10, 20
QUICK_FLAGS = "-std=c++17 -O1 -g0 -fPIC -fvisibility=hidden"
NATIVE = f"lmtrain/_native{sysconfig.get_config_var('EXT_SUFFIX')}"


class NotOurCopyError(Exception):
    """A test imported something else than the copy, so its word on the mistake is worth nothing."""


@dataclass(frozen=True)
class Ran:
    """Result of one run of tests in a copy."""

    failed: list[str]  # tests, and "TEST (stopped after N s)" for one that did not end
    durations: dict[str, float]  # of each test that ran, with what was set up for it
    seconds: float
    loaded: int  # processes that loaded the file with the mistake
    words: str  # the last that pytest said


class Copy:
    def __init__(self, folder: Path) -> None:
        self.folder, self.tree, self.notes = folder, folder / "tree", folder / "notes"
        self.site = folder / "venv" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        self.python = folder / "venv" / "bin" / "python"

    def refresh(self) -> None:
        """Bring tree and environment to the state of the checkout, what git does not know yet included."""
        _end_descendants()
        if not (self.tree / ".git").is_dir():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(self.tree)], check=True)
        subprocess.run(["git", "fetch", "--quiet", "origin", "HEAD"], cwd=self.tree, check=True)
        subprocess.run(["git", "reset", "--quiet", "--hard", "FETCH_HEAD"], cwd=self.tree, check=True)
        subprocess.run(["git", "clean", "--quiet", "-fd"], cwd=self.tree, check=True)
        changed = _git("diff", "--name-only", "HEAD") + _git("ls-files", "--others", "--exclude-standard")
        for name in changed:
            source, target = ROOT / name, self.tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_file():
                shutil.copy2(source, target)
            else:
                target.unlink(missing_ok=True)
        if (ROOT / NATIVE).is_file():
            shutil.copy2(ROOT / NATIVE, self.tree / NATIVE)
        if (shared := ROOT.parent / "shared").is_dir() and not (self.folder / "shared").exists():
            (self.folder / "shared").symlink_to(shared.resolve())
        self._make_environment()

    def _make_environment(self) -> None:
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.folder / "venv")], check=True)
        base = Path(sys.executable).parent
        for program in base.iterdir():
            if not (target := self.python.parent / program.name).exists() and program.name != "lmtrain":
                target.symlink_to(program)
        command = self.python.parent / "lmtrain"
        command.write_text(f"#!{self.python}\nimport sys\nfrom lmtrain.__main__ import main\nsys.exit(main())\n")
        command.chmod(0o755)
        shutil.copy(hook.__file__, self.site / "_lmtrain_copy.py")
        packages = sysconfig.get_path("purelib")
        (self.site / "copy.pth").write_text(f"{self.tree}\n{packages}\nimport _lmtrain_copy\n")
        self.tell()

    def tell(self, planted: Iterable[str] = (), size: int = 0, **recording: Any) -> None:
        """Say to the copy's processes which files bear a mistake, or what to record with so many flags."""
        shutil.rmtree(self.notes, ignore_errors=True)
        self.notes.mkdir()
        if size:
            (self.notes / "flags").write_bytes(bytes(size))
        originals = [f"{ROOT / name}/" for name in ("lmtrain", "data_tools", "tests")]
        told = {"tree": str(self.tree.resolve()), "originals": originals, "firsts": {}, "files": {}}
        told |= {"planted": [str((self.tree / file).resolve()) for file in planted], **recording}
        told |= {name: str(self.notes / name) for name in ("loaded", "strangers", "flags")}
        partial = self.site / "told.part"
        partial.write_text(json.dumps(told))
        partial.replace(self.site / "told.json")

    @contextmanager
    def planted(self, texts: Mapping[str, str]) -> Iterator[None]:
        """Hold these texts in the copy's files, compiled where they are C++, with no bytecode of the files left behind.
        """
        paths = {self.tree / file: text for file, text in texts.items()}
        before = {path: (path.read_text(), path.stat()) for path in paths}
        try:
            for path, text in paths.items():
                path.write_text(text)
                self._forget_bytecode(path)
            for path in paths:
                self._compile(path)
            self.tell(texts)
            yield
        finally:
            for path, (text, stat) in before.items():
                path.write_text(text)
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
                self._forget_bytecode(path)
                if path.suffix in (".cpp", ".h"):
                    shutil.copy2(ROOT / NATIVE, self.tree / NATIVE)
                    # because: the file is older again than what was compiled from it with its mistake
                    pattern = f"{path.stem if path.suffix == '.cpp' else '*'}.o"
                    for stale in (self.tree / "build" / "native").glob(pattern):
                        stale.unlink()
            self.tell()

    def _forget_bytecode(self, path: Path) -> None:
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()

    def _compile(self, path: Path) -> None:
        if path.suffix not in (".cpp", ".h"):
            return
        began_ns = path.stat().st_mtime_ns
        # because: a mistake is as wrong without the optimizer, which takes most of the time
        command = ["make", "native", f"VENV={Path(sys.executable).parents[1]}", f"NATIVE_FLAGS={QUICK_FLAGS}"]
        subprocess.run(command, cwd=self.tree, check=True, capture_output=True)
        pattern = f"{path.stem if path.suffix == '.cpp' else '*'}.o"
        if not any(made.stat().st_mtime_ns > began_ns for made in (self.tree / "build" / "native").glob(pattern)):
            raise NotOurCopyError(f"{path} with its mistake was not compiled.")

    def run(
        self, tests: Iterable[str], *words: str, limit_s: float, usual_s: Mapping[str, float] | None = None
    ) -> Ran:
        """Run these tests, or files or folders of tests, with pytest's `words` as well, and end what they leave.

        A test that takes far longer than its `usual_s` is stopped, and counts as failed.
        """
        tests = list(tests)
        asked = self.folder / "asked.txt"
        asked.write_text("\n".join(tests) + "\n")
        temporary = self.folder / "tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)  # because: it remembers what failed before
        for name in ("loaded", "strangers", "tests.jsonl"):
            (self.notes / name).unlink(missing_ok=True)
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "CI")}
        environment |= {
            "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), plugin.NOTES: str(self.notes), "VIRTUAL_ENV": "",
            "PATH": f"{self.python.parent}{os.pathsep}{environment['PATH']}",
        }  # fmt: skip
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [*_apart(), str(self.python), "-m", "pytest", "-q", "-p", "tests.mutants.plugin"]
        command += ["-p", "no:cacheprovider"]
        command += ["--tb=line", "--durations=0", *words, f"@{asked}"]
        began = time.monotonic()
        with (self.folder / "said.txt").open("w") as said:
            process = subprocess.Popen(command, cwd=self.tree, env=environment, stdout=said, stderr=said)
            code: int | None = None
            try:
                while code is None and time.monotonic() - began < limit_s and not self._is_overdue(usual_s or {}):
                    with suppress(subprocess.TimeoutExpired):
                        code = process.wait(2)
            finally:
                process.kill()
                process.wait()
                _end_descendants()
        seconds = time.monotonic() - began
        told = plugin.read(self.notes)
        answer = (self.folder / "said.txt").read_text(errors="replace")
        last = "\n".join(answer.splitlines()[-30:])
        gone = set(re.findall(r"^ERROR: not found: .*?/tree/(.*)$", answer, re.MULTILINE)) if code == 4 else set()
        if there := [test for test in tests if test not in gone and gone]:  # the record is older than the tests
            return self.run(there, *words, limit_s=limit_s, usual_s=usual_s)
        if (strangers := self.notes / "strangers").exists():
            raise NotOurCopyError(f"A test imported {strangers.read_text().splitlines()[0]} instead of the copy.")
        failed = list(told.failed)
        if code is None or code < 0:
            failed.append(f"{told.running or 'pytest'} (stopped after {seconds:.0f} s)")
        elif code not in (0, 1, 5) and not failed:  # 2 to 4: it could not even collect them
            failed.append(f"collection ({code})")
        loaded = self.notes / "loaded"
        return Ran(
            failed, told.durations, seconds, len(loaded.read_text().splitlines()) if loaded.exists() else 0, last
        )

    def _is_overdue(self, usual_s: Mapping[str, float]) -> bool:
        told = plugin.read(self.notes) if usual_s else plugin.Told()
        allowed_s = SLOWER_S + SLOWER * usual_s.get(told.running, float("inf"))
        return bool(told.running) and time.time() - told.since > allowed_s


@cache
def _apart() -> list[str]:
    """Return the words before a command that keep what it ends to its own processes; none where that is not allowed."""
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", '"$@"; exit $?', "sh"]
    is_possible = shutil.which("unshare") and subprocess.run([*words, "true"], capture_output=True).returncode == 0
    return words if is_possible else []


def adopt_orphans() -> None:
    """Make the orphans among this process's descendants its children, so that none outlives the run that began it.

    Where its own parent is ended, or asks it to end, this process still cleans up first.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if sys.platform == "linux":
        system = ctypes.CDLL(None)
        system.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        system.prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG


def _end_descendants() -> None:
    """End all processes that come from this one, round by round, as an orphan is adopted when its parent has gone."""
    for _ in range(100):
        children = _children(os.getpid())
        if not children:
            return
        for child in children:
            for process in [child, *_below(child)]:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)


def _below(pid: int) -> list[int]:
    return [found for child in _children(pid) for found in (child, *_below(child))]


def _children(pid: int) -> list[int]:
    try:
        names = [f"/proc/{pid}/task/{task}/children" for task in os.listdir(f"/proc/{pid}/task")]
        return [int(word) for name in names for word in Path(name).read_text().split()]
    except OSError:
        return []


def _git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
