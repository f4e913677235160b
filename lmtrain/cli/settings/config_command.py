"""`lmtrain config`: list groups and choices, show what a choice sets, explain where a value comes from. Torch-free."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from lmtrain.cli.screen.print_facts_and_tables import PlainConsole, print_pairs, print_table
from lmtrain.cli.screen.print_messages_and_json import echo, print_json
from lmtrain.cli.settings_keys.shell_completion import complete_choice, complete_group, complete_key
from lmtrain.cli.shared_options import ConfigDir, ConfigName, FromRun, Json, Overrides, Plugins
from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.compose_run_settings import STAGE_GROUP, compose_plain, config_file, group_choices
from lmtrain.config.ideas_without_counterpart import idea_of
from lmtrain.config.settings_base import show as as_typed
from lmtrain.config.strict_yaml import read_yaml
from lmtrain.errors import UsageError, leave_out, spelling_hint, way
from lmtrain.start.explain.describe_all_settings import (
    all_keys,
    config_headline,
    default_choices,
    read_config_text,
    root_section,
)
from lmtrain.train.run_stage_settings import GROUPS
from lmtrain.units import format_count

app = typer.Typer(no_args_is_help=True)
_MIN_COMMENT_WIDTH = 30  # columns
_DEFAULT_NOTE = "* the choice of a run that names no other"


@app.command("list")
def list_choices(
    group: Annotated[
        str | None,
        typer.Argument(metavar="GROUP", help="A group, such as model or optim.", autocompletion=complete_group),
    ] = None,
    config_dir: ConfigDir = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """List the groups of settings and their choices; with GROUP, describe each choice of that group."""
    groups, default = group_choices(config_dir), default_choices()
    if group is None:
        facts = [{"group": name, "default": default.get(name), "choices": choices} for name, choices in groups.items()]
        return print_json(facts) if as_json else print_groups(facts)
    _check_group(group, groups)
    rows = [
        {"choice": name, "default": name == default.get(group), "about": config_headline(file), "file": str(file)}
        for name in groups[group]
        if (file := config_file(group, name, config_dir))
    ]
    if group == "model":
        rows = [row | model_row(str(row["choice"]), Path(str(row["file"])), config_dir) for row in rows]
    if as_json:
        return print_json(rows)
    return print_models(rows) if group == "model" else print_choices(group, rows)


@app.command()
def show(
    group: Annotated[
        str, typer.Argument(metavar="GROUP", help="A group (model) or section (train).", autocompletion=complete_group)
    ],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="A choice of the group. [default: that of a run]", autocompletion=complete_choice
        ),
    ] = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Print the YAML file of a choice, or of a section of the root config, and its path."""
    groups = group_choices(config_dir)
    file_and_text = root_section(group) if name is None and group not in groups else None
    if file_and_text is None:
        _check_group(group, groups)
        name = name or default_choices().get(group, "")
        file = config_file(group, name, config_dir)
        if file is None:
            hint = spelling_hint(name, groups[group], lambda known: way(known, instead_of=name))
            raise UsageError(f"The group {group} has no choice {name or 'by default'}. {hint}")
        file_and_text = file, read_config_text(file)
    if as_json:
        return print_json({"file": str(file_and_text[0]), "yaml": file_and_text[1]})
    return print_file(*file_and_text)


