"""`lmtrain plan`: the layout, memory, time and cost of a run before there are GPUs. Torch is never imported."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from lmtrain.cli.screen.print_messages_and_json import print_json
from lmtrain.cli.shared_options import (
    ConfigDir,
    ConfigName,
    Json,
    Overrides,
    Overwrite,
    Plugins,
    check_output_file,
    parse_output_file,
    refuse_unused_options,
    refuse_unused_overwrite,
)
from lmtrain.errors import LayoutError, UsageError, leave_out, way
from lmtrain.placement.parallel_settings import MAX_PROCESSES

EXAMPLES = (
    ("lmtrain plan model=gpt3_175b hardware=h100 gpus=1024 tokens=300B", "the best layouts, and how long it takes"),
    ("lmtrain plan model=gpt3_175b hardware=h100 gpus=1024 --layout tp=8,pp=16", "one layout, priced"),
    ("lmtrain plan model=gpt2_xl hardware=a100_80gb gpus=64 --html plan.html", "a page with pictures"),
    ("lmtrain plan model=gpt2_xl hardware=h100 gpus=8 --doublings 4 --grow-batch", "what more GPUs would bring"),
)
_WITH_CALIBRATE = {"overrides", "config_dir", "calibrate", "out", "overwrite", "plugin", "as_json"}


def plan(
    context: typer.Context,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "pretrain",
    layout: Annotated[
        str | None, typer.Option(metavar="LIST", help="Predict one layout, as in tp=8,pp=4; replicas fill the rest.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=1000, help="How many layouts to show.")] = 10,
    every: Annotated[
        bool, typer.Option("--every", help="Rank every layout, not only the best of each pp, tp, zero and dp_shard.")
    ] = False,
    by: Annotated[Literal["time", "joules"], typer.Option(help="The quantity to minimize.")] = "time",
    doublings: Annotated[
        int, typer.Option(min=0, max=10, help=f"Also plan for N doublings of the GPUs, up to {MAX_PROCESSES:,}.")
    ] = 1,
    grow_batch: Annotated[
        bool, typer.Option("--grow-batch", help="With more GPUs (--doublings), enlarge the batch too.")
    ] = False,
    margin: Annotated[float, typer.Option(min=0, max=0.9, help="Share of a GPU's memory that stays free.")] = 0.08,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="GPUs per node; network bandwidth per GPU stays the same.")
    ] = None,
    nodes_per_switch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep GPUs that share weights below one switch of N nodes.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, metavar="DOLLARS", help="Price of a GPU for an hour, to show the run's cost.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", parser=parse_output_file, help="Also write a page that needs no other file."),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit the machine to measured runs; give their folders.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--output", "--out", metavar="FILE", parser=parse_output_file,
            help="With --calibrate: write the result to this DIR/hardware/NAME.yaml.",
        ),
    ] = None,
    overwrite: Overwrite = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Find the parallel layouts that a model can have on a number of GPUs, and predict the time, memory, energy and
    cost of each.

    Besides settings it takes three words: gpus=1024, hardware=h100 (a file of conf/hardware), and tokens=300B.
    Settings that are given, as parallel.tp=8, train.micro_batch=1 or recompute=full, are kept; the rest is searched.
    """
    if calibrate:
        refuse_unused_options(context, set(context.params) - _WITH_CALIBRATE, "--calibrate")
        from lmtrain.cli.plan.print_calibration import print_calibration

        return print_calibration(overrides or [], config_dir, out, as_json, overwrite=overwrite)
    if out is not None:
        left_out = ["--output", *["--overwrite"] * (overwrite and html is None)]
        raise UsageError(
            f"--output={out} has an effect only with --calibrate, whose result it holds. Give --calibrate and folders "
            f"of runs, or {leave_out(*left_out, shown='leave ' + ' and '.join(left_out) + ' out')}."
        )
    refuse_unused_overwrite(overwrite, html, subject="a plan that is only printed")
    if layout is not None:
        unused = {"grow_batch", *["doublings"] * bool(doublings)}
        refuse_unused_options(context, unused, "--layout, which fixes the number of GPUs")
    if grow_batch and not doublings:
        raise UsageError(
            "--grow-batch only affects plans for more GPUs, and --doublings 0 asks for none. "
            f"{leave_out('--doublings', shown='Leave --doublings 0 out')}, or "
            f"{leave_out('--grow-batch', shown='--grow-batch')}."
        )
    from lmtrain.cli.plan.print_layout_ranking import plan_page, print_plan
    from lmtrain.runtime.files.atomic_files import atomic_file
    from lmtrain.start.plans.plan_question_and_search import (
        find_layouts,
        keeps_activations,
        read_question,
        with_gpus_per_node,
    )

    question = read_question(overrides or [], layout, config_dir, config_name)
    if price == math.inf:
        raise UsageError(f"--price {price:g} is not a finite number of dollars. Give a number such as 2.5.")
    if price is not None and question.tokens is None:
        raise UsageError(
            f"--price {price:g} shows the cost of a whole run, and the number of tokens of the run was not given. Give "
            "tokens=N."
        )
    if gpus_per_node is not None:
        question = with_gpus_per_node(question, gpus_per_node)
    gpus_per_switch = (nodes_per_switch or 0) * question.hardware.gpus_per_node
    if html is not None:
        from lmtrain.cli.page.html_document import PAGE_FILE

        check_output_file("--html", html, PAGE_FILE, overwrite=overwrite)
    result = find_layouts(
        question, top=top, every_layout=every, objective=by, doublings=0 if layout else doublings,
        grow_batch=grow_batch, margin=margin, gpus_per_switch=gpus_per_switch, dollars_per_gpu_hour=price,
    )  # fmt: skip
    if html is not None:
        with atomic_file(html, "w") as file:
            file.write(plan_page(result))
    if as_json:
        print_json(result.facts())
    else:
        print_plan(result)
    if result.first is None:
        full = f"{way('recompute=full')}, " if keeps_activations(question) else ""
        raise LayoutError(
            f"No layout on {question.gpus:,} x {question.hardware.name} fits in memory with {margin:.0%} of it left "
            "free; the layouts printed above come closest. "
            f"Use {full}more gpus or a smaller --margin."
        )
    return None
