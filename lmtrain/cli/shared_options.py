"""Options and arguments that several verbs share, and checks of their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lmtrain.cli.screen.print_messages_and_json import print_notice
from lmtrain.cli.settings_keys.shell_completion import complete_override
from lmtrain.config.settings_file import expand_settings_file
from lmtrain.errors import OutputError, UsageError, leave_out, own
from lmtrain.eval.sampling_and_precision_settings import PrecisionName
from lmtrain.runtime.files.existing_output import Kind, check_output
from lmtrain.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from data_tools.read.find_input_files import Inputs


def _import_plugins(names: list[str] | None) -> list[str] | None:
    """Import the packages that --plugin names and return the names unchanged. This is the callback that typer calls
    with the option's values.
    """
    from lmtrain.config.settings_base import add_plugin

    for name in names or ():
        add_plugin(name)
    return names


Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin", metavar="PACKAGE", callback=_import_plugins,
        help="Import this package, and let its models, optimizers, schedules and tasks be chosen too. Repeatable.",
    ),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", autocompletion=complete_override, callback=expand_settings_file,
        help="Settings: key=value, or group=choice as in model=gpt2_small. `lmtrain config list` shows the groups. A "
        "file of settings, my.yaml, can be one of the words.",
    ),
]  # fmt: skip
ConfigDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="A folder of your own configs; they override those in conf/.")
]
ConfigName = Annotated[str, typer.Option(metavar="NAME", help="The root config to start from.")]
FromRun = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Take the settings of this run: to go on with it, or with another run.dir to branch off from its newest "
        "checkpoint, or from the checkpoint given here, which may be a merged one.",
    ),
]
FromBeginning = Annotated[
    bool,
    typer.Option(
        "--from-beginning",
        help="With --from-run: begin that run again in another run.dir, from its first step, with the settings of its "
        "first start.",
    ),
]
Multirun = Annotated[
    bool, typer.Option("-m", "--multirun", help="Run every combination of a=1,2 b=range(3), one after another.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an output that this command wrote earlier.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device to compute on.")]
Precision = Annotated[PrecisionName, typer.Option(help="Number format to compute in.")]
Weights = Annotated[
    Literal["model", "ema"],
    typer.Option(
        help="Which weights of the checkpoint: its own, or their exponential average, which a run with "
        "checkpoint.ema.decay saves beside them."
    ),
]
_TEXT_FILES = "Files (.txt .jsonl .parquet; also .gz .bz2 .xz .zst), folders of them, "
TextInputs = Annotated[
    list[str], typer.Argument(metavar="INPUT", help=f"{_TEXT_FILES}globs, or - for standard input.")
]
RereadInputs = Annotated[  # of a verb that reads its inputs twice
    list[str], typer.Argument(metavar="INPUT", help=f"{_TEXT_FILES}or globs; not standard input, as they are reread.")
]
Suffixes = Annotated[
    list[str] | None,
    typer.Option(
        "--suffix", metavar=".SUFFIX",
        help="Also read files with this suffix, such as .py or .md, as plain text, in folders and globs too. "
        "Repeatable.",
    ),
]  # fmt: skip
InputFormat = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="NAME",
        help="Format of standard input, by default jsonl, and of files with an unknown suffix that are named one by "
        "one: txt, jsonl, or one compressed, as in txt.gz. For folders and globs use --suffix.",
    ),
]


SplitText = Annotated[
    Literal["file", "blank-line", "line"],
    typer.Option(
        "--split", help="What is a document in text files: the file, what stands between blank lines, or a line."
    ),
]


def parse_output_file(text: str) -> Path:
    """Return a text as the path of an output file. Raise typer.BadParameter if it names a folder."""
    if not text:
        raise typer.BadParameter("The name is empty. Give the name of a file.")
    if text.endswith("/") or Path(text).is_dir():
        raise typer.BadParameter(f"{text} is a folder. Give the name of a file in it, as in {Path(text) / 'NAME'}.")
    return Path(text)


def parse_output_prefix(text: str) -> Path:
    """Return a text as the prefix of a dataset to write. Raise typer.BadParameter if it names a folder, or one of the
    files of a dataset.
    """
    path = parse_output_file(text)
    if path.suffix in (".bin", ".idx") and path.stem:
        raise typer.BadParameter(
            f"{text} is the name of a file, but a dataset has several: PREFIX.bin, PREFIX.idx and others. Give the "
            f"prefix {path.with_suffix('')}."
        )
    return path


def check_seed(seed: int | None) -> int | None:
    """Return a seed that was typed. Raise typer.BadParameter if it has more than 64 bits: it would be the same as
    another seed.
    """
    if seed is not None and not -(2**63) <= seed < 2**63:
        rule = f"is not a whole number from {-(2**63)} to {2**63 - 1}"
        raise typer.BadParameter(f"{seed} {rule}. Use {own(seed % 2**32)}.")
    return seed


def parse_count_option(text: str) -> int:
    """Parse a count such as 4000 or 4k. Raise typer.BadParameter if it is not a whole number."""
    try:
        return parse_count(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text} is not a count ({error}). Give a whole number such as 4000 or 4k.") from error


def parse_size(option: str, text: str, parse: Callable[[str], int] = parse_bytes) -> int:
    """Parse `text`, the value of the option `option`, by the function `parse`. If that raises ValueError, raise a
    UsageError that names the option.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"The value of {option} cannot be used: {error}.") from error


