"""`lmtrain.settings`: the settings that a run would have, checked as `lmtrain pretrain` checks them;
`lmtrain.add_plugin`: the kinds of another package. Torch-free.
"""

from __future__ import annotations

import os
from pathlib import Path

from lmtrain.api.check_arguments import checked
from lmtrain.config import settings_base
from lmtrain.config.settings_file import expand_settings_file
from lmtrain.errors import LayoutError, UsageError
from lmtrain.start.settings_from_earlier_run import compose_run
from lmtrain.train.run_config import RunConfig


@checked
def settings(
    *overrides: str, config_dir: str | os.PathLike[str] | None = None, config_name: str = "pretrain",
    from_run: str | os.PathLike[str] | None = None, from_beginning: bool = False,
) -> RunConfig:  # fmt: skip
    """Return the settings of the run that `lmtrain pretrain OVERRIDES` would start, such as
    `settings("model=gpt_tiny", "data.path=data/train").model.width`. `to_dict()` of the result has all values.

    One of the words may be a file of settings, as in `settings("my.yaml", "train.seed=2")`.
    `config_dir`, `config_name`, `from_run` and `from_beginning` mean what the options of these names mean. Raise an
    LmtrainError that lists the wrong settings. Files and devices that settings name are not looked for.
    """
    try:
        return compose_run(
            expand_settings_file(overrides) or [], from_run=None if from_run is None else Path(from_run),
            config_dir=None if config_dir is None else Path(config_dir), name=config_name, report=None,
            from_beginning=from_beginning,
        )  # fmt: skip
    except (UsageError, LayoutError) as error:
        # because: the tables of other tools' names, and typer, are needed for an error alone
        from lmtrain.cli.settings_keys.apply_advice import Command
        from lmtrain.cli.settings_keys.other_tools.explain_foreign_line import explain_foreign_words

        explained = explain_foreign_words(error, Command.parse(["pretrain", *map(str, overrides)]))
        raise explained from None


@checked
def add_plugin(package: str) -> None:
    """Make the kinds of a package known, as the option --plugin does: its models to `lmtrain.load`, its tasks to
    `lmtrain.evaluate`, all of them to `lmtrain.settings`. Raise UsageError if the package cannot be imported.
    """
    settings_base.add_plugin(package)
