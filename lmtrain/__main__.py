"""The command `lmtrain`, also as `python -m lmtrain` where no script of that name is on the path.

A run listens for signals before anything is imported that takes time.
"""

import sys
from collections.abc import Sequence

from lmtrain.runtime.processes.signals import listen


def is_run(arguments: Sequence[str]) -> bool:
    """Whether the verb is pretrain; a folder of that name given to another verb makes no run of it."""
    return next((word for word in arguments if not word.startswith("-")), "") == "pretrain"


def main() -> None:
    if is_run(sys.argv[1:]):
        listen()
    from lmtrain.cli.main import main as run  # because: it imports much

    run()


if __name__ == "__main__":
    main()
