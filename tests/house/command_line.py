"""What each file of lmtrain/cli/ does: it parses what is typed, prints, draws pages and pictures, or completes words.

    python -m tests.house.command_line     the table in docs/explanation/where_things_live.md; a test keeps it current
"""

from __future__ import annotations

import tomllib
from typing import Any

from tests.house.conftest import ROOT, House, Module

CLI = "lmtrain.cli."
# by a module that only such files import, or by a part of lmtrain/cli/ that the file is in or imports
SIGNS = {
    "parse": ("typer", "click", "click.parser", f"{CLI}settings_keys.parse_typed_line"),
    "print": ("rich", f"{CLI}screen"),
    "draw": (f"{CLI}page", f"{CLI}report"),
    "complete": ("click.shell_completion", "lmtrain.start.complete_settings"),
}
# files whose text another file prints, or that parse words before any command has them
WITHOUT_A_SIGN = {
    f"{CLI}inspect.run_folder_view": "print", f"{CLI}runs.print_difference": "print",
    f"{CLI}settings_keys.parse_typed_line": "parse", f"{CLI}find_accepted_line": "parse",
    f"{CLI}plan.model_presets_page": "print", f"{CLI}reference": "print",
}  # fmt: skip


def below(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def work_of(house: Any, module: Module) -> list[str]:
    """Return what a file does, in the order of SIGNS."""
    names = [module.name, *(item.target for item in house.imports(module))]
    found = {work for work, signs in SIGNS.items() if any(below(name, sign) for name in names for sign in signs)}
    found |= {WITHOUT_A_SIGN[module.name]} if module.name in WITHOUT_A_SIGN else set()
    return [work for work in SIGNS if work in found]


def files(house: Any) -> dict[str, Module]:
    return {
        module.shown.removeprefix("lmtrain/cli/"): module for name, module in sorted(house.modules.items())
        if name.startswith(CLI) and not module.is_package
    }  # fmt: skip


def table(house: Any) -> str:
    rows = [f"| `{module.shown}` | {', '.join(work_of(house, module))} |" for shown, module in files(house).items()]
    return "\n".join(["| File | Work |", "|---|---|", *rows])


if __name__ == "__main__":
    print(table(House(ROOT, tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["lmtrain"])))
