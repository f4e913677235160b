"""`lmtrain tokenizer`: train a tokenizer, or show one, by the functions of lmtrain.tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.cli.screen.print_messages_and_json import echo, print_json, print_notice, progress, say_already_there
from lmtrain.cli.shared_options import (
    InputFormat,
    Json,
    Overwrite,
    SplitText,
    Suffixes,
    TextInputs,
    parse_count_option,
    refuse_unused_options,
    resolve_text_inputs,
)
from lmtrain.errors import OutputError
from lmtrain.runfolder.file_names import CONFIG
from lmtrain.runtime.files.atomic_files import check_output_folder
from lmtrain.runtime.files.existing_output import Found, Kind, check_output, holds
from lmtrain.units import plural

app = typer.Typer(no_args_is_help=True)
_TOKENIZER = Kind("a tokenizer", holds('"added_tokens"'))


@app.command()
def train(
    inputs: TextInputs,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write tokenizer.json to.")],
    vocab_size: Annotated[
        int,
        typer.Option(
            metavar="N", parser=parse_count_option, help="Size of the vocabulary, including special tokens."
        ),
    ],
    kind: Annotated[
        Literal["bpe", "wordpiece"], typer.Option(help="bpe as in GPT-2, or wordpiece as in BERT.")
    ] = "bpe",
    pattern: Annotated[
        Literal["gpt2", "cl100k", "qwen2"] | None,
        typer.Option(help="How text is split into words (bpe): as by GPT-2 (default), GPT-4 and LLaMA 3, or Qwen."),
    ] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Remove case and accents (wordpiece).")] = False,
    key: Annotated[str, typer.Option(help="The key of the text in .jsonl files, or the column.")] = "text",
    split: SplitText = "file",
    format_: InputFormat = None,
    suffix: Suffixes = None,
    overwrite: Overwrite = False,
) -> None:
    """Train a tokenizer on texts; the same texts give the same tokenizer."""
    from data_tools.preprocess.tokenizer_of_text_files import total_bytes, train_tokenizer
    from data_tools.read.find_input_files import find_sources, refuse_unused_key
    from data_tools.read.parse_chunks_and_bad_lines import ALL_READ
    from lmtrain.tokenizer.train import check_training

    check_training(kind, pattern, lowercase, vocab_size)
    path = output / "tokenizer.json"
    _refuse_folder(output)
    check_output(path, _TOKENIZER, overwrite=True)  # because: whether it is the same is known at the end
    sources = find_sources(resolve_text_inputs(inputs, format_, suffix), split)
    if key != "text":
        refuse_unused_key(sources, key)
    total = total_bytes(sources)
    with progress("read", "bytes", interrupted="nothing is written.") as shown:

        def report(done: int) -> None:
            shown.set_activity(f"learning {vocab_size} pieces" if done == ALL_READ else "read")
            if done != ALL_READ:
                shown(done, total)

        made = train_tokenizer(sources, key, kind, vocab_size, pattern, lowercase, report)
    is_same = path.is_file() and path.read_bytes() == made.to_bytes()
    if check_output(path, _TOKENIZER, overwrite=overwrite, is_same=is_same) is Found.SAME:
        return say_already_there(path)
    made.save(path)
    few = "" if made.vocab_size >= vocab_size else f"; the text has no more of the {vocab_size:,} that were asked for"
    return echo(f"{path}: {made.kind}, {made.vocab_size:,} pieces{few}, fingerprint {made.fingerprint[:12]}")


def _refuse_folder(output: Path) -> None:
    """Raise OutputError if a tokenizer cannot be written to the folder, or if the folder has a tokenizer of its own: it
    is that of a run or of a checkpoint.
    """
    check_output_folder(output, f"--output={output}", check_lock=False)
    if (output / CONFIG).exists() or (output / MANIFEST).exists():
        raise OutputError(f"{output} is a run or a checkpoint, whose tokenizer must not change. Choose another folder.")


@app.command()
def show(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="A tokenizer's file or folder.")],
    text: Annotated[list[str] | None, typer.Argument(help="A text to tokenize, or more files for --data.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="FILES", help="Count the tokens of these files, folders or globs; - is standard input."),
    ] = None,
    key: Annotated[str, typer.Option(help="The key of the text in .jsonl files, or the column.")] = "text",
    split: SplitText = "file",
    format_: InputFormat = None,
    as_json: Json = False,
) -> None:
    """Show a tokenizer's kind, size and special tokens, and the tokens of a text or their number in files."""
    from data_tools.preprocess.tokenizer_of_text_files import count_tokens_of_files, find_texts_to_count
    from lmtrain.tokenizer.count_tokens import describe_text
    from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

    sources = find_texts_to_count(text or [], data or [], format_, split, print_notice)
    if not data:
        refuse_unused_options(context, {"key", "split", "format_"}, "a tokenizer without --data")
    tokenizer = Tokenizer.load(path)
    facts: dict[str, Any] = {
        "kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "special": dict(tokenizer.special),
        "fingerprint": tokenizer.fingerprint,
    }  # fmt: skip
    if data:
        with progress("counted", "bytes") as shown:
            facts["data"] = count_tokens_of_files(tokenizer, sources, key, shown)
    elif text:
        facts["text"] = describe_text(tokenizer, text[0])
    return print_json(facts, ensure_ascii=False) if as_json else _print_tokenizer(facts)


def _print_tokenizer(facts: dict[str, Any]) -> None:
    """Print the facts that `show` has collected: lines about the tokenizer, a table of a text's tokens or of files."""
    from lmtrain.cli.screen.print_facts_and_tables import print_table

    special = ", ".join(f"{role} {number}" for role, number in facts["special"].items())
    echo(f"{facts['kind']}, {facts['vocab_size']:,} pieces; special: {special or 'none'}")
    echo(f"fingerprint {facts['fingerprint']}")
    if "text" in facts:
        text = facts["text"]
        echo(f"{plural(text['tokens'], 'token')}, {text['bytes_per_token']:.2f} bytes each")
        _print_pieces(text["ids"], text["pieces"])
    elif "data" in facts:
        rows = facts["data"]["files"]
        totals = [{"file": "total", **facts["data"]["total"]}] * (len(rows) > 1)
        print_table([_count_cells(row) for row in [*rows, *totals]])


def _count_cells(row: dict[str, Any]) -> dict[str, str]:
    counts = {name: f"{row[name]:,}" for name in ("documents", "characters", "bytes", "tokens")}
    per_token = "-" if row["bytes_per_token"] is None else f"{row['bytes_per_token']:.2f}"
    return {"file": row["file"], **counts, "bytes/token": per_token}


def _print_pieces(ids: list[int], pieces: list[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from lmtrain.cli.screen.print_facts_and_tables import PlainConsole

    table = Table("id", "piece")
    for number, piece in zip(ids, pieces, strict=True):
        table.add_row(str(number), Text("".join(c if c.isprintable() else ascii(c)[1:-1] for c in piece)))
    PlainConsole().print(table)
