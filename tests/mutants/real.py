"""Mistakes that were really made: commits that mend something, drawn by a seed and undone in the tree of today.

Where the whole change of the product still reverses on today's code, it is undone, and else one place of it whose text
stands there still. Each knows the tests that came with it.
"""

from __future__ import annotations

import ast
import random
import re
import subprocess
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from tests.mutants.mutant import ROOT
from tests.mutants.numbering import through_lines

PRODUCT = ("lmtrain/", "data_tools/", "csrc/", "conf/")
# because: messages here say what was wrong in such words, and a commit that changes many files mends no single fault
FAULT = re.compile(
    r"\b(wrong\w*|faults?|bugs?|fail\w*|crash\w*|h[au]ng\w*|lost|loses?|ignored|silent\w*|instead|no longer|never|"
    r"refuse[sd]?|traceback|mended|broken?|leak\w*|race|missing|stale|twice|had made|did not|was not|were not)\b",
    re.IGNORECASE,
)
MOST_FILES = 9
_HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


@dataclass(frozen=True)
class RealMistake:
    """A commit undone: what its files become, and the names of the tests that came with it."""

    commit: str
    message: str
    is_whole: bool  # the commit, or one place of it
    texts: dict[str, str]
    tests: list[str]  # names of functions; of a file whose tables alone changed, its name

    def through(self) -> dict[str, list[str]]:
        """Return the statements, by file and key, one of which a test must come by to notice it."""
        found: dict[str, list[str]] = {}
        for file, text in self.texts.items():
            now = (ROOT / file).read_text().splitlines()
            blocks = SequenceMatcher(None, now, text.splitlines(), autojunk=False).get_opcodes()
            changed = [range(first, max(last, first + 1)) for tag, first, last, *_ in blocks if tag != "equal"]
            for name, keys in through_lines(file, {line + 1 for lines in changed for line in lines}).items():
                found.setdefault(name, []).extend(keys)
        return found

    def is_own(self, test: str) -> bool:
        """Whether this test, by its name in pytest, came with the commit."""
        file, _, name = test.partition("::")
        return name.rpartition("::")[2].partition("[")[0] in self.tests or Path(file).name in self.tests


def draw_real(seed: str, count: int, folder: Path) -> tuple[list[RealMistake], int]:
    """Draw so many, and say how many commits that were drawn do not reverse any more.

    `folder` becomes a clone, in which they are undone.
    """
    if not folder.exists():
        _git(ROOT, "clone", "--quiet", "--shared", str(ROOT), str(folder))
    _git(folder, "fetch", "--quiet", "origin", "HEAD")
    _git(folder, "reset", "--quiet", "--hard", "FETCH_HEAD")
    lines = _git(ROOT, "log", "--no-merges", "--format=%H %s").splitlines()
    commits = [line.partition(" ")[::2] for line in lines]
    commits = [(commit, message) for commit, message in commits if FAULT.search(message)]
    chance = random.Random(seed)
    chance.shuffle(commits)
    found: list[RealMistake] = []
    lost = 0
    for commit, message in commits:
        if len(found) == count:
            break
        changed = _git(ROOT, "show", "--name-only", "--format=", commit).splitlines()
        code = [name for name in changed if name.startswith(PRODUCT) and name.endswith((".py", ".cpp", ".h", ".yaml"))]
        has_tests = any(name.startswith("tests/") and "/mutants/" not in name for name in changed)
        if not 0 < len(code) <= MOST_FILES or not has_tests:
            continue
        whole = _undone(folder, commit)
        texts = whole or _undone_at_one_place(commit, chance)
        tests = _tests_of(commit, changed)
        if texts and tests:
            found.append(RealMistake(commit, message, bool(whole), texts, tests))
        else:
            lost += 1
    return found, lost


def _undone(folder: Path, commit: str) -> dict[str, str]:
    """Return the files of the product with this commit undone; none where it conflicts with what came later."""
    try:
        _git(folder, "revert", "--no-commit", "-Xfind-renames=40%", commit, check=False)
        texts = {}
        for line in _git(folder, "status", "--porcelain", "--no-renames").splitlines():
            state, name = line[:2], line[3:]
            if not name.startswith(PRODUCT):
                continue
            if state.strip() != "M":  # a conflict, or a file that would come or go
                return {}
            texts[name] = (folder / name).read_text()
        if any(_is_no_python(name, text) for name, text in texts.items()):
            return {}
        return {name: text for name, text in texts.items() if not _is_same(name, text)}
    finally:
        _git(folder, "reset", "--quiet", "--hard", "HEAD")
        _git(folder, "clean", "--quiet", "-fd")


def _undone_at_one_place(commit: str, chance: random.Random) -> dict[str, str]:
    """Return a file with one place of this commit's as it was before; none where no place has kept its text."""
    diff = _git(ROOT, "show", "--unified=1", "--format=", commit, "--", *PRODUCT)
    places = [part.partition("\n")[2] for part in re.split(r"^@@ ", diff, flags=re.MULTILINE)[1:]]
    chance.shuffle(places)
    paths = [path for root in PRODUCT[:2] for path in (ROOT / root).rglob("*.py")]
    files = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    for place in places:
        lines = [line for line in place.partition("\ndiff --git")[0].splitlines() if line[:1] in " +-"]
        now = "\n".join(line[1:] for line in lines if line[0] != "-") + "\n"
        before = "\n".join(line[1:] for line in lines if line[0] != "+") + "\n"
        there = [file for file, text in files.items() if now.strip() and text.count(now) == 1]
        if len(there) == 1:
            text = files[there[0]].replace(now, before)
            if not _is_no_python(there[0], text) and not _is_same(there[0], text):
                return {there[0]: text}
    return {}


def _is_no_python(name: str, text: str) -> bool:
    try:
        ast.parse(text if name.endswith(".py") else "")
    except SyntaxError:
        return True
    return False


def _is_same(name: str, text: str) -> bool:
    """Whether only words for people differ: comments and docstrings."""
    if not name.endswith(".py"):
        return text == (ROOT / name).read_text()
    return _without_docstrings(text) == _without_docstrings((ROOT / name).read_text())


def _without_docstrings(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        block = getattr(node, "body", None)
        if isinstance(block, list):
            node.body = [  # type: ignore[attr-defined]
                each for each in block if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
            ] or [ast.Pass()]
    return ast.dump(tree)


def _tests_of(commit: str, changed: list[str]) -> list[str]:
    """Return the names of the test functions that the commit changed."""
    names: set[str] = set()
    for file in changed:
        if not (file.startswith("tests/") and Path(file).name.startswith("test_")):
            continue
        text = _git(ROOT, "show", f"{commit}:{file}", check=False)
        diff = _git(ROOT, "show", "--unified=0", "--format=", commit, "--", file)
        lines = {int(first) + k for first, count in _HUNK.findall(diff) for k in range(int(count or 1) or 1)}
        inside = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                begin = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                if lines & set(range(begin, (node.end_lineno or begin) + 1)):
                    inside.add(node.name)
        names |= inside or ({Path(file).name} if text else set())
    return sorted(names)


def _git(folder: Path, *words: str, check: bool = True) -> str:
    done = subprocess.run(["git", *words], cwd=folder, check=check, capture_output=True, text=True)
    return done.stdout
