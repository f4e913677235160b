"""Commands that run in several processes: start the ranks, restart them after a loss, report errors to peers.

Used by pretrain and eval. Torch is imported only if a failing process has peers to report to.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtrain.cli.screen.print_messages_and_json import print_notice, warn_if_any
from lmtrain.errors import LmtrainError, PeerLostError, StoppedEarly, UsageError, leave_out
from lmtrain.runtime.processes.local_rank_launcher import Outcome, end_with_launcher, launch
from lmtrain.runtime.processes.process_environment import DRY_RUN_LAUNCHER, ProcessEnv, Rendezvous, set_library_defaults
from lmtrain.runtime.processes.start_rank_processes import Program
from lmtrain.runtime.processes.stop_signals import ignore_stops

if TYPE_CHECKING:
    from lmtrain.train.run_config import RunConfig
    from lmtrain.train.startup_checks.preflight import Inputs

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

# Modules that all ranks need: the server process that forks the ranks of a node imports them once. A module that is
# missing here is imported by each rank.
COMPANION_FUNCTION = "lmtrain.observe.hang_watch.watchdog_companion_process:main_of_fork"
PREPARE_FUNCTION = "lmtrain.cli.ranks.launch_ranks:prepare_pretrain"
TRAINING_IMPORTS = (  # for every training run
    "lmtrain.cli.main", "lmtrain.cli.pretrain.prepare_inputs_and_eval_tasks",
    "lmtrain.start.settings_from_earlier_run", "lmtrain.cli.pretrain.pretrain_command",
    "lmtrain.cli.pretrain.print_dry_run_and_summary", "lmtrain.cli.screen.print_facts_and_tables",
    "lmtrain.cli.pretrain.run_attempt_bookkeeping", "lmtrain.config.compose_run_settings",
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
    "lmtrain.cli.main", "lmtrain.cli.eval.evaluate_command", "lmtrain.cli.eval.run_tasks",
    "lmtrain.cli.screen.print_facts_and_tables", "lmtrain.eval.task_recipes.multiple_choice_yaml",
    "lmtrain.eval.statistics", "lmtrain.eval.task_recipes.hash_and_count_texts", "lmtrain.eval.resume_journal",
    "lmtrain.eval.load_model", "lmtrain.eval.tasks.masked", "lmtrain.eval.print_evaluation_results",
    "lmtrain.eval.run_task", "lmtrain.exchange.find_model_at_path", "lmtrain.observe.screen.training_view",
    "lmtrain.parallel.weights.fsdp_sharding", "lmtrain.runtime.processes.local_rank_launcher",
    "lmtrain.train.ranks.compare_ranks_at_start", "lmtrain.train.run_config",
    "lmtrain.train.layouts.ranks_and_memory_table", "lmtrain.train.startup_checks.preflight",
    "data_tools.read.parse_chunks_and_bad_lines", "hydra",
    "hydra.core.override_parser.overrides_parser", "numpy.random", "typer._adapters",
)  # fmt: skip


_POLL_S = 0.25  # how often a process that waits for rank 0 looks whether it is done


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


def launch_evaluation(argv: Sequence[str], env: ProcessEnv) -> None:
    """Run the evaluation of this command line in several processes; its inputs have been checked already.

    Raise typer.Exit if a process fails.
    """
    program = Program(rank_arguments(argv), imports=EVALUATION_IMPORTS)
    _exit_with_outcome(launch(program, env, report=print_notice, explain_no_server=_print_if_debug), env)


def prepare_pretrain(tokenizer: str, settings: dict[str, Any] | None) -> None:
    """Build the pretrain command, and fill the caches of `prepare_ranks`, whose parameters these are. The launcher has
    the server process from which the ranks are forked call this once.
    """
    from lmtrain.cli.subcommands import build_verb
    from lmtrain.start.settings_from_earlier_run import prepare_ranks

    build_verb("pretrain")
    prepare_ranks(tokenizer, settings)


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
    composed_config: RunConfig | None,
) -> None:  # fmt: skip
    """Start this node's ranks of a training run as child processes and wait for them to end. If one crashes, start all
    again from the newest checkpoint, at most `max_restarts` times (None: 0).

    Ranks use the settings `composed_config`; if it is None they compose their own, as plugins are only imported in the
    ranks. Under srun each node runs such a launcher, and that of rank 0 prints for all. Raise typer.Exit on a failure.
    """
    from lmtrain.runfolder.read_and_record_run_end import (
        is_stop_written_since,
        outcome_from_watchdog,
        stop_stamp,
        write_process_failure,
        write_unsaved_stop,
    )
    from lmtrain.train.in_loop.failed_start_counter import LostStarts
    from lmtrain.train.startup_checks.preflight import find_resume_checkpoint

    folder = Path(config.run.dir)
    stamp_before = stop_stamp(folder)

    def before_restart(outcome: Outcome, number: int) -> None:
        nonlocal stamp_before
        failure = f"{outcome.reason} " if record_end(outcome) is None else ""
        stamp_before = stop_stamp(folder)
        path = find_resume_checkpoint(config)
        starts = LostStarts.for_run(config, inputs, path)
        starts.check_limit(config)
        place = f"from step {starts.step}, {path}" if path else "from the beginning, since nothing is saved yet"
        print_notice(f"{failure}Start {number} of {(max_restarts or 0) + 1} goes on {place}.")

    def record_end(outcome: Outcome) -> Outcome | None:
        """Write how the ranks ended to stop.json, unless the watchdog or another node has written the cause. Return the
        watchdog's report if it wrote one, else None.
        """
        reported = outcome_from_watchdog(folder, outcome, stamp_before)
        # because: if a rank of another node failed first, its launcher or rank 0 has written the cause
        is_written_elsewhere = env.rank > 0 and is_stop_written_since(folder, stamp_before)
        if reported is None and outcome.cause is not None and not is_written_elsewhere:
            # because: a run that was stopped before its ranks started may have no folder yet
            if outcome.is_before_ranks:
                warn_if_any(write_unsaved_stop(folder, outcome.cause))
            else:
                warn_if_any(write_process_failure(folder, outcome))
        return reported

    prepared = {"tokenizer": inputs.tokenizer.source, "settings": composed_config and composed_config.to_dict()}
    program = Program(
        rank_arguments(argv), imports=(*training_imports(config), *(() if composed_config else COMPOSING_IMPORTS)),
        prepare=(PREPARE_FUNCTION, prepared), helper=COMPANION_FUNCTION,
    )  # fmt: skip
    outcome = launch(
        program, env, max_restarts=max_restarts or 0, on_restart=before_restart, report=print_notice,
        explain_no_server=_print_if_debug,
    )  # fmt: skip
    ignore_stops()  # because: srun asks the other nodes to stop once the first has ended, and this one has a result
    if outcome.is_before_ranks and env.has_peers:
        report_refusal(env, StoppedEarly(str(outcome.cause)))
    _exit_with_outcome(outcome, env, is_reported=record_end(outcome) is not None)


def _print_if_debug(problem: str) -> None:
    if "--debug" in sys.argv:
        print_notice(f"Each rank starts and imports by itself, as ranks cannot be forked from one server: {problem}.")


def _exit_with_outcome(outcome: Outcome, env: ProcessEnv, *, is_reported: bool = False) -> None:
    prints = env.rank == 0 or not outcome.stopped  # because: all nodes are asked to stop
    if outcome.cause is not None and not is_reported and prints:
        way_out = " Start the same command again to go on." * (outcome.is_restartable or outcome.stopped)
        print_notice(f"{'' if outcome.stopped else 'error: '}{outcome.cause}{way_out}")
    # because: srun names the node and the code of the first task that fails, which tells where a rank was killed
    code = outcome.shell_code if env.launcher == "slurm" else outcome.exit_code
    if code != 0:
        raise typer.Exit(code)


def choose_layout(config: RunConfig, overrides: Sequence[str], env: ProcessEnv, *, elastic: bool) -> RunConfig:
    """Return `config` with a parallel layout for the number of processes in `env`: with `parallel=auto` a layout is
    chosen, with `elastic` the given one is changed to fit; else return it unchanged. Print a choice or change on rank
    0.

    `overrides` are the settings of the command line, which stay as they are.
    """
    from lmtrain.train.layouts.choose_parallel_layout import (
        adapt_to_processes,
        adaptation_message,
        choose_layout,
        fixed_layout_settings,
        previous_layout,
    )
    from lmtrain.train.startup_checks.preflight import find_model

    prints, messages = env.rank == 0 and not env.is_child, list[str]()
    if config.parallel.auto:
        fixed = fixed_layout_settings(config, overrides)
        if (earlier_choice := previous_layout(config, fixed)) is not None:
            choice = earlier_choice.parallel.layout_text
            config, messages = earlier_choice, [f"parallel=auto: {choice}, as chosen when the run began"]
        else:
            config, messages = choose_layout(config, find_model(config), env.world_size, fixed)
    if elastic:
        fitted = adapt_to_processes(config, env.world_size)
        change = adaptation_message(config, fitted)
        config, messages = fitted, [*messages, *([change] if change else [])]
    for line in messages if prints else ():
        print_notice(line)
    return config


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


def report_refusal(env: ProcessEnv, error: LmtrainError, *, peers_fail_too: bool = False) -> None:
    """Send `error`, which keeps this process from starting, to the other ranks, so that they do not wait for it. Do
    nothing if the environment names no address at which the ranks meet.

    `peers_fail_too` states that every process finds the same error itself.
    """
    try:
        Rendezvous.detect(env)
    except LmtrainError:
        return  # because: without a rendezvous there is no way to reach peers, and torch takes seconds to import
    from lmtrain.runtime.processes.rendezvous import report_refusal

    report_refusal(env, error, peers_fail_too=peers_fail_too)


def wait_for_rank_0(
    env: ProcessEnv, timeout_s: float, is_done: Callable[[], bool], task: str, progress: Callable[[], object]
) -> None:
    """Wait, on a rank other than 0, until `is_done()` returns True because rank 0 has finished a task for all ranks.
    `task` names what rank 0 makes, for the error message; `progress()` returns any value that changes while rank 0
    works.

    Raise the error of rank 0 if it reports one, and PeerLostError if there is no progress for `timeout_s`.
    """
    seen, since_s = progress(), time.monotonic()
    while not is_done():
        if _is_store_open(env):  # because: rank 0 opens it to report an error, or when it goes on
            from lmtrain.runtime.processes.rendezvous import raise_refusal

            return raise_refusal(env, timeout_s, is_done)
        if (now := progress()) != seen:
            seen, since_s = now, time.monotonic()
        elif time.monotonic() - since_s > timeout_s:
            raise PeerLostError(
                f"{env.label} waited for {task}, which rank 0 makes, and saw no progress for "
                f"parallel.timeout_s={timeout_s:g}. Look at the output of rank 0; its folder must be one that all "
                "processes see."
            )
        time.sleep(_POLL_S)
    return None


def _is_store_open(env: ProcessEnv) -> bool:
    """Return True if rank 0 accepts connections at the address where the ranks meet. Return False if torchrun holds
    that address, since it accepts them all the time.
    """
    rendezvous = Rendezvous.detect(env)
    if rendezvous.held_by_launcher:
        return False
    try:
        socket.create_connection((rendezvous.host, rendezvous.port), timeout=1.0).close()
    except OSError:
        return False
    return True
