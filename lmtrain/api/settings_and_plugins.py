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
from lmtrain.start.other_tools.typed_line import TypedLine
from lmtrain.start.settings_from_earlier_run import RunRequest, compose_run
from lmtrain.train.run_config import RunConfig

_OPTIONS = frozenset(("--nproc", "--from-run"))  # of `lmtrain pretrain`, that a translation may use


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
        folder, earlier = (None if path is None else Path(path) for path in (config_dir, from_run))
        words = expand_settings_file(overrides) or []
        return compose_run(RunRequest(words, folder, config_name, earlier, from_beginning))
    except (UsageError, LayoutError) as error:
        # because: the tables of other tools' names are needed for an error alone
        from lmtrain.start.other_tools.explain_foreign_line import explain_foreign_words

        line = TypedLine(("pretrain",), tuple((word,) for word in overrides), takes_settings=True, options=_OPTIONS)
        raise explain_foreign_words(error, line) from None


@checked
def add_plugin(package: str) -> None:
    """Make the kinds of a package known, as the option --plugin does: its models to `lmtrain.load`, its tasks to
    `lmtrain.evaluate`, all of them to `lmtrain.settings`. Raise UsageError if the package cannot be imported.
    """
    settings_base.add_plugin(package)
