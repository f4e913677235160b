"""Every file of lmtrain/cli/ parses, prints, draws or completes, and the table of them is today's."""

from __future__ import annotations

from typing import Any

from tests.house.command_line import files, table, work_of
from tests.house.conftest import ROOT


def test_each_file_of_the_command_line_has_work_of_the_command_line(house: Any) -> None:
    idle = [shown for shown, module in files(house).items() if not work_of(house, module)]
    assert not idle, f"{idle}: what only computes stands below lmtrain/cli/, as in lmtrain/start/"


def test_the_table_is_todays(house: Any) -> None:
    page = (ROOT / "docs/explanation/where_things_live.md").read_text(encoding="utf-8")
    assert table(house) in page, "put what `python -m tests.house.command_line` prints into where_things_live.md"


def test_a_file_that_computes_alone_is_found(planted: Any) -> None:
    tree = planted({
        "lmtrain/__init__.py": "", "lmtrain/cli/__init__.py": "",
        "lmtrain/cli/mean.py": "from statistics import mean\n", "lmtrain/cli/sum_command.py": "import typer\n",
    })  # fmt: skip
    assert {shown: work_of(tree, module) for shown, module in files(tree).items()} == {
        "mean.py": [], "sum_command.py": ["parse"],
    }  # fmt: skip
