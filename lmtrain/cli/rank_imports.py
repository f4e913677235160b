"""What the ranks of a run have in common, so that one process a node imports and reads it for all.

The server that forks the ranks gets these names from launching. A module that is missing here is imported by each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmtrain.train.config import RunConfig

COMPANION = "lmtrain.observe.watch.companion:main_of_fork"
PREPARE = "lmtrain.cli.rank_imports:prepare"
RUN = (  # of any training
    "lmtrain.cli.main", "lmtrain.cli.evaluations", "lmtrain.cli.screen", "lmtrain.cli.watching", "lmtrain.train.setup",
    "lmtrain.train.loop", "lmtrain.observe.watch.guard", "lmtrain.observe.watch.companion", "hydra", "hydra.initialize",
    "lmtrain.config.compose", "lmtrain.cli.from_run", "lmtrain.train.starts", "lmtrain.train.elastic",
    "lmtrain.train.agreement", "typer._adapters",
)  # fmt: skip


SHARDED = ("lmtrain.parallel.sharding",)
COMPILED = ("torch._dynamo",)
EVALUATION = (
    "lmtrain.cli.main", "lmtrain.cli.evaluate", "lmtrain.cli.eval_session", "lmtrain.cli.eval_steps",
    "lmtrain.cli.subject", "lmtrain.cli.screen", "lmtrain.eval.load", "lmtrain.eval.runner", "lmtrain.parallel.sharding",
)  # fmt: skip


def imports_of(config: RunConfig) -> tuple[str, ...]:
    """Return the modules of a training with these settings."""
    kinds = [type(choice).__module__.removesuffix("_settings") for choice in (config.model, config.optim)]
    sharded = SHARDED if config.parallel.layout.dp > 1 else ()
    compiled = COMPILED if config.compute.compile is not False and config.compute.device != "cpu" else ()
    return (*RUN, *kinds, *sharded, *compiled)


def prepare(overrides: Sequence[str], tokenizer: str | None) -> None:
    """Fill caches that ranks share: the grammar of overrides, the configs that they name, and the tokenizer."""
    from lmtrain.config.compose import compose
    from lmtrain.tokenizer.base import Tokenizer
    from lmtrain.train.config import RunConfig

    compose(RunConfig, overrides)
    if tokenizer is not None:
        assert Tokenizer.load(Path(tokenizer)).fingerprint
