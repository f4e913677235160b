"""What `lmtrain.load` costs beside `import torch` and reading the same weights with safetensors, in fresh processes.

    python -m tests.benchmarks.load_model --demo runs/demo --pairs 11

The folder is that of `lmtrain demo`: its run is loaded, and the weights of its export (the same numbers) are read. The
order changes from pair to pair. Wall and CPU seconds are those of a process from its start until the model is there.
The time in which Python frees torch's objects at the end is not counted, since a notebook goes on.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path

from tests.benchmarks.start_up import ROOT, Cost, cost

END = "import os; os._exit(0)"
YARDSTICK = "import torch; from safetensors.torch import load_file; x = load_file({weights!r}); " + END
LOAD = "import lmtrain; x = lmtrain.load({run!r}); " + END


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, required=True, help="the folder that `lmtrain demo` has written")
    parser.add_argument("--pairs", type=int, default=11)
    asked = parser.parse_args()
    demo = asked.demo.resolve()
    programs = {
        "torch and safetensors": YARDSTICK.format(weights=str(demo / "hf" / "model.safetensors")),
        "lmtrain.load": LOAD.format(run=str(demo / "run")),
    }
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    seen: dict[str, list[Cost]] = {name: [] for name in programs}
    for pair in range(asked.pairs + 1):  # the first fills caches and is not counted
        for name in sorted(programs, reverse=pair % 2 == 1):
            found = cost(ROOT, ["-c", programs[name]])
            if pair:
                seen[name].append(found)
    for name, costs in seen.items():
        cpu, wall = (statistics.median(getattr(one, key) for one in costs) for key in ("cpu_s", "wall_s"))
        print(f"{name:22}: {wall:.2f} s, {cpu:.2f} CPU s (medians of {asked.pairs})")
    before, now = seen.values()
    for key in ("wall_s", "cpu_s"):
        ratios = [getattr(b, key) / getattr(a, key) for a, b in zip(before, now, strict=True)]
        print(f"ratio of {key}: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