def parse_numbers(option: str, text: str, way_out: str) -> list[float]:
    """Parse `text`, the value of the option `option`: numbers separated by commas. Raise UsageError if one is not a
    number; the message ends with the sentence `way_out`, which says what to type.
    """
    try:
        return [float(number) for number in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option}={text} is not a list of numbers. {way_out}") from error


def refuse_unused_options(context: typer.Context, unused: set[str], subject: str, words: Sequence[str] = ()) -> None:
    """Raise UsageError if parameters named in `unused` were typed on the command line, since they have no effect there,
    or if there are `words` of which that is known. `subject` is what they have no effect with, for the message, such as
    "--calibrate".
    """
    names, typed = [*words], [*words]
    for param in context.command.params:
        source = context.get_parameter_source(str(param.name))
        if param.name in unused and source is not None and source.name == "COMMANDLINE":
            is_option, value = param.opts[0].startswith("-"), context.params[str(param.name)]
            names.append(param.opts[0] if is_option else str(param.name).upper())
            typed += param.opts if is_option else map(str, value) if isinstance(value, list) else [str(value)]
    if names:
        verb = "has" if len(names) == 1 else "have"
        way_out = leave_out(*typed, shown=f"Leave {names[0] if len(names) == 1 else 'them'} out")
        raise UsageError(f"{' and '.join(names)} {verb} no effect with {subject}. {way_out}.")


def check_output_file(option: str, output: Path, kind: Kind, *, overwrite: bool, is_default: bool = False) -> None:
    """Raise OutputError if what is at the place of an output file must stay, as `check_output` says, or if the folder
    of a file that was named does not exist. `option` is the option that named it, for the message.
    """
    if not (is_default or output.parent.is_dir()):
        raise OutputError(
            f"{option} {output} cannot be written, because the folder {output.parent} does not exist. Create it, or "
            "give a file in another folder."
        )
    check_output(output, kind, overwrite=overwrite, is_default=is_default)


def refuse_unused_overwrite(overwrite: bool, *outputs: Path | None, subject: str) -> None:
    """Raise UsageError if --overwrite was typed and no output was named. `subject` is what is made then, for the
    message.
    """
    if overwrite and not any(outputs):
        raise UsageError(f"--overwrite has no effect with {subject}. {leave_out('--overwrite')}.")


def resolve_text_inputs(inputs: list[str], format_: str | None, suffixes: Sequence[str] | None = None) -> Inputs:
    """Find the files that the inputs name, as `find_input_files.resolve_text_inputs` does, and print its notice."""
    from data_tools.read.find_input_files import resolve_text_inputs

    return resolve_text_inputs(inputs, format_, suffixes, print_notice)
