"""`lmtrain tokenizer`: train a tokenizer, or show one, by the functions of lmtrain.tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

from lmtrain.cli.screen.print_messages_and_json import echo, progress
from lmtrain.cli.shared_options import InputFormat, SplitText, TextInputs, parse_count_option, resolve_text_inputs
from lmtrain.errors import OutputError, UsageError, leave_out
from lmtrain.units import plural

app = typer.Typer(no_args_is_help=True)


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
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing, different tokenizer.")] = False,
) -> None:
    """Train a tokenizer on texts; the same texts give the same tokenizer."""
    from data_tools.read.find_input_files import find_sources
    from data_tools.read.parse_chunks_and_bad_lines import ALL_READ, SourceTexts, refuse_blank_texts
    from lmtrain.tokenizer.train import train_bpe, train_wordpiece

    if lowercase and kind == "bpe":
        raise UsageError(
            "--lowercase works only with --kind wordpiece: byte-level BPE keeps the case of the text. "
            f"{leave_out('--lowercase')}."
        )
    if pattern is not None and kind != "bpe":
        way_out = f"{leave_out('--pattern')}."
        raise UsageError(f"--pattern works only with --kind bpe: WordPiece splits text as BERT does. {way_out}")
    sources = find_sources(resolve_text_inputs(inputs, format_), split)
    total = sum(source.num_bytes for source in sources) if all(source.num_bytes for source in sources) else 0
    with progress("read", "bytes", interrupted="nothing is written.") as shown:

        def report(done: int) -> None:
            shown.set_activity(f"learning {vocab_size} pieces" if done == ALL_READ else "read")
            if done != ALL_READ:
                shown(done, total)

        texts: Iterable[str] = SourceTexts(sources, key, report=report)
        if "-" in inputs:
            texts = iter(texts)  # because: a pipe is read once; readers keep the texts of an iterator
        texts = refuse_blank_texts(texts)
        made = (
            train_bpe(texts, vocab_size, pattern or "gpt2")
            if kind == "bpe"
            else train_wordpiece(texts, vocab_size, lowercase)
        )
    path = output / "tokenizer.json"
    if path.exists() and not overwrite and path.read_bytes() != made.to_bytes():
        raise OutputError(
            f"{path} already holds a different tokenizer. Choose another --output, or add --overwrite to replace it."
        )
    made.save(path)
    few = "" if made.vocab_size >= vocab_size else f"; the text has no more of the {vocab_size:,} that were asked for"
    echo(f"{path}: {made.kind}, {made.vocab_size:,} pieces{few}, fingerprint {made.fingerprint[:12]}")


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="A tokenizer's file or folder.")],
    text: Annotated[str | None, typer.Argument(help="A text to tokenize.")] = None,
) -> None:
    """Show a tokenizer's kind, size and special tokens, and the tokens of a text."""
    from rich.table import Table
    from rich.text import Text

    from lmtrain.cli.screen.print_facts_and_tables import PlainConsole
    from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

    tokenizer = Tokenizer.load(path)
    special = ", ".join(f"{role} {number}" for role, number in tokenizer.special.items())
    echo(f"{tokenizer.kind}, {tokenizer.vocab_size:,} pieces; special: {special or 'none'}")
    echo(f"fingerprint {tokenizer.fingerprint}")
    if text is None:
        return
    ids = tokenizer.encode(text)
    echo(f"{plural(len(ids), 'token')}, {len(text.encode(errors='replace')) / max(len(ids), 1):.2f} bytes each")
    table = Table("id", "piece")
    for number in ids:
        piece = tokenizer.piece(number)
        table.add_row(str(number), Text("".join(c if c.isprintable() else ascii(c)[1:-1] for c in piece)))
    PlainConsole().print(table)
