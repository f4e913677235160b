"""The command `lmtrain`, also as `python -m lmtrain` where no script of that name is on the path.

A run listens for signals before anything is imported that takes time.
"""

import sys

from lmtrain.runtime.signals import listen


def main() -> None:
    if "pretrain" in sys.argv:
        listen()
    from lmtrain.cli.main import main as run  # because: it imports much

    run()


if __name__ == "__main__":
    main()
