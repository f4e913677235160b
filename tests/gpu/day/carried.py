"""Packages that a bare machine lacks, from the wheels that the archive carries. Python's own library alone."""

from __future__ import annotations

import re
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

WHEELS = Path(__file__).resolve().parents[3] / "build/gpu_day_wheels"


def unpack(out: Path, wheels: Path = WHEELS) -> str:
    """The folder in which those lie that are not installed here; empty where none is missing."""
    missing = [wheel for wheel in sorted(wheels.glob("*.whl")) if not is_installed(name_of(wheel))]
    folder = out / "packages"
    for wheel in missing:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folder)
    return str(folder) if missing else ""


def name_of(wheel: Path) -> str:
    return re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()


def is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
