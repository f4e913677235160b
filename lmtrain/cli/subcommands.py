"""The verbs (subcommands) of the command line: their help lines, and lazy imports of the files that implement them.

Used by main. Importing all verbs would double the time of `lmtrain --help`, which needs only the help lines. If a verb
is a function, the first paragraph of its docstring is its help line (tests/cli/test_help.py). A new verb needs a line
in each of the two tables.

`--help` shows an option's type in plain words. Metavars that a verb sets are kept; typer's own, such as `<int range>`
or `<bool>`, are replaced for all verbs here.
"""

from __future__ import annotations

import difflib
import inspect
import re
import typing
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from lmtrain.errors import LmtrainError, join_few
from lmtrain.runtime.processes.command_watch import watch_command

# because: depending on its version, typer bundles click under a name of its own or imports the package
ClickError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
_ClickUsageError: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError")
_TYPE_WORDS = {Path: "PATH", int: "N", float: "NUMBER"}
_NEVER_SETTINGS = ("N", "NUMBER", "NAME", "RUN", "DIR", "PACKAGE")  # words for values, none of which is like tp=2
_SETTING = re.compile(r"[a-z_]+(\.[a-z_]+)*=")
# in the order in which a user needs them, which is that of `lmtrain --help`
HELP = {
    "corpus": "Make a clean corpus: fetch, clean, deduplicate, decontaminate, split.",
    "tokenizer": "Train a tokenizer, or look at one.",
    "preprocess": "Tokenize text into a dataset for training.",
    "data": "Inspect, verify, join, split and index datasets.",
    "config": "Show which settings there are, and where a run's values come from.",
    "pretrain": "Pretrain a model, or continue a stopped run: the same command does both.",
    "slurm": "Run under Slurm: write the sbatch file of a run, or submit it.",
    "inspect": "Show what is in a dataset, a run or a checkpoint; or what differs between two checkpoints.",
    "trace": "Show where the time of a run's steps went, from the spans that observe.trace or `touch RUN/TRACE` "
        "recorded.",
    "report": "Write an HTML page about one or more runs: curves, saves, faults, layout, settings, evaluations.",
    "runs": "List the runs of a folder, compare two runs, plot runs in the terminal.",
    "eval": "Evaluate a checkpoint with a published protocol or on any text.",
    "generate": "Generate text from a prompt with a checkpoint. The same seed gives the same text.",
    "import": "Make a checkpoint from a model of Hugging Face or Megatron-LM.",
    "export": "Write the weights of a checkpoint for Hugging Face or Megatron-LM.",
    "reshard": "Convert a checkpoint to another parallel layout.",
    "merge": "Average the weights of several checkpoints of one model, instead of a decay of the learning rate.",
    "branch": "Print the commands that decay a run from several of its checkpoints, each as a run of its own.",
    "plan": "Find the parallel layouts that a model can have on a number of GPUs, and predict the time, memory, "
        "energy and cost of each.",
    "watch": "Watch a run's progress from another terminal: a live panel, or one line for each logged step.",
    "verify": "Check a checkpoint: file hashes, tensor shapes, that the saved pieces cover every tensor, and tied "
        "weights.",
    "env": "Print versions, processor, devices and compiled helpers, for a bug report. No secrets are read.",
    "demo": "Run all steps on this machine's CPU: corpus, tokenizer, dataset, a few minutes of training a small GPT, "
        "evaluation.",
}
# modules below lmtrain/cli/: each has an `app` with several commands, or a function with the module's name
_FILES = {
    "corpus": "data.corpus_command", "tokenizer": "data.tokenizer_command", "preprocess": "data.preprocess_command",
    "data": "data.data_command", "config": "settings.config_command", "pretrain": "pretrain.pretrain_command",
    "slurm": "slurm.slurm_command", "inspect": "inspect.inspect_command", "trace": "trace.trace_command",
    "report": "report.report_command", "runs": "runs.runs_command", "eval": "eval.evaluate_command",
    "generate": "generate_command", "import": "checkpoint.import_command", "export": "checkpoint.export_command",
    "reshard": "checkpoint.reshard_command", "merge": "checkpoint.merge_command",
    "branch": "checkpoint.branch_command", "plan": "plan.plan_command",
    "watch": "runs.watch_command", "verify": "checkpoint.verify_command", "env": "env_command",
    "demo": "demo_command",
}  # fmt: skip
WATCHERS = ("watch",)  # verbs that wait for what others do, and are silent as long as nothing happens
_FUNCTIONS = {"import": "import_"}  # verbs whose name cannot be a function's, as it is a keyword of Python


