"""Private names of torch can go with any release: the files that use some are listed here, each with its reason."""

from __future__ import annotations

import ast
from typing import Any

MANY = "torch's public optimizers are made of _foreach_*: one kernel over many tensors, which has no public name"
ALLOWED = {
    "lmtrain/kernels/vector_norms.py": MANY,
    "lmtrain/optim/lamb.py": MANY,
    "lmtrain/optim/adam_update_direction.py": MANY,
    "lmtrain/optim/muon.py": MANY,
    "lmtrain/parallel/weights/reduce_and_clip_gradients.py": MANY,
    "lmtrain/parallel/weights/master_weights.py": MANY,
    "lmtrain/parallel/initialize_and_save_shards.py": MANY,
    "lmtrain/train/exponential_weight_average.py": MANY,
    "lmtrain/parallel/blocks/recompute_and_compile.py": "operators of attention, which recompute keeps by their names",
    "lmtrain/observe/hang_watch/start_companion_and_raise_verdict.py":
        "the flight recorder's rows of this process, which have no public name",
    "lmtrain/parallel/weights/fsdp_sharding.py": "FSDP has no public call for the end of a backward that no hook saw",
}


def private_names(house: Any) -> dict[str, set[str]]:
    """Of each file that imports torch: names with an underscore that the house does not define itself."""
    own, result = house_names(house), {}
    for module in house.modules.values():
        if not any(item.target.split(".")[0] == "torch" for item in house.imports(module)):
            continue
        names: set[str] = set()
        for node in module.nodes:
            match node:
                case ast.Attribute(attr=name):
                    names.add(name)
                case ast.ImportFrom(module=str(home), names=aliases) if home.split(".")[0] == "torch":
                    names |= {*home.split("."), *(alias.name for alias in aliases)}
                case ast.Import(names=aliases):
                    paths = [alias.name.split(".") for alias in aliases]
                    names |= {part for path in paths if path[0] == "torch" for part in path}
        private = {name for name in names - own if name.startswith("_") and not name.startswith("__")}
        if private:
            result[module.shown] = private
    return result


def house_names(house: Any) -> set[str]:
    own: set[str] = set()
    for module in house.modules.values():
        for node in module.nodes:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    own.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
    return own


def private_problems(house: Any, allowed: dict[str, str]) -> list[str]:
    found = private_names(house)
    return [
        f"{shown} uses {', '.join(sorted(names))}, private to torch. Use a public name, or list it with the reason."
        for shown, names in found.items()
        if shown not in allowed
    ] + [f"{shown} uses nothing private to torch. Take it out of the list." for shown in allowed.keys() - found.keys()]


def test_private_names_of_torch_stand_in_listed_files_only(house: Any) -> None:
    problems = private_problems(house, ALLOWED)
    assert not problems, "\n" + "\n".join(problems)


def test_planted_uses_are_named(planted: Any) -> None:
    tree = planted(
        {
            "lmtrain/data/a.py": "import torch\ntorch._foreach_add_([], 1)\n",
            "lmtrain/data/b.py": "from torch._dynamo import config\n",
            "lmtrain/data/c.py": "import torch\n\n\nclass A:\n    _own = 1\n\n\nA()._own\n",
            "lmtrain/data/d.py": "import json\njson._default_decoder\n",
        }
    )
    problems = private_problems(tree, {"lmtrain/data/c.py": "none"})
    assert [problem.split()[0] for problem in problems] == [f"lmtrain/data/{name}.py" for name in "abc"]
