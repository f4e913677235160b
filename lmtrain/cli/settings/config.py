"""`lmtrain config`: what there is to choose from, what a choice sets, where a value of a run comes from. Torch-free."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from lmtrain.cli.keys.completion import complete_choice, complete_group, complete_key
from lmtrain.cli.keys.settings_reference import headline
from lmtrain.cli.options import ConfigDir, ConfigName, Json, Overrides, Plugins
from lmtrain.cli.screen.console import Screen
from lmtrain.cli.screen.terminal import echo
from lmtrain.config.base import show as as_typed
from lmtrain.errors import UsageError, nearest
from lmtrain.units import format_count

app = typer.Typer(no_args_is_help=True)


@app.command("list")
def list_choices(
    group: Annotated[
        str | None,
        typer.Argument(metavar="GROUP", help="As in model, optim or schedule.", autocompletion=complete_group),
    ] = None,
    config_dir: ConfigDir = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """List the groups and their choices; of one group, what each choice is: of `model`, its size."""
    from lmtrain.cli.keys.settings_reference import config_file, default_choices

    groups, default = _groups(config_dir), default_choices()
    if group is None:
        facts = [{"group": name, "default": default.get(name), "choices": found} for name, found in groups.items()]
        return echo(json.dumps(facts, indent=1)) if as_json else print_groups(facts)
    _check_group(group, groups)
    rows = [
        {"choice": name, "default": name == default.get(group)} | choice_row(file)
        for name in groups[group]
        if (file := config_file(group, name, config_dir))
    ]
    if group == "model":
        rows = [row | model_row(str(row["choice"]), Path(str(row["file"])), config_dir) for row in rows]
    if as_json:
        return echo(json.dumps(rows, indent=1))
    return print_models(rows) if group == "model" else print_choices(group, rows)


@app.command()
def show(
    group: Annotated[
        str, typer.Argument(metavar="GROUP", help="As in model, or a part as train.", autocompletion=complete_group)
    ],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="One of its choices. [default: what a run has]", autocompletion=complete_choice
        ),
    ] = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Print what a choice sets, as the YAML file that it is, and where it lies."""
    from lmtrain.cli.keys.settings_reference import config_file, default_choices, part_of_root, text_of

    groups = _groups(config_dir)
    part = part_of_root(group) if name is None and group not in groups else None
    if part is not None:
        file, text = part
    else:
        _check_group(group, groups)
        name = name or default_choices().get(group, "")
        found = config_file(group, name, config_dir)
        if found is None:
            said = f"{group} has no choice {name}" if name else f"A run has no {group} unless one is chosen"
            raise UsageError(f"{said}. {nearest(name, groups[group])}")
        file, text = found, text_of(found)
    if as_json:
        return echo(json.dumps({"file": str(file), "yaml": text}, indent=1))
    return print_file(file, text)


@app.command()
def explain(
    key: Annotated[
        str,
        typer.Argument(metavar="KEY", help="As in optim.lr; or a part as optim, or all.", autocompletion=complete_key),
    ],
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "pretrain",
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Say what a setting is: its type and meaning, which choices set it, its value in a run and who has set it.

    Of a part, such as `optim`, the value of each of its keys, and the line or the override that has set it.
    """
    from lmtrain.cli.keys.settings_reference import known_keys
    from lmtrain.cli.settings.explain import Composed, key_facts, value_rows

    known = known_keys()
    parts = {name[:cut] for name in known for cut, letter in enumerate(name) if letter == "."} | {"all"}
    if key not in known and key not in parts:
        raise UsageError(f"{key} is not a setting. {_nearest_key(key, [*known, *parts])}")
    composed = Composed.of(list(overrides or []), config_dir, config_name)
    if key in known:
        bare = Composed.of([], config_dir, config_name) if overrides else composed
        facts = key_facts(known[key], composed, bare, config_dir)
        return echo(json.dumps(facts, indent=1)) if as_json else print_key(facts)
    rows = value_rows("" if key == "all" else f"{key}.", known, composed)
    return echo(json.dumps(rows, indent=1)) if as_json else print_values(rows)


def _groups(config_dir: Path | None) -> dict[str, list[str]]:
    from lmtrain.config.compose import group_choices

    return group_choices(config_dir)


def _check_group(group: str, groups: dict[str, list[str]]) -> None:
    if group not in groups:
        raise UsageError(f"{group} is not a group of settings. {nearest(group, groups)}")


def _nearest_key(key: str, known: list[str]) -> str:
    """`lr` means optim.lr before it means something that is spelt like it."""
    same = sorted(name for name in known if name.endswith(f".{key.rpartition('.')[2]}"))
    return f"Did you mean {' or '.join(same)}?" if same else nearest(key, known)


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
    cells = [(row["key"], as_typed(row["value"]), row["from"] or "nobody") for row in rows]
    _print_table(("key", "value", "from"), cells)


def _value(facts: dict[str, Any]) -> str:
    return f"{as_typed(facts['value'])}, from {facts['from']}" if facts["from"] else facts["why"]


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
