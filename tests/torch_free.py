"""Imports modules in a process that refuses torch; run by itself, prints the test files that need none.

`make test-torch-free` runs those where torch is not installed. Must not import torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# because: tests of the command line import torch where a verb begins, not at their top
FOLDERS = ("unit", "house")
SCRIPT = """
import importlib, json, sys, traceback

asked = {}

class NoTorch:
    current = ""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "torchvision", "torchaudio"):
            frames = [f for f in traceback.extract_stack() if "/lmtrain/" in f.filename or "/data_tools/" in f.filename]
            via = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "another package"
            asked.setdefault(self.current, f"{name} by {via}")
            raise ModuleNotFoundError("torch is refused here", name=name)
        return None

blocker = NoTorch()
sys.meta_path.insert(0, blocker)
failed = {}
for blocker.current in json.loads(sys.argv[1]):
    try:
        importlib.import_module(blocker.current)
    except Exception as error:
        failed[blocker.current] = f"{type(error).__name__}: {error}"
json.dump({"asked": asked, "failed": failed}, sys.stdout)
"""


def import_without_torch(root: Path, names: list[str]) -> dict[str, dict[str, str]]:
    """Of each module that cannot be imported or asks for torch, why and where."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(names)]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    answer: dict[str, dict[str, str]] = json.loads(run.stdout)
    return answer


def without_torch(folders: Sequence[str] = FOLDERS) -> list[Path]:
    """Every test file that neither asks for torch nor has a conftest beside or above it that does."""
    files = [path for folder in folders for path in sorted((ROOT / "tests" / folder).rglob("*.py"))]
    files = [path for path in files if path.name.startswith("test_") or path.name == "conftest.py"]
    answer = import_without_torch(ROOT, list(map(_module, files)))
    bad = [path for path in files if _module(path) in answer["asked"] or _module(path) in answer["failed"]]
    closed = {path.parent for path in bad if path.name == "conftest.py"}
    return [
        path
        for path in files
        if path.name != "conftest.py" and path not in bad and not closed.intersection(path.parents)
    ]


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


if __name__ == "__main__":
    for found in without_torch():
        print(found.relative_to(ROOT))
