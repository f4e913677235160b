"""The options of commands that run in several processes. Used by pretrain and eval."""

from __future__ import annotations

from typing import Annotated, Any

import typer

NumProcesses = Annotated[
    int | None,
    typer.Option("--nproc", min=1, help="Start N processes on this machine, which share the work. [default: 1]"),
]
NumPerNode = Annotated[
    int | None,
    typer.Option("--nproc-per-node", min=1, help="Start N processes on each node, where srun has started one task."),
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        "--max-restarts", min=0, help="Restart at most this many times if a process is lost. [default: 0]"
    ),
]
Elastic = Annotated[
    bool, typer.Option("--elastic", help="Adapt the layout to the number of processes; batches stay the same.")
]

PREPARE_FUNCTION = "lmtrain.cli.ranks.process_options:prepare_pretrain"


def prepare_pretrain(tokenizer: str, settings: dict[str, Any] | None) -> None:
    """Build the pretrain command, and fill the caches of `prepare_ranks`, whose parameters these are. The launcher has
    the server process from which the ranks are forked call this once.
    """
    from lmtrain.cli.subcommands import build_verb
    from lmtrain.start.settings_from_earlier_run import prepare_ranks

    build_verb("pretrain")
    prepare_ranks(tokenizer, settings)
