"""A reader who walks down from `lmtrain pretrain` to `optimizer.step()` reads few files, and little of each."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

# each step: the file, and the functions on the path; what follows the last of them need not be read
STAIRCASE = {
    "lmtrain/cli/pretrain/pretrain_command.py": ("pretrain", "_train"),
    "lmtrain/train/set_up_run.py": ("open_run",),
    "lmtrain/parallel/build_parallel_model.py": ("build_parallel",),
    "lmtrain/train/loop.py": ("train",),
    "lmtrain/train/step.py": ("train_step",),
    "lmtrain/parallel/parallel_model.py": ("forward_backward", "finish_gradients"),
}
MOST_LINES_ON_THE_PATH = 600
MOST_FILES = 6
FROM_COMMAND_TO_STEP = ("pretrain", "_train", "train")
MOST_CONTEXTS = 6  # that these open: what goes on around the work is read in one place, and not between its lines


def last_line(tree: ast.Module, functions: tuple[str, ...]) -> int:
    """Of the lowest of these functions; all of them must be there."""
    ends = {node.name: node.end_lineno or 0 for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return max(ends[name] for name in functions)


def test_the_staircase_is_short(house: Any) -> None:
    modules = {module.shown: module for module in house.modules.values()}
    read = {path: last_line(modules[path].tree, functions) for path, functions in STAIRCASE.items()}
    assert len(STAIRCASE) <= MOST_FILES
    assert sum(read.values()) <= MOST_LINES_ON_THE_PATH, read


def num_contexts(tree: ast.Module, functions: tuple[str, ...]) -> int:
    """Context managers that the `with` statements of these functions enter, one within another or side by side."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in functions]
    return sum(len(node.items) for function in found for node in ast.walk(function) if isinstance(node, ast.With))


def test_the_way_down_is_not_wrapped_in_bookkeeping(house: Any) -> None:
    trees = {module.shown: module.tree for module in house.modules.values() if module.shown in STAIRCASE}
    opened = {path: num_contexts(tree, FROM_COMMAND_TO_STEP) for path, tree in trees.items()}
    assert 0 < sum(opened.values()) <= MOST_CONTEXTS, opened


def test_contexts_are_counted_wherever_they_stand() -> None:
    text = "def a():\n    with b, c as d:\n        with e:\n            pass\n\n\ndef f():\n    with g:\n        pass\n"
    assert num_contexts(ast.parse(text), ("a",)) == 3


def test_each_step_leads_to_the_next(house: Any) -> None:
    """No callback and no registry stands between: each file is imported by one that was read before it."""
    modules = {module.shown: module for module in house.modules.values()}
    named = {path: {item.target for item in house.imports(modules[path])} for path in STAIRCASE}
    paths = list(STAIRCASE)
    for number, path in enumerate(paths[1:], 1):
        before = set().union(*(named[one] for one in paths[:number]))
        assert modules[path].name in before, f"no step before {path} imports it"


def test_the_last_line_is_the_lowest_function(tmp_path: Path) -> None:
    tree = ast.parse("def a():\n    pass\n\n\ndef b():\n    x = 1\n    return x\n\n\ndef c():\n    pass\n")
    assert last_line(tree, ("b", "a")) == 7
