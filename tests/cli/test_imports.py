"""What a plain run and `--help` must not import: it costs every process CPU seconds, and a plain run uses none of it.

One process shows the help, and another one trains on a CPU, alone and without a compiler. What `import torch` itself
imports is left out. `python -X importtime -m lmtrain ...` shows what the rest costs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.harness import ROOT, Toy

HELP = (
    "torch", "numpy", "hydra", "omegaconf", "yaml", "tokenizers", "asyncio", "http", "importlib.metadata",
    "multiprocessing", "unittest", "lmtrain.config", "lmtrain.placement", "lmtrain.plan", "lmtrain.train",
)  # fmt: skip
RUN = (
    # compilers, and what they bring
    "torch._dynamo", "torch._inductor", "torch.onnx", "torch.fx.experimental.symbolic_shapes", "sympy", "mpmath",
    "triton",
    # what only several processes use
    "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.algorithms",
    "lmtrain.parallel.weights.fsdp_sharding",
    # writers and readers of other formats
    "tensorboard", "torch.utils.tensorboard", "wandb", "transformers", "pandas", "pyarrow", "scipy", "networkx",
    # what only help and reports draw with
    "pygments", "markdown_it", "rich.markdown", "rich.syntax", "rich.traceback", "rich.progress",
    # verbs that are not called
    "lmtrain.cli.data.corpus_command", "lmtrain.cli.report.report_command", "lmtrain.cli.eval.evaluate_command",
    "data_tools",
)  # fmt: skip

# prints {module: our line that is the first to import it}
PROCESS = """
import json, os, sys, traceback

unwanted, words = json.loads(sys.argv[1])
found = {}


class Finder:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in unwanted):
            frames = [frame for frame, _ in traceback.walk_stack(None)]
            inside = [frame.f_code.co_filename for frame in frames if frame.f_code.co_name == "<module>"]
            ours = [f"{f.f_code.co_filename}:{f.f_lineno}" for f in frames if "/lmtrain/" in f.f_code.co_filename]
            if not any(file.endswith("/torch/__init__.py") for file in inside):
                found.setdefault(name, ours[0] if ours else "lmtrain")


class Late:
    def __del__(self, write=os.write):
        write(1, b"taken down")


late = Late()
sys.meta_path.insert(0, Finder())
from lmtrain.__main__ import main

sys.argv = ["lmtrain", *words]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
assert ("torch" in sys.modules) is (words != ["--help"])
# because: whoever asks whether a package is there does not import it
print(json.dumps({name: place for name, place in found.items() if name in sys.modules}))
"""


def imported(folder: Path, unwanted: tuple[str, ...], *words: str) -> tuple[dict[str, str], str]:
    """Return which unwanted modules `lmtrain WORDS` imports, with the place of each import, and the output."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, json.dumps([unwanted, words])], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))), done.stdout


def problems(found: dict[str, str]) -> str:
    return "\n".join(f"{place} imports {name}. Import it where it is used." for name, place in found.items())


def test_help_imports_nothing_that_it_does_not_use(tmp_path: Path) -> None:
    found, _ = imported(tmp_path, HELP, "--help")
    assert not found, problems(found)


@pytest.mark.wide
def test_a_run_imports_nothing_that_it_does_not_use_and_ends_at_once(toy: Toy, tmp_path: Path) -> None:
    """Python would free every object of torch one by one, which takes a CPU second."""
    settings = toy.settings(tmp_path / "run", train__steps=3, observe__tensorboard="true", compute__device="cpu")
    found, said = imported(tmp_path, RUN, "pretrain", *settings)
    assert not found, problems(found)
    assert "taken down" not in said