@app.command()
def explain(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY", help="A key (optim.lr), a section or group (optim), or all.", autocompletion=complete_key
        ),
    ],
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "pretrain",
    from_run: FromRun = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Show its values in this run, each with its first step.")
    ] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Explain a setting: its type and meaning, the choices that set it, its value in a run, and the file or override
    that set that value.

    For a section, such as `optim`, print the value and the meaning of each of its keys, the line or the override that
    has set it, and the choices of the section.
    """
    from lmtrain.start.explain.explain_setting import (
        ComposedSettings,
        held_by_stage,
        history_rows,
        key_facts,
        split_stage_key,
        stage_key_facts,
        value_rows,
    )
    from lmtrain.start.settings_from_earlier_run import RunRequest

    changes = [*(overrides or ()), *["--from-run"] * (from_run is not None)]
    if run is not None and changes:
        raise UsageError(
            f"--run={run} shows the values of an earlier run, which {changes[0]} cannot change. "
            f"{leave_out(*changes, shown=f'Leave {changes[0]} out')}, or {leave_out('--run', shown='--run')}."
        )
    keys = all_keys()
    parts = {name[:end] for name in keys for end, character in enumerate(name) if character == "."} | {"all"}
    in_stage, groups = split_stage_key(key), group_choices(config_dir)
    if key in groups and key not in parts:
        return list_choices(key, config_dir, plugin, as_json)
    if in_stage is None and key not in keys and key not in parts and not key.startswith("stages."):
        same_last_part = sorted(name for name in keys if name.endswith(f".{key.rpartition('.')[2]}"))
        # because: `lr` is more likely to mean optim.lr than a key with a similar spelling
        ways = [way(name, instead_of=key) for name in same_last_part]
        hint = f"Did you mean {' or '.join(ways)}?" if ways else (
            spelling_hint(key, [*keys, *parts], lambda known: way(known, instead_of=key))
        )  # fmt: skip
        if hint.startswith("Known"):  # because: these are more than two hundred
            hint = idea_of(key) or "`lmtrain config explain all` lists the settings."
        raise UsageError(f"{key} is not a setting. {hint}")
    composed = ComposedSettings.compose(RunRequest(overrides or [], config_dir, config_name, from_run))
    if key in keys or (in_stage is not None and in_stage[1] not in GROUPS):
        defaults = ComposedSettings.compose(RunRequest([], config_dir, config_name)) if changes else composed
        settings = composed, defaults, config_dir
        facts = stage_key_facts(in_stage, keys, *settings) if in_stage is not None else key_facts(keys[key], *settings)
        if run is not None:
            facts.pop("stage", None)  # because: it is the value in the settings of this command
            facts["held"] = held_by_stage(key, run) or history_rows(key, run)
        return print_json(facts) if as_json else print_key(facts)
    if run is None:
        rows = value_rows("" if key == "all" else f"{key}.", keys, composed)
    else:
        by_stage = held_by_stage(key, run)
        in_stages = {row["key"] for row in by_stage}
        rows = [*(row for row in history_rows(key, run) if row["key"] not in in_stages), *by_stage]
    choices = groups.get(STAGE_GROUP if key == "stages" else key, []) if run is None else []
    if not rows and not choices:
        raise UsageError(
            f"{key} is not set by any stage. Give the settings of a run with stages, as in stages.NAME.steps=N, or "
            "its folder with --run."
        )
    if as_json:
        return print_json(rows)
    if run is None and key != "all":
        if not rows:
            echo(f"{key}  {as_typed(composed.lookup([key]))}", bold=True)
        return print_section(key, rows, choices)
    return print_table([
        {"<key": row["key"], "<value": as_typed(row["value"]), "<from": row["from"] or "nobody"} for row in rows
    ])  # fmt: skip


def print_section(name: str, rows: Sequence[dict[str, Any]], choices: Sequence[str]) -> None:
    """Print the keys of a section of settings, each with its value, origin and meaning, then the section's `choices`.
    Each row is a dict as from `value_rows`.
    """
    console = PlainConsole(highlight=False)
    for row in rows:
        value = _describe_value(row) if row["from"] else f"no value: {row['why']}"
        console.print(Text.assemble((row["key"], "bold"), f"  {value}"))
        if row["meaning"]:
            console.print(Padding(Text(row["meaning"], style="dim"), (0, 0, 0, 4), expand=False))
    if choices:
        label, default = ("stages.NAME" if name == "stages" else name), default_choices().get(name)
        words = ", ".join(f"{label}={choice}{' *' if choice == default else ''}" for choice in choices)
        note = f"; {_DEFAULT_NOTE}" if default in choices else ""
        console.print(Text.assemble(("choices", "bold"), f"  {words}{note}"))


def _check_group(group: str, groups: dict[str, list[str]]) -> None:
    """Raise if there is no such group."""
    if group not in groups:
        hint = spelling_hint(group, groups, lambda known: way(known, instead_of=group))
        raise UsageError(f"{group} is not a group of settings. {hint}")


def model_row(name: str, file: Path, config_dir: Path | None) -> dict[str, Any]:
    """Return the sizes of the model config `name` in `file` as a dict: parameters, layers, width, heads, sequence
    length. If the config leaves the vocabulary size to the tokenizer, vocab_size is None and the parameters are without
    the embedding.
    """
    from lmtrain.models.model_settings import ModelSettings

    tree: Any = read_yaml(file).data
    if "defaults" in tree or "${" in str(tree):  # because: composing is slow, and other files do not need it
        tree = compose_plain([f"model={name}"], config_dir=config_dir)["model"]
    model = build_settings(ModelSettings, tree, "model")  # type: ignore[type-abstract]
    shape = model.shape
    return {
        "kind": model.kind, "parameters": model.num_parameters, "vocab_size": shape.vocab_size or None,
        "num_layers": shape.num_layers, "width": shape.width, "num_heads": shape.num_heads, "seq_len": shape.seq_len,
    }  # fmt: skip


def print_file(file: Path, text: str) -> None:
    """Print the path of a config file as a comment, then its content, `text`. Long comments are wrapped on a terminal;
    the YAML is unchanged.
    """
    console = PlainConsole(highlight=False)
    lines = [f"# {file}", *text.splitlines()]
    if console.file.isatty():
        lines = [part for line in lines for part in _wrap_comment(line, console.width)]
    console.print(Text("\n".join(lines)), soft_wrap=True)


def _wrap_comment(line: str, width: int) -> list[str]:
    """Split one line of a YAML file into lines of at most `width` columns, by wrapping the comment at its end;
    continued lines of the comment are indented to the comment's start.
    """
    before, mark, words = line.partition("# ")
    if len(line) <= width or not mark or width - len(before) < _MIN_COMMENT_WIDTH:
        return [line]
    first, *more = textwrap.wrap(words, width - len(before) - 2, break_long_words=False, break_on_hyphens=False)
    return [f"{before}# {first}", *(f"{' ' * len(before)}# {part}" for part in more)]


def print_groups(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of config groups. Each row is a dict with `group` (its name), `default` (the choice that runs use,
    or None) and `choices` (all names).
    """
    print_table([
        {"<group": row["group"], "<default": row["default"] or "", "<choices": ", ".join(row["choices"])}
        for row in rows
    ])  # fmt: skip
    echo("`lmtrain config list GROUP` says what each is, `lmtrain config show GROUP NAME` prints one.", dim=True)


