"""Fills what the ranks of a run would each fill anew, in the process that forks them. Called there by its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def prepare(overrides: Sequence[str], tokenizer: str | None) -> None:
    """Fill caches that ranks share: the verb, the grammar of overrides, the configs that they name, the tokenizer."""
    from lmtrain.cli.verbs import build_verb
    from lmtrain.config.compose import compose
    from lmtrain.tokenizer.base import Tokenizer
    from lmtrain.train.config import RunConfig

    build_verb("pretrain")
    compose(RunConfig, overrides)
    if tokenizer is not None:
        assert Tokenizer.load(Path(tokenizer)).fingerprint
