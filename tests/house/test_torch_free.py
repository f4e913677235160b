"""What must start fast never asks for torch: every module is imported in one process that refuses it."""

from __future__ import annotations

import json
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

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


def torch_free_modules(house: Any) -> dict[str, list[str]]:
    """What each entry of the table covers: a module, a package with all below it, or a pattern with `*`."""
    return {
        entry: [
            name
            for name in house.modules
            if name == entry or name.startswith(f"{entry}.") or ("*" in entry and fnmatchcase(name, entry))
        ]
        for entry in house.rules["torch_free"]
    }


def import_without_torch(root: Path, names: list[str]) -> dict[str, dict[str, str]]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(names)]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    answer: dict[str, dict[str, str]] = json.loads(run.stdout)
    return answer


def test_every_entry_of_the_table_names_something(house: Any) -> None:
    empty = [entry for entry, names in torch_free_modules(house).items() if not names]
    assert not empty, f"[tool.lmtrain] torch_free names modules that do not exist: {', '.join(empty)}"


def test_settings_files_are_in_the_table(house: Any) -> None:
    covered = {name for names in torch_free_modules(house).values() for name in names}
    settings = {name for name in house.modules if name.endswith("_settings")}
    assert settings, "there are no settings files at all"
    assert settings <= covered, f"add to torch_free in pyproject.toml: {', '.join(sorted(settings - covered))}"


def test_torch_free_modules_never_ask_for_torch(house: Any) -> None:
    names = sorted({name for names in torch_free_modules(house).values() for name in names})
    answer = import_without_torch(house.root, names)
    said = [f"{name} asks for {what}. Move what needs torch to another file." for name, what in answer["asked"].items()]
    said += [
        f"{name} cannot be imported: {why}" for name, why in answer["failed"].items() if name not in answer["asked"]
    ]
    assert not said, "\n" + "\n".join(said)


def test_an_indirect_import_is_found(planted: Any) -> None:
    tree = planted(
        {
            "lmtrain/errors.py": "from lmtrain.hidden import x\n",
            "lmtrain/hidden.py": "try:\n    import torch\nexcept ImportError:\n    torch = None\nx = 1\n",
            "lmtrain/units.py": "import json\n",
        }
    )
    answer = import_without_torch(tree.root, ["lmtrain.units", "lmtrain.errors"])
    assert list(answer["asked"]) == ["lmtrain.errors"]
    assert "hidden.py:2" in answer["asked"]["lmtrain.errors"]