class PlainGroup(TyperGroup):
    """A command group whose help, and that of all its commands, shows option types in plain words."""

    def get_params(self, ctx: Any) -> Any:
        return [_simplify_parameter(param, None) for param in super().get_params(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        return command and _simplify_help(command, ctx)


def value_placeholder(param: Any, hint: Any) -> str:
    """Return the placeholder that help shows for a click parameter's value, such as `N` or `{cpu,cuda}`; empty for a
    flag. `hint` is the parameter's type hint.
    """
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
            if inner in _TYPE_WORDS:
                return _TYPE_WORDS[inner]
    return "TEXT"


def parameter_types(command: Any) -> dict[str, Any]:
    """Return the type hints of a command's parameters.

    They are read from the function, because click's own types change with its version.
    """
    return typing.get_type_hints(inspect.unwrap(command.callback)) if command.callback else {}


def examples_epilog(lines: Sequence[tuple[str, str]]) -> str:
    """Return Markdown for the end of a command's help; `lines` are pairs of an example command and its effect."""
    return "\n\n".join(("Examples:", *(f"* `{command}`: {effect}" for command, effect in lines)))


def _simplify_help(command: Any, ctx: Any) -> Any:
    """Change a click command and its subcommands, in place, so that their --help shows the types of values as plain
    words, such as N. Return the command.
    """
    types = parameter_types(command)
    for param in command.get_params(ctx):
        _simplify_parameter(param, types.get(param.name))
    for verb in getattr(command, "commands", {}).values():
        _simplify_help(verb, ctx)
    return command


def _simplify_parameter(param: Any, hint: Any) -> Any:
    """Change a click parameter, in place, so that --help shows the type of its value as a plain word, such as N. `hint`
    is its type hint. Return the parameter.
    """
    param.metavar = word = value_placeholder(param, hint)
    if param.param_type_name == "argument":
        # because: typer has no public setting for these; versions that lack an attribute ignore it
        dots = "..." if param.nargs == -1 else ""
        usage = f"{word}{dots}" if param.required else f"[{word}]{dots}"
        vars(param).update(display_type_rich=lambda ctx: None, _usage_display_name=lambda: usage)
    vars(param)["_get_number_range_help_str"] = lambda: None  # hides "x>=1" beside N; errors state the range
    return param


class VerbGroup(PlainGroup):
    """The root command. It lists a stub with the help line of each verb; a verb is imported when it is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = {name: TyperCommand(name, help=line) for name, line in HELP.items()}

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, stub and _simplify_help(build_verb(str(name)), ctx), rest


@cache  # because: `_simplify_help` changes a command in place
def build_verb(name: str) -> Any:
    """Import the module of the subcommand `name`, such as "pretrain", and return its click command; the module's
    EXAMPLES are added at the end of its help.
    """
    module = import_module(f"lmtrain.cli.{_FILES[name]}")
    root = typer.Typer(rich_markup_mode="markdown")
    root.callback()(build_verb)  # because: typer turns an app with a single command into that command
    if hasattr(module, "app"):
        root.add_typer(module.app, name=name, help=HELP[name])
    else:
        # because: pretrain_command.py is kept short for readers
        elsewhere = {"pretrain": "lmtrain.cli.pretrain.print_dry_run_and_summary"}
        examples_module = import_module(elsewhere[name]) if name in elsewhere else module
        epilog = examples_epilog(examples_module.EXAMPLES) if hasattr(examples_module, "EXAMPLES") else None
        function_name = _FILES[name].rpartition(".")[2].removesuffix("_command")
        root.command(name=name, epilog=epilog)(getattr(module, _FUNCTIONS.get(name, function_name)))
    command = get_command(root).commands[name]  # type: ignore[attr-defined]
    for subcommand, leaf in getattr(command, "commands", {"": command}).items():
        _refuse_misread_options(leaf)
        _watch(leaf, f"{name} {subcommand}".rstrip())
    return command


def verbs_with(option: str) -> str:
    """Return the verbs of lmtrain that have this option, as the text of a message; "" if none has it."""
    names, groups = list[str](), [([name], build_verb(name)) for name in HELP]
    for words, command in groups:
        groups += [([*words, word], each) for word, each in getattr(command, "commands", {}).items()]
        if any(option in param.opts and not getattr(param, "hidden", False) for param in command.params):
            names.append(f"`lmtrain {' '.join(words)}`")
    return join_few(names)


def _watch(command: Any, words: str) -> None:
    """Change the click command of `lmtrain WORDS`, in place, so that it is never silent for long while it works, and
    answers Ctrl-C within a second, whatever it does.
    """
    invoke = command.invoke

    def invoke_watched(ctx: Any) -> Any:
        print_line = None if words in WATCHERS else partial(print_still_at_work, words, monotonic())
        with watch_command(print_line):
            return invoke(ctx)

    command.invoke = invoke_watched


def print_still_at_work(words: str, began_s: float) -> None:
    """Print, on rank 0, that `lmtrain WORDS`, which began at this clock time, has printed nothing for a while."""
    from lmtrain.cli.screen.print_messages_and_json import print_notice
    from lmtrain.observe.screen.metrics_row_text import format_clock
    from lmtrain.runtime.processes.process_environment import ProcessEnv

    with suppress(LmtrainError):  # because: an error in this process's environment is reported elsewhere
        if ProcessEnv.detect().rank == 0:
            print_notice(f"lmtrain {words}: at work, {format_clock(monotonic() - began_s)} elapsed")


def _refuse_misread_options(command: Any) -> None:
    """Change a click command, in place, so that neither an option nor a setting is taken for the value of the option
    before it, and that of several values of one option none is dropped.
    """
    parse, names = command.parse_args, {name: param for param in command.params for name in param.opts}
    takes_settings = any(param.name == "overrides" for param in command.params)

    def parse_args(ctx: Any, args: list[str]) -> Any:
        words, given = args[: args.index("--")] if "--" in args else args, dict[str, str]()
        for place, option in enumerate(words):
            name, sign, value = option.partition("=")
            param = names.get(name)
            if param is None or getattr(param, "is_flag", True):
                continue
            values = [value] if sign else words[place + 1 :][: param.nargs]
            if not sign and not all(can_be_value(word, param, names, takes_settings) for word in values):
                raise _option_error(name, "requires an argument", ctx)
            typed = " ".join(values)
            if not param.multiple and given.setdefault(param.name, typed) != typed:
                raise _option_error(name, "is given more than once", ctx)
        return parse(ctx, args)

    command.parse_args = parse_args


def _option_error(option: str, message: str, ctx: Any) -> Exception:
    """Return click's error about an option."""
    error = _ClickUsageError(f"Option {option!r} {message}.", ctx=ctx)
    error.option_name = option
    return error  # type: ignore[no-any-return]


def can_be_value(word: str, param: Any, names: Collection[str], takes_settings: bool) -> bool:
    """Return whether the word after the option `param`, of a verb with the options `names`, is its value: it is not if
    it is an option, or a setting where neither the option's values look so nor the verb does without settings.
    """
    is_setting = takes_settings and param.metavar in _NEVER_SETTINGS and _SETTING.match(word)
    return not (is_setting or is_option(word, names))


def is_option(word: str, names: Collection[str]) -> bool:
    """Return whether a word is one of the options `names`, perhaps misspelt, with or without a value."""
    option = word.partition("=")[0].lower().replace("_", "-")
    return option.startswith("--") and bool(difflib.get_close_matches(option, names, n=1, cutoff=0.85))
