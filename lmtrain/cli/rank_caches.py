"""Fills what the ranks of a run would each fill anew, in the process that forks them. Called there by its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def prepare(
    tokenizer: str, settings: dict[str, Any] | None = None, overrides: Sequence[str] = (),
    config_dir: str | None = None, config_name: str = "",
) -> None:  # fmt: skip
    """Build the verb, read the tokenizer and the code's digests: once for all ranks.

    `settings` are what the launcher has composed of the overrides, if the ranks are to take them from it.
    """
    from lmtrain.cli.pretrain.from_run import keep_composed
    from lmtrain.cli.verbs import build_verb
    from lmtrain.tokenizer.base import Tokenizer
    from lmtrain.train.ranks.run_facts import PACKAGE, code_digests

    build_verb("pretrain")
    if settings is not None:
        keep_composed(settings, overrides, config_dir=Path(config_dir) if config_dir else None, name=config_name)
    code_digests(PACKAGE)
    assert Tokenizer.load(Path(tokenizer)).fingerprint
