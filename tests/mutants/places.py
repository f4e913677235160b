"""Find the statement that a mutant changes: a test that never reaches it cannot notice the mistake."""

from __future__ import annotations

import ast

from tests.mutants.mutant import ROOT, Mutant


def statement(mutant: Mutant) -> tuple[int, int] | None:
    """Return line and column of the statement in which the old text begins; None if it runs as the module is imported.

    For the head of a function, its defaults and decorators it is the first statement of the function.
    """
    text = (ROOT / mutant.file).read_text()
    begin = mutant.begin(text)
    first = text.count("\n", 0, begin + len(mutant.old) - len(mutant.old.lstrip())) + 1
    last = text.count("\n", 0, begin + len(mutant.old.rstrip())) + 1
    block: list[ast.stmt] = ast.parse(text).body
    inside = False  # of a function
    while True:
        here = _covering(block, first, last)
        if here is None:
            return None
        deeper = None
        for field in ("body", "orelse", "finalbody"):
            below = getattr(here, field, None)
            if isinstance(below, list) and below and below[0].lineno <= first and last <= (below[-1].end_lineno or 0):
                deeper = below
        for handler in [*getattr(here, "handlers", []), *getattr(here, "cases", [])]:
            if handler.body[0].lineno <= first and last <= (handler.body[-1].end_lineno or 0):
                deeper = handler.body
        is_function = isinstance(here, ast.FunctionDef | ast.AsyncFunctionDef)
        if deeper is None:
            if is_function and not inside:
                return _place(_after_docstring(here.body))  # type: ignore[attr-defined]
            return _place(here) if inside else None
        inside = inside or is_function
        block = deeper


def _covering(block: list[ast.stmt], first: int, last: int) -> ast.stmt | None:
    for child in block:
        begin = min([child.lineno, *(d.lineno for d in getattr(child, "decorator_list", []))])
        if begin <= last and first <= (child.end_lineno or begin):
            return child
    return next((child for child in block if child.lineno >= first), None)


def _after_docstring(body: list[ast.stmt]) -> ast.stmt:
    is_docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return body[1] if is_docstring and len(body) > 1 else body[0]


def _place(node: ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset
