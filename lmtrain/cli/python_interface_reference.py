"""The reference page of the Python interface, made from the source files of lmtrain/api. Called by reference.

The files are parsed, not imported: the command line stands below the interface, and a page needs no torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lmtrain

_INTRODUCTION = """# Python interface

These are all names of `import lmtrain`, which stay as they are. [Use from Python](../how_to/use_from_python.md) shows
them at work. Paths are texts or `pathlib.Path`s. What cannot be used raises an `LmtrainError`, whose text is the
message that a command would print.
"""


def python_page() -> str:
    """Return a Markdown page with the signature and docstring of every name that `import lmtrain` offers."""
    root, parts = Path(lmtrain.__file__).parent, [_INTRODUCTION]
    modules: dict[str, str] = lmtrain._MODULES  # type: ignore[attr-defined]
    for name, module in sorted(modules.items(), key=lambda item: item[0].lower()):
        if not module.startswith("lmtrain.api."):
            continue  # because: the errors have a page of their own
        tree = ast.parse((root / "api" / f"{module.rpartition('.')[2]}.py").read_text(encoding="utf-8"))
        definition = next(node for node in tree.body if getattr(node, "name", None) == name)
        if isinstance(definition, ast.FunctionDef):
            parts += _function_section(f"lmtrain.{name}", definition, "##")
        elif isinstance(definition, ast.ClassDef):
            parts += [f"## lmtrain.{name}\n", f"{_description(definition)}\n", *_member_sections(definition)]
    return "\n".join(parts)


def _member_sections(definition: ast.ClassDef) -> Iterator[str]:
    """Yield the sections of a class's properties and methods, those without a docstring or with a leading underscore
    left out, but for those that `len()` and `[]` call.
    """
    for node in definition.body:
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
            continue
        is_property = any(ast.unparse(each).endswith("property") for each in node.decorator_list)
        if node.name in ("__len__", "__getitem__"):
            call = f"len({definition.name.lower()})" if node.name == "__len__" else f"{definition.name.lower()}[...]"
            yield from (f"### {call}\n", f"{_description(node)}\n")
        elif is_property and not node.name.startswith("_"):
            type_ = ast.unparse(node.returns) if node.returns else ""
            yield from (f"### {definition.name}.{node.name}\n", f"`{type_}`. {_description(node)}\n")
        elif not node.name.startswith("_"):
            yield from _function_section(f"{definition.name}.{node.name}", node, "###")


def _function_section(title: str, node: ast.FunctionDef, marks: str) -> Iterator[str]:
    """Yield a heading, the signature with a parameter a line if it is long, and the docstring."""
    arguments = node.args
    if arguments.args and arguments.args[0].arg == "self":
        del arguments.args[0]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    signature = f"{title}({ast.unparse(arguments)}){returns}"
    if len(signature) > 110:
        # because: a default or a type may hold commas too
        parts = ast.unparse(arguments).split(", ")
        lines = [parts[0]]
        for part in parts[1:]:
            if lines[-1].count("[") == lines[-1].count("]"):
                lines.append(part)
            else:
                lines[-1] += f", {part}"
        signature = f"{title}(\n" + "".join(f"    {line},\n" for line in lines) + f"){returns}"
    yield f"{marks} {title}\n"
    yield f"```python\n{signature}\n```\n"
    yield f"{_description(node)}\n"


def _description(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return a docstring with each paragraph on one line."""
    return "\n\n".join(" ".join(part.split()) for part in (ast.get_docstring(node) or "").split("\n\n"))
