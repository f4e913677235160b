"""What `lmtrain config` prints: tables of choices and of models, and what there is to say of a setting. Torch-free."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lmtrain.cli.keys.conf_files import headline
from lmtrain.cli.screen.console import Screen
from lmtrain.config.base import show
from lmtrain.units import format_count

_LEAST_COMMENT = 30  # columns


def choice_row(file: Path) -> dict[str, Any]:
    return {"about": headline(file), "file": str(file)}


def model_row(name: str, file: Path, config_dir: Path | None) -> dict[str, Any]:
    """The sizes of a model; parameters without the embedding where the tokenizer decides how large that is."""
    from lmtrain.config.build import build_settings
    from lmtrain.config.compose import compose_plain
    from lmtrain.config.yaml_file import read_yaml
    from lmtrain.models.model_settings import ModelSettings

    tree: Any = read_yaml(file).data
    if "defaults" in tree or "${" in str(tree):  # because: composing costs more than all the rest
        tree = compose_plain([f"model={name}"], config_dir=config_dir)["model"]
    model = build_settings(ModelSettings, tree, "model")  # type: ignore[type-abstract]
    shape = model.shape
    return {
        "kind": model.kind, "parameters": model.num_parameters, "vocab_size": shape.vocab_size or None,
        "num_layers": shape.num_layers, "width": shape.width, "num_heads": shape.num_heads, "seq_len": shape.seq_len,
    }  # fmt: skip


def print_file(file: Path, text: str) -> None:
    """As it is; on a terminal a long comment goes on below itself, in YAML that says the same."""
    console = Screen(highlight=False)
    lines = [f"# {file}", *text.splitlines()]
    if console.file.isatty():
        lines = [part for line in lines for part in _commented(line, console.width)]
    console.print(Text("\n".join(lines)), soft_wrap=True)


def _commented(line: str, width: int) -> list[str]:
    before, mark, words = line.partition("# ")
    if len(line) <= width or not mark or width - len(before) < _LEAST_COMMENT:
        return [line]
    first, *more = textwrap.wrap(words, width - len(before) - 2, break_long_words=False, break_on_hyphens=False)
    return [f"{before}# {first}", *(f"{' ' * len(before)}# {part}" for part in more)]


def print_groups(rows: Sequence[dict[str, Any]]) -> None:
    _print_table(
        ("group", "default", "choices"),
        [(row["group"], row["default"] or "", ", ".join(row["choices"])) for row in rows],
    )
    _say("`lmtrain config list GROUP` says what each is, `lmtrain config show GROUP NAME` prints one.")


def print_choices(group: str, rows: Sequence[dict[str, Any]]) -> None:
    _print_table(("choice", "what it is"), [(_name(group, row), row["about"]) for row in rows])
    _say("* what a run has where nothing else is chosen")


def print_models(rows: Sequence[dict[str, Any]]) -> None:
    rows = sorted(rows, key=lambda row: (row["kind"], row["parameters"]))
    _print_table(
        ("choice", "kind", ">parameters", ">layers", ">width", ">heads", ">seq_len"),
        [
            (_name("model", row), row["kind"], f"{format_count(row['parameters'])}{'' if row['vocab_size'] else '+'}",
             *(str(row[key]) for key in ("num_layers", "width", "num_heads", "seq_len")))
            for row in rows
        ],
    )  # fmt: skip
    _say("* what a run has where nothing else is chosen\n+ and the embedding of the tokenizer's vocabulary")


def print_key(facts: dict[str, Any]) -> None:
    console, table = Screen(highlight=False), Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    section, names = facts["key"].partition(".")[0], facts["kinds"]
    either = " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    kinds = f", where {section}.kind is {either}" if names else ""
    rows = [("meaning", facts["meaning"]), ("type", f"{facts['type']}{kinds}")]
    for title, key in (("default", "default"), ("this run", "run")):
        if key in facts:
            rows.append((title, _value(facts[key])))
    for number, one in enumerate(facts["set_by"]):
        rows.append(("" if number else "set by", f"{one['choice']}: {one['value']}"))
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(Text(facts["key"], style="bold"))
    console.print(table)


def print_values(rows: Sequence[dict[str, Any]]) -> None:
    _print_table(("key", "value", "from"), [(row["key"], show(row["value"]), row["from"] or "nobody") for row in rows])


def _value(facts: dict[str, Any]) -> str:
    return f"{show(facts['value'])}, from {facts['from']}" if facts["from"] else facts["why"]


def _name(group: str, row: dict[str, Any]) -> str:
    return f"{group}={row['choice']}{' *' if row['default'] else ''}"


def _print_table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
    """A column whose title begins with > holds numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in columns:
        table.add_column(title.lstrip(">"), justify="right" if title.startswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Screen(highlight=False).print(table)


def _say(text: str) -> None:
    Screen(highlight=False).print(Text(text, style="dim"))
