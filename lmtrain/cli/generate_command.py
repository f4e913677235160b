"""`lmtrain generate`: continue a prompt with a trained model, and print the text while it is generated."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmtrain.cli.screen.print_messages_and_json import echo, print_json, print_text
from lmtrain.cli.shared_options import Device, Plugins, Precision, Weights, refuse_file_as_text
from lmtrain.errors import DataError, UsageError, shell_quoted, way
from lmtrain.eval.sampling_settings import DEFAULT_NEW_TOKENS, Sampling
from lmtrain.runtime.files.atomic_files import read_bytes
from lmtrain.runtime.processes.process_environment import set_library_defaults

if TYPE_CHECKING:
    from lmtrain.eval.load_model import LoadedModel

_MAX_PROMPT_BYTES = 64 << 20


def generate(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A checkpoint, a run's folder for its latest one, or a Hugging Face folder."
        ),
    ],
    prompt: Annotated[
        str | None, typer.Option(help="The text to continue. [default: standard input, or a new document]")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file with the text to continue, or - for standard input. A line break at its end is left out.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")] = DEFAULT_NEW_TOKENS,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from this many of the likeliest tokens. [default: all]")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens that make up this probability. [default: all]")
    ] = None,
    seed: Annotated[int, typer.Option(help="The first sample's seed, up to 4294967295; the next ones count up.")] = 0,
    num_samples: Annotated[int, typer.Option(min=1, help="Number of continuations.")] = 1,
    device: Device = "auto",
    precision: Precision = "fp32",
    weights: Weights = "model",
    plugin: Plugins = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON when all is written.")] = False,
) -> None:
    """Generate text from a prompt with a checkpoint. The same seed gives the same text."""
    from lmtrain.checkpoint.unopened_model_on_disk import check_causal
    from lmtrain.exchange.find_model_at_path import find_model

    samplings = build_samplings(temperature, top_k, top_p, seed, num_samples)
    check_prompt_options(prompt, prompt_file)
    source = find_model(checkpoint, weights)  # before torch is imported, so that a wrong path or model is told at once
    check_causal(source)
    text = read_prompt(prompt_file) if prompt is None else prompt
    set_library_defaults()

    from lmtrain.eval.load_model import load_source
    from lmtrain.runtime.machine.choose_device import pick_device

    loaded = load_source(source, pick_device(device), precision)
    (_print_samples if as_json else _print_stream)(loaded, text, max_new_tokens, samplings)


def build_samplings(
    temperature: float, top_k: int | None, top_p: float | None, seed: int, num_samples: int
) -> list[Sampling]:
    """Return the settings of each sample, whose seeds count up. Raise UsageError if a value is not allowed."""
    return [
        Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed + number) for number in range(num_samples)
    ]


def check_prompt_options(prompt: str | None, prompt_file: Path | None) -> None:
    """Raise UsageError if both options name a prompt, or if --prompt has the name of a file in place of a text."""
    if prompt is None:
        return
    if prompt_file is not None:
        raise UsageError(
            f"--prompt and --prompt-file {prompt_file} both give the text to continue. Leave one of them out."
        )
    file = prompt.removeprefix("FILE:").removeprefix("@")
    if file != prompt and Path(file).is_file():
        raise UsageError(
            f"--prompt {shell_quoted(prompt)} is continued as it is written, and names a file. Use "
            f"{way('--prompt-file', file, instead_of='--prompt')} to continue the text in the file."
        )
    refuse_file_as_text("--prompt", prompt, "--prompt-file")


def read_prompt(file: Path | None) -> str:
    """Return the text of a prompt's file, or of standard input if `file` is None or -, without the line break that ends
    it; "" if no file is named and standard input is a terminal. Raise DataError if the text is not UTF-8.
    """
    if file is None and sys.stdin.isatty():
        return ""
    file = None if file == Path("-") else file
    content = sys.stdin.buffer.read() if file is None else read_bytes(file, _MAX_PROMPT_BYTES)
    try:
        return content.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        name = "Standard input" if file is None else str(file)
        raise DataError(
            f"{name} cannot be a prompt: it is not text in UTF-8 from byte {error.start} on. Give a text file."
        ) from error


def _print_stream(loaded: LoadedModel, prompt: str, max_new_tokens: int, samplings: list[Sampling]) -> None:
    from lmtrain.eval.sample_text_from_prompt import generate_stream

    subject = loaded.subject
    for number, sampling in enumerate(samplings):
        if len(samplings) > 1:
            echo(f"{chr(10) * (number > 0)}--- sample {number + 1} of {len(samplings)}, seed {sampling.seed}")
        print_text(prompt)
        for piece in generate_stream(
            subject.model, subject.tokenizer, prompt, max_new_tokens, sampling, subject.seq_len
        ):
            print_text(piece)
        echo()


def _print_samples(loaded: LoadedModel, prompt: str, max_new_tokens: int, samplings: list[Sampling]) -> None:
    from lmtrain.eval.sample_text_from_prompt import generate as generate_text

    subject = loaded.subject
    samples = [
        asdict(sampling)
        | asdict(generate_text(subject.model, subject.tokenizer, prompt, max_new_tokens, sampling, subject.seq_len))
        for sampling in samplings
    ]
    print_json({"model": loaded.facts, "prompt": prompt, "samples": samples}, ensure_ascii=False)