def print_choices(group: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of the choices of a config group with a description of each. Each row is a dict with the choice's
    name, `about` (the description) and `default` (True if runs use it by default).
    """
    print_table([{"<choice": _choice_label(group, row), "<what it is": row["about"]} for row in rows])
    if any(row["default"] for row in rows):
        echo(_DEFAULT_NOTE, dim=True)


def print_models(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of model configs with their sizes, sorted by kind and number of parameters. Each row has the
    entries of `model_row`, and the choice's name, `about` and `default`.
    """
    sizes = {"layers": "num_layers", "width": "width", "heads": "num_heads", "length": "seq_len"}
    print_table([
        {"<choice": _choice_label("model", row)}
        | {"size": f"{format_count(row['parameters'])}{'' if row['vocab_size'] else '+'}"}
        | {title: str(row[key]) for title, key in sizes.items()}
        | {"<from": row["about"].rpartition("(")[2].partition(")")[0] if "(" in row["about"] else ""}
        for row in sorted(rows, key=lambda row: (row["kind"], row["parameters"]))
    ])  # fmt: skip
    echo(f"{_DEFAULT_NOTE}\n+ the embedding of the tokenizer's vocabulary is not counted", dim=True)


def print_key(facts: dict[str, Any]) -> None:
    """Print the description of one setting on stdout. `facts` is the dict of `key_facts` or `stage_key_facts`."""
    is_in_stage = facts["key"].startswith("stages.")
    section, names = facts["key"].split(".")[2 if is_in_stage else 0], facts["kinds"]
    either = " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    kinds = f", where {section}.kind is {either}" if names else ""
    echo(facts["key"], bold=True)
    print_pairs([
        ("meaning", facts["meaning"]),
        *([("in a stage", facts["in_stage"])] if "in_stage" in facts else []),
        ("type", f"{facts['type']}{kinds}"),
        *(
            (title, _describe_value(facts[key]))
            for title, key in (("default", "default"), ("this run", "run"), ("this stage", "stage"))
            if key in facts
        ),
        *(
            ("" if number else "held", f"{as_typed(item['value'])}, {item['from']}")
            for number, item in enumerate(facts.get("held", ()))
        ),
        *(("" if number else "presets", line) for number, line in enumerate(_lines_of_presets(facts["set_by"]))),
    ])  # fmt: skip


def _lines_of_presets(set_by: Sequence[dict[str, str]]) -> list[str]:
    """Return text lines "VALUE: GROUP=CHOICE, ...": one for each value that config files give to a setting, with the
    choices that set it. `set_by` is the list that `key_facts` has under that key.
    """
    choices: dict[str, list[str]] = {}
    for item in set_by:
        choices.setdefault(item["value"], []).append(item["choice"])
    return [f"{value}: {', '.join(names)}" for value, names in choices.items()]


def _describe_value(facts: dict[str, Any]) -> str:
    """Return a value and its origin, or why there is no value."""
    return f"{as_typed(facts['value'])}, from {facts['from']}" if facts["from"] else facts["why"]


def _choice_label(group: str, row: dict[str, Any]) -> str:
    """Return "GROUP=CHOICE", with a star if it is the default."""
    return f"{group}={row['choice']}{' *' if row['default'] else ''}"
