"""What must start fast never asks for torch: all of it is imported in one process that refuses torch."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from tests.torch_free import import_without_torch, without_torch


def torch_free_modules(house: Any) -> dict[str, list[str]]:
    """What each entry of the table covers: a module, a package with all below it, or a pattern with `*`.

    Of a whole verb also what its functions import.
    """
    found = {
        entry: [
            name
            for name in house.modules
            if name == entry or name.startswith(f"{entry}.") or ("*" in entry and fnmatchcase(name, entry))
        ]
        for entry in house.rules["torch_free"]
    }
    for verb in house.rules["torch_free_verbs"]:
        module = house.modules.get(f"lmtrain.cli.{verb}")
        targets = [one.target for one in house.imports(module)] if module else []
        found[verb] = [target for target in targets if target in house.modules]
    return found


def test_every_entry_of_the_table_names_something(house: Any) -> None:
    empty = [entry for entry, names in torch_free_modules(house).items() if not names]
    assert not empty, f"[tool.lmtrain] torch_free names modules that do not exist: {', '.join(empty)}"


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
            "lmtrain/__init__.py": "",
            "lmtrain/errors.py": "from lmtrain.hidden import x\n",
            "lmtrain/hidden.py": "try:\n    import torch\nexcept ImportError:\n    torch = None\nx = 1\n",
            "lmtrain/units.py": "import json\n",
        }
    )
    answer = import_without_torch(tree.root, ["lmtrain.units", "lmtrain.errors"])
    assert list(answer["asked"]) == ["lmtrain.errors"]
    assert "hidden.py:2" in answer["asked"]["lmtrain.errors"]


def test_there_are_tests_without_torch() -> None:
    """`make test-torch-free` finds such tests in all folders; three show that it tells them from others."""
    found = {path.stem for path in without_torch(("unit/config", "unit/models/objectives", "unit/parallel/pipeline"))}
    assert {"test_compose", "test_origins"} <= found
    assert not {"test_masked_lm", "test_executor"} & found
