"""A command of several processes, where they are not yet one: started together, again, and refused together.

Called by pretrain and eval. Torch is imported only where a refused process has peers to meet.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmtrain.cli.screen.terminal import tell, warn_of
from lmtrain.errors import LmtrainError, StoppedEarly, UsageError
from lmtrain.runtime.processes.launch import Outcome, follow_launcher, launch
from lmtrain.runtime.processes.process import ELSEWHERE, NodeRanks, ProcessEnv, Rendezvous, grow_segments, share_cores
from lmtrain.runtime.processes.rank_starter import Program
from lmtrain.runtime.processes.signals import ignore_stops

if TYPE_CHECKING:
    from lmtrain.train.before.preflight import Inputs
    from lmtrain.train.config import RunConfig

NumProcesses = Annotated[
    int | None, typer.Option("--nproc", min=1, help="Start this many processes here; they share the work. [default: 1]")
]
NumPerNode = Annotated[
    int | None,
    typer.Option("--nproc-per-node", min=1, help="Start this many on each node, where srun has started one task."),
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        "--max-restarts", min=0, help="Start again, so many times at most, where a process is lost. [default: 0]"
    ),
]
Elastic = Annotated[
    bool, typer.Option("--elastic", help="Take the nearest layout for the processes there are; same batches.")
]

# What the ranks of a run have in common, so that one process a node imports and reads it for all: the server that forks
# them. A module that is missing here is imported by each rank.
COMPANION = "lmtrain.observe.watch.companion:main_of_fork"
PREPARE = "lmtrain.cli.pretrain.from_run:prepare"
RUN = (  # of any training
    "lmtrain.cli.pretrain.eval_tasks", "lmtrain.cli.pretrain.from_run", "lmtrain.cli.main",
    "lmtrain.cli.pretrain.pretrain", "lmtrain.cli.pretrain.summary", "lmtrain.cli.screen.console",
    "lmtrain.cli.pretrain.attempt", "lmtrain.config.compose", "lmtrain.observe.watch.companion",
    "lmtrain.observe.watch.guard", "lmtrain.runtime.processes.launch", "lmtrain.train.ranks.same_everywhere",
    "lmtrain.train.layouts.elastic", "lmtrain.train.loop", "lmtrain.train.setup", "lmtrain.train.in_loop.starts",
    "numpy.random", "typer._adapters",
)  # fmt: skip
COMPOSING = ("lmtrain.config.source",)  # of a training whose ranks compose their settings themselves
# because: torch imports these itself where a pipeline hands gradients over, and where its compiler has to be told
PIPELINE, COMPILER = "torch.fx.experimental.symbolic_shapes", "torch._dynamo"
EVALUATION = (
    "lmtrain.cli.main", "lmtrain.cli.eval.evaluate", "lmtrain.cli.eval.session",
    "lmtrain.cli.eval.model_source", "lmtrain.cli.screen.console", "lmtrain.eval.recipes.choice_recipe",
    "lmtrain.eval.statistics", "lmtrain.eval.recipes.documents",
    "lmtrain.eval.journal", "lmtrain.eval.load", "lmtrain.eval.tasks.masked", "lmtrain.eval.report",
    "lmtrain.eval.runner", "lmtrain.observe.screen.training_view", "lmtrain.parallel.weights.sharding",
    "lmtrain.runtime.processes.launch", "lmtrain.train.ranks.same_everywhere", "lmtrain.train.config",
    "lmtrain.train.layouts.layout_table", "lmtrain.train.before.preflight", "data_tools.read.content", "hydra",
    "hydra.core.override_parser.overrides_parser", "numpy.random", "typer._adapters",
)  # fmt: skip


@dataclass(frozen=True)
class Processes:
    """The processes that a command line asks for: as it was typed, None where it says nothing."""

    nproc: int | None = None
    nproc_per_node: int | None = None
    max_restarts: int | None = None

    @property
    def count(self) -> int | None:
        """The number of processes to start on this node."""
        return self.nproc or self.nproc_per_node

    @property
    def are_started(self) -> bool:
        """True if ranks run in processes of their own: several, or one that may restart."""
        return (self.count or 1) > 1 or bool(self.max_restarts)


def this_process(asked: Processes) -> ProcessEnv:
    """Return who this process is, or the first of those that it is about to start.

    Call it before torch is imported.
    """
    env = ProcessEnv.detect()
    share_cores()
    grow_segments()
    if env.is_child:
        follow_launcher()
    if asked.nproc is not None and asked.nproc_per_node is not None:
        raise UsageError(
            f"--nproc={asked.nproc} and --nproc-per-node={asked.nproc_per_node} both say how many processes to start. "
            "Give --nproc on one machine, or --nproc-per-node under srun with one task on each node."
        )
    if asked.max_restarts is not None and env.launcher != "single":
        raise UsageError(
            f"--max-restarts={asked.max_restarts} would start processes again that {env.launcher} has started. Leave "
            f"it out, and let {'the batch script' if env.launcher == 'slurm' else env.launcher} do that."
        )
    if asked.count is None:
        return env
    return env.as_launcher(asked.count, "--nproc" if asked.nproc else "--nproc-per-node")


def run_processes(words: Sequence[str], env: ProcessEnv) -> None:
    """Run an evaluation, typed as `lmtrain WORDS`, in several processes; what it refuses has been said once by now."""
    _end(launch(Program(words_of_ranks(words), imports=EVALUATION), _ranks(env), say=tell, explain=_explain), env)


def imports_of(config: RunConfig) -> tuple[str, ...]:
    """Return the modules of a training with these settings."""
    layout, compute = config.parallel.layout, config.compute
    kinds = [type(choice).__module__.removesuffix("_settings") for choice in (config.model, config.optim)]
    sharded = ["lmtrain.parallel.weights.sharding"] * (layout.dp > 1)
    may_compile = compute.compile is True or (compute.compile == "auto" and compute.device != "cpu")
    tells_compiler = layout.dp > 1 or compute.deterministic or config.recompute.kind != "none"
    return (*RUN, *kinds, *sharded, *[PIPELINE] * (layout.pp > 1), *[COMPILER] * (may_compile or tells_compiler))


def run_attempts(
    words: Sequence[str], config: RunConfig, inputs: Inputs, env: ProcessEnv, max_restarts: int | None,
    composed: RunConfig | None,
) -> None:  # fmt: skip
    """Run a training in several processes; one that is lost goes on from its newest checkpoint, if it may.

    Ranks take their settings from `composed`, or compose them: a plugin's kinds are known to the ranks alone.
    Under srun each node has such a launcher. What all of them would say alike, that of rank 0 says.
    """
    from lmtrain.runfolder.ends import (
        is_stop_written_since,
        outcome_from_watchdog,
        stop_stamp,
        write_process_failure,
        write_unsaved_stop,
    )
    from lmtrain.train.before.preflight import find_resume
    from lmtrain.train.in_loop.starts import Starts

    folder = Path(config.run.dir)
    before = stop_stamp(folder)

    def again(outcome: Outcome, number: int) -> None:
        nonlocal before
        told = f"{outcome.told} " if note_end(outcome) is None else ""
        before = stop_stamp(folder)
        path = find_resume(config)
        starts = Starts.at(config, inputs, path)
        starts.refuse(config)
        place = f"from step {starts.step}, {path}" if path else "from the beginning, since nothing is saved yet"
        tell(f"{told}Start {number} of {(max_restarts or 0) + 1} goes on {place}.")

    def note_end(outcome: Outcome) -> Outcome | None:
        """Return the end that the watch has reported; if there is none, write the outcome down."""
        said = outcome_from_watchdog(folder, outcome, before)
        # because: where a rank of another node has failed first, its launcher or rank 0 has written why
        is_late = env.rank > 0 and is_stop_written_since(folder, before)
        if said is None and outcome.cause is not None and not is_late:
            # because: a run that was stopped before its ranks were there may have no folder yet
            if outcome.is_before_ranks:
                warn_of(write_unsaved_stop(folder, outcome.cause))
            else:
                warn_of(write_process_failure(folder, outcome))
        return said

    shared = {"tokenizer": inputs.tokenizer.source, "settings": composed and composed.to_dict()}
    imports = (*imports_of(config), *(() if composed else COMPOSING))
    program = Program(words_of_ranks(words), imports=imports, prepare=(PREPARE, shared), helper=COMPANION)
    outcome = launch(
        program, _ranks(env), max_restarts=max_restarts or 0, restarting=again, say=tell, explain=_explain
    )
    ignore_stops()  # because: srun asks the other nodes to stop once the first has ended, and this one has a result
    if outcome.is_before_ranks and env.has_peers:
        tell_peers(env, StoppedEarly(str(outcome.cause)))
    _end(outcome, env, said=note_end(outcome) is not None)


def _ranks(env: ProcessEnv) -> NodeRanks:
    """Return the ranks that this process is to start, of which `env` is the first."""
    launcher = "slurm" if env.launcher == "slurm" else "lmtrain"
    return NodeRanks(env.local_world_size or 1, env.rank, env.world_size, launcher, env.host)


def _explain(problem: str) -> None:
    if "--debug" in sys.argv:
        tell(f"Each rank is started by itself and imports for itself, as no server forks it: {problem}.")


def _end(outcome: Outcome, env: ProcessEnv, *, said: bool = False) -> None:
    speaks = env.rank == 0 or not outcome.stopped  # because: all nodes are asked to stop
    if outcome.cause is not None and not said and speaks:
        way_out = " Start the same command again to go on." * (outcome.lost or outcome.stopped)
        tell(f"{'' if outcome.stopped else 'error: '}{outcome.cause}{way_out}")
    # because: srun names the node and the code of the first task that fails, which tells where a rank was killed
    code = outcome.shell_code if env.launcher == "slurm" else outcome.exit_code
    if code != 0:
        raise typer.Exit(code)


def laid_out(config: RunConfig, words: Sequence[str], env: ProcessEnv, *, elastic: bool) -> RunConfig:
    """Return the settings for as many processes as there are, where the command leaves that open; say what was done.

    `words` are what the command line sets. The launcher says it, if it is ours.
    """
    from lmtrain.train.layouts.elastic import change_words, fit
    from lmtrain.train.layouts.layout_table import layout_words

    speaks, said = env.rank == 0 and not env.is_child, list[str]()
    if config.parallel.auto:
        from lmtrain.train.before.preflight import find_model
        from lmtrain.train.layouts.elastic import choose, chosen_before, conditions

        fixed = conditions(config, words)
        if (before := chosen_before(config, fixed)) is not None:
            config, said = before, [f"parallel=auto: {layout_words(before.parallel)}, as since the run began"]
        else:
            config, said = choose(config, find_model(config), env.world_size, fixed)
    if elastic:
        found = fit(config, env.world_size)
        changed = change_words(config, found)
        config, said = found, [*said, *([changed] if changed else [])]
    for line in said if speaks else ():
        tell(line)
    return config


def seen_from_here(config: RunConfig, env: ProcessEnv) -> ProcessEnv:
    """Return the processes of a dry run; those beyond the GPUs of a node of `hardware` are on other machines."""
    machine = config.hardware
    if (
        machine is None or machine.device == "cpu" or env.launcher != "lmtrain"
        or env.world_size <= machine.gpus_per_node
    ):  # fmt: skip
        return env
    return replace(env, launcher=ELSEWHERE, local_world_size=machine.gpus_per_node, host="each node")


def words_of_ranks(words: Sequence[str]) -> list[str]:
    """Return a command line as each of the processes is to have it: without the options that start them."""
    found, stream = [], iter(words)
    for word in stream:
        option, has_value, _ = word.partition("=")
        if option not in ("--nproc", "--nproc-per-node", "--max-restarts"):
            found.append(word)
        elif not has_value:
            next(stream, None)
    return found


def tell_peers(env: ProcessEnv, error: LmtrainError, *, found_by_all: bool = False) -> None:
    """Tell the peers why this process does not come, where they can be met."""
    try:
        Rendezvous.detect(env)
    except LmtrainError:
        return  # because: torch takes seconds to import, and there is nowhere to meet
    from lmtrain.runtime.processes.meeting import tell_refusal

    tell_refusal(env, error, found_by_all=found_by_all)
