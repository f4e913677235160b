"""What `lmtrain pretrain` prints besides the live view: examples, settings, the preview of a dry run, the summary.

Called by pretrain.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.cli.screen.messages import say
from lmtrain.cli.screen.terminal import echo, pass_on

if TYPE_CHECKING:
    from rich.console import Console

    from lmtrain.train.before.preflight import Inputs
    from lmtrain.train.config import RunConfig
    from lmtrain.train.loop import Summary


EXAMPLES = (
    ("lmtrain pretrain data.path=data/books --dry-run", "check it all, and say what would run"),
    ("lmtrain pretrain model=gpt2_small data.path=data/books run.dir=runs/a", "begin, or go on where it stopped"),
    ("lmtrain pretrain --from-run runs/a train.steps=20k", "the same run for longer"),
    ("lmtrain pretrain -m data.path=data/books run.dir=runs/b optim.lr=1e-4,3e-4", "two runs and a table"),
)


def print_settings(config: RunConfig, as_json: bool) -> None:
    if as_json:
        echo(json.dumps(config.to_dict(), indent=1))
        return
    from omegaconf import OmegaConf

    pass_on(OmegaConf.to_yaml(config.to_dict()))


def print_preview(config: RunConfig, inputs: Inputs, as_json: bool) -> None:
    """What --dry-run says: the size of things and where each rank sits."""
    from lmtrain.train.layouts.dry_run import plan_facts
    from lmtrain.train.layouts.layout_table import rank_rows

    facts = plan_facts(config, inputs) | {"ranks": rank_rows(config, inputs.model)}
    if as_json:
        echo(json.dumps(facts))
    else:
        print_plan(facts)


def print_plan(facts: dict[str, Any]) -> None:
    from rich.table import Table

    from lmtrain.cli.screen.console import Screen
    from lmtrain.train.layouts.layout_table import SINGLE_ROWS, layout_lines, merged

    console, table = Screen(), Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for key, value in facts.items():
        if key != "ranks":
            table.add_row(key.replace("_", " "), _shown(key, value))
    console.print(table)
    if (ranks := facts.get("ranks")) is None:
        return
    for line in ("", *layout_lines(ranks if len(ranks) <= SINGLE_ROWS else merged(ranks))):
        console.print(line, highlight=False, soft_wrap=True)


def _shown(key: str, value: object) -> str:
    from lmtrain.observe.screen.row_text import work
    from lmtrain.units import format_count

    if key == "model_flops" and isinstance(value, (int, float)):
        return work(value)
    if not isinstance(value, (int, float)):
        return str(value)
    return str(value) if isinstance(value, int) and value < 10_000 else format_count(value)


def print_summary(config: RunConfig, summary: Summary, console: Console, as_json: bool) -> None:
    from lmtrain.units import format_count, format_seconds

    if as_json:
        facts = {"run": config.run.dir, "step": summary.step, "loss": summary.loss, "valid_loss": summary.valid_loss}
        facts |= {"tokens": summary.tokens, "seconds": summary.seconds, "stopped_by": summary.stopped_by}
        echo(json.dumps(facts))
        return
    parts = [f"{summary.step} steps", f"{format_count(summary.tokens)} tokens", format_seconds(summary.seconds)]
    if summary.loss is not None:
        parts.append(f"loss {summary.loss:.4f}")
    if summary.valid_loss is not None:
        parts.append(f"validation {summary.valid_loss:.4f}")
    word = "stopped" if summary.stopped_by else "done"
    say(console, f"{word}: {', '.join(parts)}; everything is in {config.run.dir}")


def left_behind(config: RunConfig) -> str:
    """What a run that was stopped goes on from, and how."""
    from lmtrain.checkpoint.store import latest
    from lmtrain.runfolder.names import CHECKPOINTS

    newest = latest(Path(config.run.dir) / CHECKPOINTS)
    if newest is None:
        return "nothing is saved. The same command begins anew; checkpoint.interval_steps says when a run saves."
    return f"a checkpoint is saved, {newest}. Run the same command again to go on."
