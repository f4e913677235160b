"""`lmtrain config`: what there is to choose from, what a choice sets, where a value of a run comes from. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lmtrain.cli.keys.completion import complete_choice, complete_group, complete_key
from lmtrain.cli.options import ConfigDir, ConfigName, Json, Overrides, Plugins
from lmtrain.cli.screen.terminal import echo
from lmtrain.errors import UsageError, nearest

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
    from lmtrain.cli.keys.conf_files import config_file, default_choices
    from lmtrain.cli.settings.view import choice_row, model_row, print_choices, print_groups, print_models

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
    from lmtrain.cli.keys.conf_files import config_file, default_choices, part_of_root, text_of
    from lmtrain.cli.settings.view import print_file

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
    from lmtrain.cli.settings.view import print_key, print_values

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
