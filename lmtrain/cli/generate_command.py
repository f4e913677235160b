"""`lmtrain generate`: continue a prompt with a trained model, and print the text while it is generated."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmtrain.cli.screen.print_messages_and_json import echo, print_json, print_text
from lmtrain.cli.shared_options import Device, Plugins, Precision, Weights
from lmtrain.runtime.processes.process_environment import set_library_defaults

if TYPE_CHECKING:
    from lmtrain.eval.load_model import LoadedModel
    from lmtrain.eval.sample_text_from_prompt import Sampling


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
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")] = 200,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from this many of the likeliest tokens. [default: all]")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens that make up this probability. [default: all]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first sample's seed; the next ones count up.")] = 0,
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

    source = find_model(checkpoint, weights)  # before torch is imported, so that a wrong path or model is told at once
    check_causal(source)
    set_library_defaults()

    from lmtrain.eval.load_model import load_source
    from lmtrain.eval.sample_text_from_prompt import Sampling
    from lmtrain.runtime.machine.choose_device import pick_device

    samplings = [
        Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed + number) for number in range(num_samples)
    ]
    if prompt is None:  # standard input without the line break that ends it; nothing at a terminal
        prompt = "" if sys.stdin.isatty() else sys.stdin.read().removesuffix("\n")
    loaded = load_source(source, pick_device(device), precision)
    (_print_samples if as_json else _print_stream)(loaded, prompt, max_new_tokens, samplings)


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
