"""Output of `lmtrain pretrain` besides the live view: examples for --help, settings, dry runs, the final summary."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lmtrain.cli.screen.print_messages_and_json import echo, print_json, print_message, print_text, progress
from lmtrain.units import format_count, format_seconds, plural

if TYPE_CHECKING:
    from rich.console import Console

    from lmtrain.runtime.processes.process_environment import ProcessEnv
    from lmtrain.start.dataset_from_text import TextPreview
    from lmtrain.train.loop import Summary
    from lmtrain.train.run_config import RunConfig


EXAMPLES = (
    ("lmtrain pretrain data.text=notes.txt run.dir=runs/notes", "make a dataset of a text, and train on it"),
    ("lmtrain pretrain data.path=data/books --dry-run", "check it all, and say what would run"),
    ("lmtrain pretrain model=gpt2_small data.path=data/books run.dir=runs/a", "begin, or go on where it stopped"),
    ("lmtrain pretrain --from-run runs/a train.steps=20k", "the same run for longer"),
    ("lmtrain pretrain -m data.path=data/books run.dir=runs/b optim.lr=1e-4,3e-4", "two runs and a table"),
)


def print_settings(config: RunConfig, env: ProcessEnv, as_json: bool, text: TextPreview | None = None) -> None:
    """Print the run's settings as YAML, or as JSON with `as_json`, on rank 0 only. If `text` is given, because `config`
    names a temporary dataset of a dry run, the run's own data settings are printed instead.
    """
    if env.rank > 0:
        return None
    config = config if text is None else replace(config, data=text.data)
    if as_json:
        return print_json(config.to_dict())
    from omegaconf import OmegaConf

    return print_text(OmegaConf.to_yaml(config.to_dict()))


def print_preview(config: RunConfig, env: ProcessEnv, as_json: bool, text: TextPreview | None = None) -> None:
    """Do the checks of a real start, which raise if it would fail. Then print, on rank 0, what the run would do and
    what each rank would hold, for --dry-run. If `config` names a temporary dataset, `text` describes the one that a
    start would make.
    """
    from lmtrain.runtime.processes.fault_injection import arm_from_env
    from lmtrain.start.prepare_inputs_and_eval_tasks import prepare_inputs
    from lmtrain.start.processes_of_command import place_on_hardware
    from lmtrain.train.layouts.dry_run_speed_and_memory import dry_run_facts
    from lmtrain.train.layouts.ranks_and_memory_table import rank_rows
    from lmtrain.train.layouts.run_stages_table import dry_run_facts_of_stages

    arm_from_env()
    inputs, _ = prepare_inputs(config, place_on_hardware(config, env), progress, starts_run=False)
    if env.rank > 0:
        return None
    here = env.launcher == "lmtrain" and env.world_size == config.parallel.layout.world_size
    shown = config if text is None else replace(config, data=text.data)
    facts = (dry_run_facts_of_stages if config.stages else dry_run_facts)(shown, inputs, runs_here=here)
    facts |= {"ranks": rank_rows(config, inputs.model)}
    facts = facts if text is None else text.complete_facts(facts)
    return print_json(facts, indent=None) if as_json else print_plan_facts(facts)


def print_plan_facts(facts: dict[str, Any]) -> None:
    """Print the facts of a dry run as lines of name and value, then a table of the entry "stages" and one of the entry
    "ranks", each if `facts` has it.
    """
    from lmtrain.cli.screen.print_facts_and_tables import PlainConsole, print_pairs
    from lmtrain.train.layouts.ranks_and_memory_table import SINGLE_ROWS, layout_lines, merge_rows, padding_lines
    from lmtrain.train.layouts.run_stages_table import stage_lines

    print_pairs(
        (key.replace("_", " "), _format_fact(key, value))
        for key, value in facts.items() if key not in ("ranks", "stages", "padded_parameters")
    )  # fmt: skip
    if rows := facts.get("stages"):
        echo("\n".join(["", *stage_lines(rows, PlainConsole().width)]))
    if (ranks := facts.get("ranks")) is not None:
        padding = padding_lines(facts["parameters"], facts["padded_parameters"])
        echo("\n".join(["", *layout_lines(ranks if len(ranks) <= SINGLE_ROWS else merge_rows(ranks)), *padding]))


def _format_fact(key: str, value: object) -> str:
    from lmtrain.observe.screen.metrics_row_text import format_flops

    if key == "model_flops" and isinstance(value, (int, float)):
        return format_flops(value)
    if not isinstance(value, (int, float)):
        return str(value)
    return str(value) if isinstance(value, int) and value < 10_000 else format_count(value)


def print_summary(config: RunConfig, summary: Summary, console: Console, as_json: bool) -> None:
    """Print the result of a run that has finished or was stopped (steps, tokens, time, losses), as one line, or as JSON
    with `as_json`.
    """
    if as_json:
        keys = ("step", "loss", "valid_loss", "tokens", "epochs", "seconds", "stopped_by")
        return print_json({"run": config.run.dir} | {key: getattr(summary, key) for key in keys}, indent=None)
    time = f"{format_seconds(summary.seconds)}{' in this start' * summary.was_resumed}"
    parts = [plural(summary.step, "step"), f"{format_count(summary.tokens)} tokens", time]
    parts += [f"{summary.epochs:.1f} times through the data"] * (summary.epochs > 1)
    losses = {"loss": summary.loss, "validation": summary.valid_loss}
    parts += [f"{name} {loss:.4f}" for name, loss in losses.items() if loss is not None]
    word = "stopped" if summary.stopped_by else "done"
    return print_message(console, f"{word}: {', '.join(parts)}; everything is in {config.run.dir}")
