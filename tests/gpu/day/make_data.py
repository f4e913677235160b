"""The day's data, made on the spot: `python -m tests.gpu.day.make_data FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.benchmarks.workloads import make_data

if __name__ == "__main__":
    make_data(Path(sys.argv[1]))
