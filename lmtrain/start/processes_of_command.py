"""The processes of a command that runs in several: how many it starts, and the program and imports of each rank.

Used by pretrain and eval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lmtrain.errors import UsageError, leave_out
from lmtrain.runtime.processes.local_rank_launcher import end_with_launcher, launch
from lmtrain.runtime.processes.process_environment import DRY_RUN_LAUNCHER, ProcessEnv, set_library_defaults
from lmtrain.runtime.processes.start_rank_processes import Program
from lmtrain.start.launch_ranks import launch_with_restarts, report_outcome

if TYPE_CHECKING:
    from lmtrain.train.run_config import RunConfig
    from lmtrain.train.startup_checks.preflight import Inputs

# Modules that all ranks need: the server process that forks the ranks of a node imports them once. A module that is
# missing here is imported by each rank.
COMPANION_FUNCTION = "lmtrain.observe.hang_watch.watchdog_companion_process:main_of_fork"
TRAINING_IMPORTS = (  # for every training run
    "lmtrain.cli.main", "lmtrain.start.prepare_inputs_and_eval_tasks",
    "lmtrain.start.settings_from_earlier_run", "lmtrain.cli.pretrain.pretrain_command",
    "lmtrain.cli.pretrain.print_dry_run_and_summary", "lmtrain.cli.screen.print_facts_and_tables",
    "lmtrain.start.run_attempt_bookkeeping", "lmtrain.config.compose_run_settings",
    "lmtrain.observe.hang_watch.watchdog_companion_process",
    "lmtrain.observe.hang_watch.start_companion_and_raise_verdict",
    "lmtrain.runtime.processes.local_rank_launcher", "lmtrain.train.ranks.compare_ranks_at_start",
    "lmtrain.train.layouts.choose_parallel_layout", "lmtrain.train.loop", "lmtrain.train.set_up_run",
    "lmtrain.train.in_loop.failed_start_counter", "numpy.random", "typer._adapters",
)  # fmt: skip
# for training runs whose ranks compose their settings themselves
COMPOSING_IMPORTS = ("lmtrain.config.compose_files_with_hydra",)
# because: torch imports these itself when a pipeline passes gradients on, and when its compiler is configured
PIPELINE_IMPORT, COMPILER_IMPORT = "torch.fx.experimental.symbolic_shapes", "torch._dynamo"
EVALUATION_IMPORTS = (
    "lmtrain.cli.main", "lmtrain.cli.eval.evaluate_command", "lmtrain.cli.eval.print_evaluation",
    "lmtrain.cli.screen.print_facts_and_tables", "lmtrain.eval.task_recipes.multiple_choice_yaml",
    "lmtrain.eval.statistics", "lmtrain.eval.task_recipes.hash_and_count_texts", "lmtrain.eval.resume_journal",
    "lmtrain.eval.load_model", "lmtrain.eval.tasks.masked", "lmtrain.eval.print_evaluation_results",
    "lmtrain.eval.run_task", "lmtrain.start.find_model_at_path", "lmtrain.observe.screen.training_view",
    "lmtrain.parallel.weights.fsdp_sharding", "lmtrain.runtime.processes.local_rank_launcher",
    "lmtrain.train.ranks.compare_ranks_at_start", "lmtrain.train.run_config",
    "lmtrain.train.layouts.ranks_and_memory_table", "lmtrain.train.startup_checks.preflight",
    "data_tools.read.parse_chunks_and_bad_lines", "hydra",
    "hydra.core.override_parser.overrides_parser", "numpy.random", "typer._adapters",
)  # fmt: skip


@dataclass(frozen=True)
class ProcessOptions:
    """The process options of a command line, as typed; None for an option that was not given."""

    nproc: int | None = None
    nproc_per_node: int | None = None
    max_restarts: int | None = None

    @property
    def count(self) -> int | None:
        """The number of processes to start on this node."""
        return self.nproc or self.nproc_per_node

    @property
    def are_started(self) -> bool:
        """True if ranks run in child processes: several ranks, or one that may be restarted."""
        return (self.count or 1) > 1 or bool(self.max_restarts)


def detect_process(options: ProcessOptions) -> ProcessEnv:
    """Return this process's rank, world size and launcher (torchrun, Slurm, ...), read from the environment. If
    `options` say that this process shall start ranks itself (--nproc), return the values of the first of these ranks.

    Also set thread counts and memory options, so call it before torch is imported. Raise UsageError on process options
    that conflict with each other or with the launcher.
    """
    env = ProcessEnv.detect()
    set_library_defaults()
    if env.is_child:
        end_with_launcher()
    if options.nproc is not None and options.nproc_per_node is not None:
        raise UsageError(
            f"--nproc={options.nproc} and --nproc-per-node={options.nproc_per_node} both say how many processes to "
            f"start. {leave_out('--nproc-per-node', shown='Give --nproc')} on one machine, or "
            f"{leave_out('--nproc', shown='--nproc-per-node')} under srun with one task on each node."
        )
    if options.max_restarts is not None and env.launcher != "single":
        raise UsageError(
            f"--max-restarts={options.max_restarts} restarts only processes that lmtrain has started, and "
            f"{env.launcher} has started these. {leave_out()}, and let "
            f"{'the batch script' if env.launcher == 'slurm' else env.launcher} restart them."
        )
    if options.count is None:
        return env
    return env.as_launcher(options.count, "--nproc" if options.nproc else "--nproc-per-node")


def launch_evaluation(argv: Sequence[str], env: ProcessEnv, report: Callable[[str], None]) -> None:
    """Run the evaluation of this command line in several processes; its inputs have been checked already. `report` is
    called with messages to print.

    Raise AlreadyReported if a process fails.
    """
    program = Program(rank_arguments(argv), imports=EVALUATION_IMPORTS)
    outcome = launch(program, env, report=report, explain_no_server=_told_with_debug(argv, report))
    report_outcome(outcome, env, report)


def training_imports(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the modules that the ranks of a run with these settings will import. The server process from
    which the ranks are forked imports them once for all.
    """
    layout, compute = config.parallel.layout, config.compute
    kinds = [type(choice).__module__.removesuffix("_settings") for choice in (config.model, config.optim)]
    sharded = ["lmtrain.parallel.weights.fsdp_sharding"] * (layout.dp > 1)
    may_compile = compute.compile is True or (compute.compile == "auto" and compute.device != "cpu")
    tells_compiler = layout.dp > 1 or compute.deterministic or config.recompute.kind != "none"
    compiler = [COMPILER_IMPORT] * (may_compile or tells_compiler)
    return (*TRAINING_IMPORTS, *kinds, *sharded, *[PIPELINE_IMPORT] * (layout.pp > 1), *compiler)


