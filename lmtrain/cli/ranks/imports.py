"""What the ranks of a run have in common, so that one process a node imports and reads it for all.

The server that forks the ranks gets these names from launching. A module that is missing here is imported by each rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmtrain.train.config import RunConfig

COMPANION = "lmtrain.observe.watch.companion:main_of_fork"
PREPARE = "lmtrain.cli.rank_caches:prepare"
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
    "lmtrain.cli.main", "lmtrain.cli.eval.evaluate", "lmtrain.cli.eval.session", "lmtrain.cli.eval.session",
    "lmtrain.cli.eval.model_source", "lmtrain.cli.screen.console", "lmtrain.eval.recipes.choice_recipe",
    "lmtrain.eval.statistics", "lmtrain.eval.recipes.documents", "lmtrain.eval.recipes.documents",
    "lmtrain.eval.journal", "lmtrain.eval.load", "lmtrain.eval.tasks.masked", "lmtrain.eval.report",
    "lmtrain.eval.runner", "lmtrain.observe.screen.display", "lmtrain.parallel.weights.sharding",
    "lmtrain.runtime.processes.launch", "lmtrain.train.ranks.same_everywhere", "lmtrain.train.config",
    "lmtrain.train.layouts.layout_table", "lmtrain.train.before.preflight", "data_tools.read.content", "hydra",
    "hydra.core.override_parser.overrides_parser", "numpy.random", "typer._adapters",
)  # fmt: skip


def imports_of(config: RunConfig) -> tuple[str, ...]:
    """Return the modules of a training with these settings."""
    layout, compute = config.parallel.layout, config.compute
    kinds = [type(choice).__module__.removesuffix("_settings") for choice in (config.model, config.optim)]
    sharded = ["lmtrain.parallel.weights.sharding"] * (layout.dp > 1)
    may_compile = compute.compile is True or (compute.compile == "auto" and compute.device != "cpu")
    tells_compiler = layout.dp > 1 or compute.deterministic or config.recompute.kind != "none"
    compiler = [COMPILER] * (may_compile or tells_compiler)
    return (*RUN, *kinds, *sharded, *[PIPELINE] * (layout.pp > 1), *compiler)
