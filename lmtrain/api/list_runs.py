"""`lmtrain.runs`: the runs of a folder, as `lmtrain runs list --json` prints them. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lmtrain.api.check_arguments import checked
from lmtrain.runfolder.folder_reader import read_runs_below
from lmtrain.train.record.facts_of_recorded_runs import row_of_run


@checked
def runs(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the runs in a folder and its subfolders, a dict for each: what `lmtrain runs list FOLDER --json` prints,
    such as `run` (its folder), `name`, `state`, `step`, `stage`, `loss` and `loss/valid`. Numbers have the names that
    they have in `lmtrain.metrics`. Raise MissingInputError if there are none.
    """
    return [row_of_run(run) for run in read_runs_below([Path(folder)])]
