"""`lmtrain demo`: all commands from corpus to evaluation, on the source files of Python's standard library.

Each stage is the command a user would type, printed before it runs; only the corpus has no verb of its own. Started
again after a kill it goes on where training stopped, as any run does.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.panel import Panel
from rich.text import Text

from lmtrain import __version__
from lmtrain.cli.screen.print_facts_and_tables import PlainConsole, build_table
from lmtrain.cli.settings_keys.shell_completion import complete_override
from lmtrain.errors import LmtrainError
from lmtrain.runtime.files.atomic_files import read_json, write_json
from lmtrain.runtime.files.existing_output import Found, Kind, check_output
from lmtrain.runtime.processes.command_watch import watch_command
from lmtrain.units import format_bytes, format_seconds

LAYOUT = "tp=2,pp=2"
_MARK = "demo.json"  # because: the demo replaces what it finds in a folder that has this file
_DEMO = Kind("a folder that `lmtrain demo` made", lambda path: False, is_folder=True)
_VOCAB_SIZE = 1024  # because: a larger vocabulary leaves a model this small too little training for each token


def demo(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings of the training, such as train.steps=100.", metavar="KEY=VALUE",
            autocompletion=complete_override,
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="The folder for everything that the demo makes.")] = Path("runs/demo"),
) -> None:  # fmt: skip
    """Run all steps on this machine's CPU: corpus, tokenizer, dataset, a few minutes of training a small GPT,
    evaluation.

    The checkpoint is then resharded to four processes and evaluated again, and exported for Hugging Face.
    """
    console, began = PlainConsole(), time.monotonic()
    corpus, tokenizer, data, run = (output / name for name in ("corpus", "tokenizer", "data", "run"))
    if check_output(output, _DEMO, overwrite=True, is_unfinished=(output / _MARK).is_file()) is not Found.UNFINISHED:
        write_json(output / _MARK, {"lmtrain": __version__})
    _build_corpus(console, corpus)
    texts = {part: corpus / f"{part}.jsonl" for part in ("train", "heldout")}
    _run_verb(
        console, "tokenizer", "train", texts["train"], "--output", tokenizer, "--vocab-size", _VOCAB_SIZE, "--overwrite"
    )
    for part, text in texts.items():
        _run_verb(console, "preprocess", text, "--tokenizer", tokenizer, "--output", data / part, "--overwrite")
    _run_verb(
        console, "pretrain", "experiment=demo", f"data.path={data / 'train'}", f"data.valid_path={data / 'heldout'}",
        f"run.dir={run}", *(overrides or []),
    )  # fmt: skip
    reports = output / "evaluation.json", output / "evaluation_resharded.json"
    # because: these windows cost a quarter less than the default's, which overlap by half, for 0.001 bits per byte
    measure = ("--task", "perplexity", "--stride", 96, "--data", data / "heldout", "--overwrite", "--output")
    _run_verb(console, "eval", run, *measure, reports[0], "--baseline", data / "train")
    _run_verb(console, "reshard", run, "--to", LAYOUT, "--output", output / "resharded", "--overwrite")
    _run_verb(console, "eval", output / "resharded", *measure, reports[1])
    _run_verb(console, "export", run, "--to", "hf", "--output", output / "hf", "--overwrite")
    prompt = 'def read_json(path):\n    """'
    _run_verb(console, "generate", run, "--prompt", prompt, "--max-new-tokens", 120, "--temperature", 0.6, "--seed", 1)
    _finish(console, output, read_result(reports[0]), read_result(reports[1]), time.monotonic() - began)


def _build_corpus(console: Any, folder: Path) -> None:
    from data_tools.corpora.stdlib import build_stdlib_corpus

    _headline(console, "$", f"collecting the standard library's texts into {folder}")
    report = build_stdlib_corpus(folder)
    console.print(
        f"{report.num_train} files to train on ({format_bytes(report.train_bytes)}) and {report.num_heldout} held out "
        f"({format_bytes(report.heldout_bytes)}); {report.num_near_copies} near-copies of others were not held out",
        highlight=False,
    )


def _headline(console: Any, prompt: str, words: str) -> None:
    console.print(Text.assemble("\n", (prompt, "bold"), f" {words}"), highlight=False, soft_wrap=True)


def _run_verb(console: Any, *arguments: object) -> None:
    """Print the command line `lmtrain ARGUMENTS` and run it in a process of its own. If it fails, raise LmtrainError
    with that process's exit code.
    """
    words = [str(a) for a in arguments]
    _headline(console, "$ lmtrain", shlex.join(words))
    sys.stdout.flush()
    with watch_command(None):  # because: the child prints how far it is
        code = subprocess.run([sys.executable, "-m", "lmtrain", *words]).returncode
    if code != 0:
        failure = LmtrainError(f"lmtrain {words[0]} ended with exit code {code}. Its message is above.")
        failure.exit_code = code
        raise failure


def read_result(report: Path) -> dict[str, Any]:
    result: dict[str, Any] = read_json(report)["results"][0]
    return result


def check_same_scores(original: dict[str, Any], resharded: dict[str, Any]) -> None:
    """Raise LmtrainError if the evaluation results of a checkpoint and of its copy in another parallel layout differ at
    all. Both are dicts with `nll_sum_nats` and `measures`.
    """
    original_nll, resharded_nll = original["nll_sum_nats"], resharded["nll_sum_nats"]
    if (original_nll, original["measures"]) != (resharded_nll, resharded["measures"]):
        raise LmtrainError(
            f"The run's checkpoint scores {original_nll!r} nats and its copy resharded to {LAYOUT} scores "
            f"{resharded_nll!r} nats, but both must score the same. This is an error in lmtrain: please report it "
            "with both results files."
        )


def _finish(console: Any, output: Path, result: dict[str, Any], resharded: dict[str, Any], seconds: float) -> None:
    check_same_scores(result, resharded)
    ours = [("this model", result["measures"]), (f"resharded to {LAYOUT}", resharded["measures"])]
    table = build_table([
        {"<on held-out files": name, "bits per byte": f"{found['bits_per_byte']:.3f}"}
        | {"perplexity per token": f"{found['token_perplexity']:.1f}"}
        for name, found in ours + [(base["name"], base) for base in result["baselines"]]
    ])  # fmt: skip
    console.print()
    title = Text(f"done in {format_seconds(seconds)}; everything is in {output}")
    console.print(Panel(table, title=title, title_align="left"))
    console.print(
        f"  resharded from 1 process to 4: {resharded['nll_sum_nats']:.6f} nats, the same to the last digit",
        highlight=False,
    )
    for base in result["baselines"]:
        console.print(
            f"  bits per byte {100 * (1 - base['model_bits_ratio']):.0f}% below the {base['name']}'s, "
            f"perplexity {1 / base['model_token_perplexity_ratio']:.1f}x lower",
            highlight=False,
        )
    console.print("\nTry next:")
    for line in (
        f"lmtrain generate {output / 'run'} --prompt 'class Queue:'",
        f"lmtrain inspect {output / 'resharded'}",
        f"lmtrain pretrain experiment=demo data.path={output / 'data/train'} data.valid_path={output / 'data/heldout'} "
        f"run.dir={output}/wider model.width=384 model.num_heads=6",
    ):
        console.print(f"  {line}", highlight=False, soft_wrap=True)
