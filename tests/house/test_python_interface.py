"""`import lmtrain` is quick and offers what it says: the Python interface, each name imported at its first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import Any

import lmtrain
from tests.torch_free import import_without_torch


def definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    """The statements at the top of lmtrain/__init__.py by the name that they set."""
    return {ast.unparse(node.targets[0]): node for node in tree.body if isinstance(node, ast.Assign)}


def test_it_holds_the_interface_and_nothing_else(house: Any) -> None:
    tree = house.modules["lmtrain"].tree
    _docstring, *rest = tree.body
    *assigned, names = rest
    assert set(definitions(tree)) == {"__version__", "__all__", "TYPE_CHECKING"}
    assert len(assigned) == 3
    assert isinstance(names, ast.If)
    assert ast.unparse(names.test) == "TYPE_CHECKING"
    assert all(isinstance(node, ast.ImportFrom) for node in names.body)
    kinds = [node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node.targets[0]) for node in names.orelse]  # type: ignore[attr-defined]
    assert kinds == ["_MODULES", "__getattr__", "__dir__"]


def test_the_three_lists_of_names_agree(house: Any) -> None:
    names = house.modules["lmtrain"].tree.body[-1]
    typed = {
        alias.name: node.module for node in names.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert typed == lmtrain._MODULES  # type: ignore[attr-defined]
    assert sorted(typed) == lmtrain.__all__ == sorted(lmtrain.__all__)
    assert dir(lmtrain) == sorted([*lmtrain.__all__, "__version__"])
    for name, module in typed.items():
        body = house.modules[module].tree.body
        assert name in {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_an_import_brings_nothing_along(house: Any) -> None:
    code = "import sys; before = set(sys.modules); import lmtrain; print(sorted(set(sys.modules) - before))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=house.root, check=True)
    assert ran.stdout.strip() == "['lmtrain']"
    assert import_without_torch(house.root, ["lmtrain"]) == {"asked": {}, "failed": {}}


def test_all_names_but_the_models_come_without_torch(house: Any) -> None:
    names = [name for name, module in lmtrain._MODULES.items() if module != "lmtrain.api.load_model"]  # type: ignore[attr-defined]
    code = (
        "import gc, sys, lmtrain; gc.disable(); lmtrain.LmtrainError; print(gc.isenabled()); gc.enable(); "
        f"[getattr(lmtrain, name) for name in {names}]; print(gc.isenabled(), 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=house.root, check=True)
    assert ran.stdout.split() == ["False", "True", "False"], "the garbage collector, left as it was found; torch"
