"""stop.json in a run's folder: why the run ended, and whether a scheduler should start it again.

Written by the command line when a run ends, by the launcher when one of its processes fails. Torch-free.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmtrain.errors import LmtrainError, OutputError, PeerLostError
from lmtrain.runtime.files import write_json
from lmtrain.runtime.process import ProcessEnv
from lmtrain.train.config import RunConfig

STOP = "stop.json"


def write_failure(config: RunConfig, error: LmtrainError, env: ProcessEnv) -> None:
    """The first process that fails says why; those that lose it as a peer come later and leave that alone."""
    if isinstance(error, OutputError):
        return  # because: the folder is another run's, or cannot be written
    lost = isinstance(error, PeerLostError)
    if env.world_size == 1 or not (Path(config.run.dir) / STOP).exists():
        facts = {"cause": str(error), "exit_code": error.exit_code, "requeue": lost}
        write_stop(config, facts | ({"rank": env.rank} if env.world_size > 1 else {}))


def write_stop(config: RunConfig, facts: dict[str, Any]) -> None:
    folder = Path(config.run.dir)
    if folder.is_dir():
        write_json(folder / STOP, facts)
