"""What an error says to type is held as words to type: no message spells a concrete setting or option as its advice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

# advice with a value: `Use parallel.tp=2`, `Add --nproc 2`; a place in capitals, as in `Give --output DIR`, is none
ADVICE = re.compile(
    r"\b(?:Use|Write|Set|Add|Type|type|Did you mean) "
    r"(?:[a-z_]+\.[a-z_.]+=(?![A-Z])\S|--[a-z][\w-]*(?:[ .,=]|$)(?![A-Z]))"
)
TABLES = ("option_synonyms.py",)  # of other tools' names


def spelt_advice(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the words of advice in the texts of a module, docstrings and commands in backticks left out."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    ignored: set[int] = set()
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr):
            ignored.add(id(node.body[0].value))
        if isinstance(node, ast.JoinedStr):
            ignored.update(map(id, node.values))
    for node in nodes:
        text = _text(node) if id(node) not in ignored else ""
        if len(text) > 8 and (found := ADVICE.search(re.sub(r"`[^`]*`", "", text))):
            yield getattr(node, "lineno", 0), found[0]


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_advice_is_held_as_words_to_type(house: Any) -> None:
    found = [
        f"{module.shown}:{line} spells {words!r}. Mark it: way(...), own(...) or fill_in(...) of lmtrain/errors.py."
        for module in house.modules.values() if not module.shown.endswith(TABLES)
        for line, words in spelt_advice(module.tree)
    ]  # fmt: skip
    assert not found, "\n".join(found)


def test_spelt_advice_is_found() -> None:
    texts = (
        'f"parallel.tp={n} is wrong. Use parallel.tp={m}."', '"Use {own(2)}, or add `lmtrain env --json`."',
        'f"There are fewer. Add --nproc {n}."', '"Give --output DIR."',
    )  # fmt: skip
    found = [words for text in texts for _, words in spelt_advice(ast.parse(f"x = {text}"))]
    assert found == ["Use parallel.tp={", "Add --nproc "]
