"""A run under watch: where the watch has to end this process, it is said and written down as any other end is.

Called by pretrain. What the watch is stands in lmtrain/observe/watch/.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from lmtrain.cli.screen.messages import print_error
from lmtrain.errors import LmtrainError

if TYPE_CHECKING:
    from lmtrain.observe.watch.guard import Watch
    from lmtrain.runtime.processes.process import ProcessEnv
    from lmtrain.runtime.processes.process_group import Peers
    from lmtrain.train.config import RunConfig


def watched_run(
    config: RunConfig, env: ProcessEnv, met: Peers, heard: Callable[[str], None] = lambda name: None,
    *, on_device: bool = False,
) -> AbstractContextManager[Watch]:
    """`heard` gets the name of a signal that another process was sent, from another thread."""
    from lmtrain.observe.watch.guard import watched
    from lmtrain.train.stop_file import write_failure

    def ending(error: LmtrainError) -> None:
        write_failure(config, error, env)
        print_error(error)

    return watched(
        env, met, Path(config.run.dir), config.parallel.timeout_s, heard=heard, ending=ending, on_device=on_device
    )
