"""The tests on a real Slurm of two nodes, called as a drill; where there is none they say so."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from tests.drills.broken import ROOT, Options


def drill(options: Options) -> dict[str, Any]:
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*slurm*.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *files],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    skipped = [line for line in lines if line.startswith("SKIPPED")]
    return {"passed": done.returncode == 0, "files": files, "said": lines[-1] if lines else "", "skipped": skipped}
