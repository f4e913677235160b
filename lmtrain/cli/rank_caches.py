"""Fills what the ranks of a run would each fill anew, in the process that forks them. Called there by its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def prepare(
    tokenizer: str, overrides: Sequence[str] | None, config_dir: str | None = None, config_name: str = ""
) -> None:
    """Build the verb, read the tokenizer and, where overrides are given, compose the settings: once for all ranks."""
    from lmtrain.cli.from_run import keep_composed
    from lmtrain.cli.verbs import build_verb
    from lmtrain.tokenizer.base import Tokenizer

    build_verb("pretrain")
    assert Tokenizer.load(Path(tokenizer)).fingerprint
    if overrides is not None:
        keep_composed(overrides, config_dir=Path(config_dir) if config_dir else None, name=config_name)
