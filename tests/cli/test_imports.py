"""What a plain run and `--help` must not import: it costs every process CPU seconds, and a plain run uses none of it.

One process shows the help and then trains on a CPU, alone and without a compiler. What `import torch` itself imports is
left out. `python -X importtime -m lmtrain ...` shows what the rest costs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.cli.harness import ROOT, Toy, lmtrain

HELP = (
    "torch", "numpy", "hydra", "omegaconf", "yaml", "tokenizers", "asyncio", "http", "importlib.metadata",
    "multiprocessing", "unittest", "lmtrain.config", "lmtrain.placement", "lmtrain.plan", "lmtrain.train",
)  # fmt: skip
RUN = (
    # compilers, and what they bring
    "torch._dynamo", "torch._inductor", "torch.onnx", "torch.fx.experimental.symbolic_shapes", "sympy", "mpmath",
    "triton",
    # what only several processes use
    "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.algorithms", "lmtrain.parallel.sharding",
    # writers and readers of other formats
    "tensorboard", "torch.utils.tensorboard", "wandb", "transformers", "pandas", "pyarrow", "scipy", "networkx",
    # what only help and reports draw with
    "pygments", "markdown_it", "rich.markdown", "rich.syntax", "rich.traceback", "rich.progress",
    # verbs that are not called
    "lmtrain.cli.corpus", "lmtrain.cli.report", "lmtrain.cli.evaluate", "data_tools",
)  # fmt: skip

# prints {"help" | "run": {module: our line that is the first to import it}}
PROCESS = """
import json, os, sys, traceback

unwanted, settings = json.loads(sys.argv[1])
found, phase = {"help": {}, "run": {}}, "help"


class Finder:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in unwanted[phase]):
            frames = [frame for frame, _ in traceback.walk_stack(None)]
            inside = [frame.f_code.co_filename for frame in frames if frame.f_code.co_name == "<module>"]
            ours = [f"{f.f_code.co_filename}:{f.f_lineno}" for f in frames if "/lmtrain/" in f.f_code.co_filename]
            if not any(file.endswith("/torch/__init__.py") for file in inside):
                found[phase].setdefault(name, ours[0] if ours else "lmtrain")


class Late:
    def __del__(self, write=os.write):
        write(1, b"taken down")


late = Late()
sys.meta_path.insert(0, Finder())
from lmtrain.__main__ import main

for phase, sys.argv in ("help", ["lmtrain", "--help"]), ("run", ["lmtrain", "pretrain", *settings]):
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
    # because: whoever asks whether a package is there does not import it
    found[phase] = {name: place for name, place in found[phase].items() if name in sys.modules}
assert "torch" in sys.modules
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Imported:
    places: dict[str, dict[str, str]]
    output: str


@pytest.fixture(scope="session")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    folder = tmp_path_factory.mktemp("imports")
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 400)
    toy = Toy(text, folder / "tokenizer", folder / "toy")
    lmtrain("tokenizer", "train", text, "--output", toy.tokenizer, "--vocab-size", 300)
    lmtrain("preprocess", text, "--tokenizer", toy.tokenizer, "--output", toy.data, "--workers", 1)
    settings = toy.settings(folder / "run", train__steps=3, observe__tensorboard="true", compute__device="cpu")
    words = json.dumps([{"help": HELP, "run": RUN}, settings])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, words], capture_output=True, text=True, env=environment, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    return Imported(json.loads(line), done.stdout)


@pytest.mark.parametrize("phase", ["help", "run"])
def test_nothing_is_imported_that_is_not_used(imported: Imported, phase: str) -> None:
    found = imported.places[phase].items()
    problems = [f"{place} imports {name}. Import it where it is used." for name, place in found]
    assert not problems, "\n" + "\n".join(problems)


def test_a_process_that_has_torch_ends_at_once(imported: Imported) -> None:
    """Python would free every object of torch one by one, which takes a CPU second."""
    assert "taken down" not in imported.output
