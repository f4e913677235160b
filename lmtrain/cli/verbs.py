"""The verbs of the command line: a line of help for each, and the file that is imported when a verb is used.

Called by main. To import and build all of them takes twice as long as to show `lmtrain --help`, which needs the lines
alone. A verb that is a function says the same in the first paragraph of its docstring (tests/cli/test_help.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from lmtrain.cli.plain_help import PlainGroup, examples

HELP = {
    "tokenizer": "Train a tokenizer, or look at one.",
    "corpus": "Make a clean corpus: fetch, clean, deduplicate, decontaminate, split.",
    "data": "Look at datasets, check, join, divide and index them.",
    "preprocess": "Tokenize text into a dataset for training.",
    "config": "See which settings there are, and where those of a run come from.",
    "pretrain": "Pretrain a model, or go on with a run that was stopped: the same command does both.",
    "plan": "Find the layouts that a model may have on so many GPUs, and say what each takes: time, memory, "
        "energy, money.",
    "slurm": "Run under Slurm: write the sbatch file of a run, or submit it.",
    "eval": "Measure a checkpoint on a published protocol or on any text.",
    "generate": "Let a checkpoint write on from a prompt. The same seed gives the same text.",
    "inspect": "Show what is in a dataset, a run or a checkpoint; or what differs between two checkpoints.",
    "report": "Write a page with everything that runs have recorded: curves, saves, faults, layout, settings, "
        "evaluations.",
    "runs": "See the runs of a folder, compare two, draw some in the terminal.",
    "trace": "Show where the time of a run's steps went, from what observe.trace or `touch RUN/TRACE` recorded.",
    "watch": "Watch a run from another terminal, over a slow line too: its panel, or a line for each step that is "
        "logged.",
    "verify": "Check a checkpoint: hashes, shapes, that pieces fill their tensors, tied weights.",
    "reshard": "Write a checkpoint for another layout: weights, optimizer and all else that a run goes on from.",
    "env": "Print versions, processor, devices and compiled helpers, for a bug report. No secrets are read.",
    "demo": "Corpus, tokenizer, dataset, a small GPT on CPU for a few minutes, and its evaluation.",
}


class VerbGroup(PlainGroup):
    """The root of the command line. Its verbs are imported where one is called, and not where all are listed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands()

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
    """Import a verb and return its command."""
    verb, epilog = _load(name)
    root = typer.Typer(rich_markup_mode="markdown")
    root.callback()(_load)  # because: an app of one command would be that command
    if isinstance(verb, typer.Typer):
        root.add_typer(verb, name=name, help=HELP[name])
    else:
        root.command(name=name, epilog=examples(epilog) if epilog else None)(verb)
    return get_command(root).commands[name]  # type: ignore[attr-defined]


def _load(name: str) -> tuple[Any, Sequence[tuple[str, str]]]:
    """Return the verb, a function or an app of several, and the examples at the end of its help.

    A new verb is a case here and a line in `HELP`.
    """
    match name:
        case "tokenizer":
            from lmtrain.cli.data import tokenizer

            return tokenizer.app, ()
        case "corpus":
            from lmtrain.cli.data import corpus

            return corpus.app, ()
        case "data":
            from lmtrain.cli.data import data

            return data.app, ()
        case "preprocess":
            from lmtrain.cli.data import preprocess

            return preprocess.preprocess, ()
        case "config":
            from lmtrain.cli.settings import config

            return config.app, ()
        case "pretrain":
            from lmtrain.cli.pretrain import pretrain, summary

            return pretrain.pretrain, summary.EXAMPLES
        case "plan":
            from lmtrain.cli.plan import plan

            return plan.plan, plan.EXAMPLES
        case "slurm":
            from lmtrain.cli.slurm import slurm

            return slurm.app, ()
        case "eval":
            from lmtrain.cli.eval import evaluate

            return evaluate.evaluate, ()
        case "generate":
            from lmtrain.cli import generate

            return generate.generate, ()
        case "inspect":
            from lmtrain.cli.inspect import inspect

            return inspect.inspect, ()
        case "report":
            from lmtrain.cli.report import report

            return report.report, report.EXAMPLES
        case "runs":
            from lmtrain.cli.runs import runs

            return runs.app, ()
        case "trace":
            from lmtrain.cli.trace import trace

            return trace.trace, trace.EXAMPLES
        case "watch":
            from lmtrain.cli.runs import watch

            return watch.watch, watch.EXAMPLES
        case "verify":
            from lmtrain.cli.checkpoint import verify

            return verify.verify, ()
        case "reshard":
            from lmtrain.cli.checkpoint import reshard

            return reshard.reshard, ()
        case "env":
            from lmtrain.cli import env

            return env.env, ()
        case "demo":
            from lmtrain.cli import demo

            return demo.demo, ()
    raise KeyError(name)
