"""One file that a bare machine with torch needs: the tree and the wheels. `python -m tests.gpu.day.archive FILE`.

Called by `make gpu-day-archive`, which has pip fetch the wheels; `--needs` prints of what. The tree is what git knows.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

from tests.gpu.day.carried import WHEELS
from tests.gpu.day.parts import ROOT

MOST_BYTES = 60 << 20
INSIDE = Path("gpu_day")


TESTS_NEED = ("pytest", "hypothesis")  # of the optional packages


def needs() -> list[str]:
    """What lmtrain and tests/gpu need besides torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tests = [one for one in project["optional-dependencies"]["test"] if one.startswith(TESTS_NEED)]
    return [one for one in [*project["dependencies"], *tests] if not one.startswith(("torch", "pytest-"))]


def write(file: Path, wheels: Path = WHEELS) -> int:
    """Its bytes."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    names = [name for name in listed.decode().split("\0") if name and (ROOT / name).exists()]
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as tar:
        for name in names:
            tar.add(ROOT / name, str(INSIDE / name))
        for wheel in sorted(wheels.glob("*.whl")):
            tar.add(wheel, str(INSIDE / WHEELS.relative_to(ROOT) / wheel.name))
    size = file.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{file} has {size:,} bytes, more than {MOST_BYTES:,}.")
    return size


if __name__ == "__main__":
    if sys.argv[1:] == ["--needs"]:
        print(*needs())
    else:
        print(f"{write(Path(sys.argv[1])):,} bytes in {sys.argv[1]}")
