"""The entry point of the command `lmtrain`, also run as `python -m lmtrain` if no such script is on the path.

A training run installs its signal handlers before the slow imports start.
"""

import sys
from collections.abc import Sequence

from lmtrain.runtime.processes.stop_signals import install_stop_handlers


def is_run(arguments: Sequence[str]) -> bool:
    """Return True if the verb is `pretrain`, not merely an argument of another verb, such as a folder of that name."""
    return next((word for word in arguments if not word.startswith("-")), "") == "pretrain"


def main() -> None:
    if is_run(sys.argv[1:]):
        install_stop_handlers()
    from lmtrain.cli.main import main as run  # because: this import is slow, and signal handlers come first

    run()


if __name__ == "__main__":
    main()
