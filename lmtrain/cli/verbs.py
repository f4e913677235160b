"""The verbs of the command line: a line of help for each, and the file that is imported when a verb is used.

Called by main. To import and build all of them takes twice as long as to show `lmtrain --help`, which needs the lines
alone. A verb that is a function says the same in the first paragraph of its docstring (tests/cli/test_help.py). A new
verb is a line in each of the two tables.

`--help` names what an option takes in plain words, and not in Python's. Metavars that a verb gives stay; typer's own,
such as `<int range>` or `<bool>`, are replaced for all verbs at once.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

_WORDS = {Path: "PATH", int: "N", float: "NUMBER"}
# in the order of use, which is that of `lmtrain --help`
HELP = {
    "corpus": "Make a clean corpus: fetch, clean, deduplicate, decontaminate, split.",
    "tokenizer": "Train a tokenizer, or look at one.",
    "preprocess": "Tokenize text into a dataset for training.",
    "data": "Look at datasets, check, join, divide and index them.",
    "config": "See which settings there are, and where those of a run come from.",
    "pretrain": "Pretrain a model, or go on with a run that was stopped: the same command does both.",
    "slurm": "Run under Slurm: write the sbatch file of a run, or submit it.",
    "inspect": "Show what is in a dataset, a run or a checkpoint; or what differs between two checkpoints.",
    "trace": "Show where the time of a run's steps went, from what observe.trace or `touch RUN/TRACE` recorded.",
    "report": "Write a page with everything that runs have recorded: curves, saves, faults, layout, settings, "
        "evaluations.",
    "runs": "See the runs of a folder, compare two, draw some in the terminal.",
    "eval": "Measure a checkpoint on a published protocol or on any text.",
    "generate": "Let a checkpoint write on from a prompt. The same seed gives the same text.",
    "reshard": "Write a checkpoint for another layout: weights, optimizer and all else that a run goes on from.",
    "plan": "Find the layouts that a model may have on so many GPUs, and say what each takes: time, memory, "
        "energy, money.",
    "watch": "Watch a run from another terminal, over a slow line too: its panel, or a line for each step that is "
        "logged.",
    "verify": "Check a checkpoint: hashes, shapes, that pieces fill their tensors, tied weights.",
    "env": "Print versions, processor, devices and compiled helpers, for a bug report. No secrets are read.",
    "demo": "Corpus, tokenizer, dataset, a small GPT on CPU for a few minutes, and its evaluation.",
}
# the file below lmtrain/cli/: it has an `app` of several commands, or a function of its own name
_FILES = {
    "corpus": "data.corpus", "tokenizer": "data.tokenizer", "preprocess": "data.preprocess", "data": "data.data",
    "config": "settings.config", "pretrain": "pretrain.pretrain", "slurm": "slurm.slurm", "inspect": "inspect.inspect",
    "trace": "trace.trace", "report": "report.report", "runs": "runs.runs", "eval": "eval.evaluate",
    "generate": "generate", "reshard": "checkpoint.reshard", "plan": "plan.plan", "watch": "runs.watch",
    "verify": "checkpoint.verify", "env": "env", "demo": "demo",
}  # fmt: skip


class PlainGroup(TyperGroup):
    """A group whose own options, and those of all verbs below it, are shown in plain words."""

    def get_params(self, ctx: Any) -> Any:
        return [_in_plain_words(param, None) for param in super().get_params(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        return found and _with_plain_words(found, ctx)


def takes(param: Any, hint: Any) -> str:
    """Return how help shows an option's value (`N`, `{cpu,cuda}`, nothing for a flag), or an argument's name."""
    if param.metavar:
        return re.sub(r"^\[(.+)\]$", r"\1", str(param.metavar).removesuffix("..."))
    if param.param_type_name == "argument":
        return str(param.name).upper()
    if param.is_flag:
        return ""
    for option in (hint, *typing.get_args(hint)):
        if typing.get_origin(option) is Literal:
            return f"{{{','.join(map(str, typing.get_args(option)))}}}"
        for inner in (option, *typing.get_args(option)):
            if inner in _WORDS:
                return _WORDS[inner]
    return "TEXT"


def hints_of(command: Any) -> dict[str, Any]:
    """Types of a command's parameters. From the function: what click says of them changes with its versions."""
    return typing.get_type_hints(inspect.unwrap(command.callback)) if command.callback else {}


def examples(lines: Sequence[tuple[str, str]]) -> str:
    """Return an epilog of example commands, each with what it does."""
    return "\n\n".join(("Examples:", *(f"* `{command}`: {what}" for command, what in lines)))


def _with_plain_words(command: Any, ctx: Any) -> Any:
    hints = hints_of(command)
    for param in command.get_params(ctx):
        _in_plain_words(param, hints.get(param.name))
    for verb in getattr(command, "commands", {}).values():
        _with_plain_words(verb, ctx)
    return command


def _in_plain_words(param: Any, hint: Any) -> Any:
    param.metavar = word = takes(param, hint)
    if param.param_type_name == "argument":
        # because: typer has no setting for these of an argument; a version that lacks one does not ask for it
        dots = "..." if param.nargs == -1 else ""
        usage = f"{word}{dots}" if param.required else f"[{word}]{dots}"
        vars(param).update(display_type_rich=lambda ctx: None, _usage_display_name=lambda: usage)
    vars(param)["_get_number_range_help_str"] = lambda: None  # "x>=1" beside N; a wrong number is told so
    return param


class VerbGroup(PlainGroup):
    """The root of the command line. Its verbs are imported where one is called, and not where all are listed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        return [*HELP]  # because: typer's own asks for the commands too

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return what a list of verbs shows of this one: its name and its line of help."""
        return TyperCommand(cmd_name, help=HELP[cmd_name]) if cmd_name in HELP else None

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and super().get_command(ctx, str(name)), rest


class _Commands(Mapping[str, Any]):
    """Name -> command, imported when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        return build_verb(name)

    def __contains__(self, name: object) -> bool:
        return name in HELP

    def __iter__(self) -> Iterator[str]:
        return iter(HELP)

    def __len__(self) -> int:
        return len(HELP)


@cache  # because: a command is changed in place where its help is put in plain words
def build_verb(name: str) -> Any:
    """Import a verb and return its command, with the EXAMPLES that end its help."""
    file = import_module(f"lmtrain.cli.{_FILES[name]}")
    root = typer.Typer(rich_markup_mode="markdown")
    root.callback()(build_verb)  # because: an app of one command would be that command
    if hasattr(file, "app"):
        root.add_typer(file.app, name=name, help=HELP[name])
    else:
        # because: pretrain.py is a step of the staircase, which is kept short
        told = import_module("lmtrain.cli.pretrain.summary") if name == "pretrain" else file
        epilog = examples(told.EXAMPLES) if hasattr(told, "EXAMPLES") else None
        root.command(name=name, epilog=epilog)(getattr(file, _FILES[name].rpartition(".")[2]))
    return get_command(root).commands[name]  # type: ignore[attr-defined]
