"""`lmtrain generate`: continue a prompt with a trained model, and print the text while it is generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtrain.cli.screen.print_messages_and_json import echo, print_json, print_notice, print_text
from lmtrain.cli.shared_options import (
    Device,
    Overwrite,
    Plugins,
    Precision,
    Weights,
    parse_output_file,
    refuse_unused_overwrite,
)
from lmtrain.eval.read_prompts import check_prompt_options, read_given_prompts
from lmtrain.eval.sampling_and_precision_settings import DEFAULT_NEW_TOKENS, Sampling, build_samplings
from lmtrain.runtime.files.atomic_files import check_output_folder
from lmtrain.runtime.files.existing_output import Kind, check_output, has_rows_with
from lmtrain.runtime.processes.process_environment import set_library_defaults
from lmtrain.units import plural

if TYPE_CHECKING:
    from lmtrain.eval.load_model import LoadedModel

_CONTINUATIONS = Kind("a file of continuations", has_rows_with("prompt", "text", "seed"))


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
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file with a prompt on each line; in a .jsonl file it is the text under prompt or text.",
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
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", parser=parse_output_file,
            help="Write each prompt and its continuation to this file, in lines of JSON, and print only a summary.",
        ),
    ] = None,
    overwrite: Overwrite = False,
    device: Device = "auto",
    precision: Precision = "fp32",
    weights: Weights = "model",
    plugin: Plugins = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON when all is written.")] = False,
) -> None:
    """Generate text from a prompt with a checkpoint. The same seed gives the same text."""
    from lmtrain.checkpoint.unopened_model_on_disk import check_causal
    from lmtrain.start.find_model_at_path import find_model

    samplings = build_samplings(temperature, top_k, top_p, seed, num_samples)
    check_prompt_options(prompt, prompt_file, prompts)
    refuse_unused_overwrite(overwrite, output, subject="text that is only printed")
    if output is not None:
        check_output_folder(output.parent, f"The folder of --output={output}", check_lock=False)
        check_output(output, _CONTINUATIONS, overwrite=overwrite)
    source = find_model(checkpoint, weights)  # before torch is imported, so that a wrong path or model is told at once
    check_causal(source)
    texts = read_given_prompts(prompt, prompt_file, prompts, print_notice)
    set_library_defaults()

    from lmtrain.eval.load_model import load_source
    from lmtrain.eval.sample_text_from_prompt import generate_rows, write_rows
    from lmtrain.runtime.machine.choose_device import pick_device

    loaded = load_source(source, pick_device(device), precision)
    if not as_json and output is None:
        return _print_stream(loaded, texts, max_new_tokens, samplings)
    rows = generate_rows(loaded.subject, texts, max_new_tokens, samplings)
    rows = rows if output is None else write_rows(output, rows)
    if as_json:
        return _print_rows(loaded.facts, list(rows), num_samples)
    num_tokens = sum(row["num_tokens"] for row in rows)
    return echo(f"{plural(len(texts) * num_samples, 'continuation')}, {plural(num_tokens, 'token')} -> {output}")


def _print_stream(
    loaded: LoadedModel, prompts: Sequence[str], max_new_tokens: int, samplings: Sequence[Sampling]
) -> None:
    """Print each prompt with its continuations while they are generated."""
    from lmtrain.eval.sample_text_from_prompt import generate_stream

    subject = loaded.subject
    for number, (prompt, sampling) in enumerate(product(prompts, samplings)):
        if len(prompts) * len(samplings) > 1:
            echo(f"{chr(10) * (number > 0)}--- {_title(number, prompts, samplings)}")
        print_text(prompt)
        for piece in generate_stream(
            subject.model, subject.tokenizer, prompt, max_new_tokens, sampling, subject.seq_len
        ):
            print_text(piece)
        echo()


def _title(number: int, prompts: Sequence[str], samplings: Sequence[Sampling]) -> str:
    """Return the text above continuation `number` on the screen."""
    prompt, sample = divmod(number, len(samplings))
    parts = [f"prompt {prompt + 1} of {len(prompts)}"] * (len(prompts) > 1)
    if len(samplings) > 1:
        parts.append(f"sample {sample + 1} of {len(samplings)}, seed {samplings[sample].seed}")
    return ", ".join(parts)


def _print_rows(facts: Mapping[str, Any], rows: Sequence[dict[str, Any]], num_samples: int) -> None:
    """Print the continuations as JSON, the `num_samples` of each prompt together. `facts` are those about the model."""
    samples = [{key: value for key, value in row.items() if key != "prompt"} for row in rows]
    by_prompt = [
        {"prompt": rows[first]["prompt"], "samples": samples[first : first + num_samples]}
        for first in range(0, len(rows), num_samples)
    ]
    content = by_prompt[0] if len(by_prompt) == 1 else {"prompts": by_prompt}
    print_json({"model": facts} | content, ensure_ascii=False)