def launch_training(
    argv: Sequence[str], config: RunConfig, inputs: Inputs, env: ProcessEnv, max_restarts: int | None,
    composed_config: RunConfig | None, prepare: str, report: Callable[[str], None],
) -> None:  # fmt: skip
    """Run the training of this command line in several processes, and restart them after a crash at most `max_restarts`
    times (None: 0). `report` is called with messages to print.

    `prepare` names the function, as MODULE:NAME, that the process calls once from which the ranks are forked.

    Ranks use the settings `composed_config`; if it is None they compose their own, as plugins are only imported in the
    ranks. Raise AlreadyReported on a failure.
    """
    prepared = {"tokenizer": inputs.tokenizer.source, "settings": composed_config and composed_config.to_dict()}
    program = Program(
        rank_arguments(argv), imports=(*training_imports(config), *(() if composed_config else COMPOSING_IMPORTS)),
        prepare=(prepare, prepared), helper=COMPANION_FUNCTION,
    )  # fmt: skip
    launch_with_restarts(
        program, config, inputs, env, max_restarts or 0, report=report,
        explain_no_server=_told_with_debug(argv, report),
    )  # fmt: skip


def _told_with_debug(argv: Sequence[str], report: Callable[[str], None]) -> Callable[[str], None]:
    """Return the function that is called with the reason why ranks cannot be forked from one server process: it reports
    the reason if the command line has --debug.
    """
    said = "Each rank starts and imports by itself, as ranks cannot be forked from one server"
    return lambda problem: report(f"{said}: {problem}.") if "--debug" in argv else None


def place_on_hardware(config: RunConfig, env: ProcessEnv) -> ProcessEnv:
    """Return the process environment for the checks of a dry run. If the run has more processes than one node of the
    machine in `config.hardware` has GPUs, they are spread over several such nodes; else return `env` unchanged.

    Processes beyond the GPUs of one node are placed on other machines.
    """
    machine = config.hardware
    if (
        machine is None or machine.device == "cpu" or env.launcher != "lmtrain"
        or env.world_size <= machine.gpus_per_node
    ):  # fmt: skip
        return env
    return replace(env, launcher=DRY_RUN_LAUNCHER, local_world_size=machine.gpus_per_node, host="each node")


def rank_arguments(argv: Sequence[str]) -> list[str]:
    """Return the command line for each rank: `argv` without the options --nproc, --nproc-per-node and --max-restarts
    and their values.
    """
    kept_words, remaining = [], iter(argv)
    for word in remaining:
        option, has_value, _ = word.partition("=")
        if option not in ("--nproc", "--nproc-per-node", "--max-restarts"):
            kept_words.append(word)
        elif not has_value:
            next(remaining, None)
    return kept_words
