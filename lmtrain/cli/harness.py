"""`python -m lmtrain.cli.harness`: the command of lm-evaluation-harness with lmtrain checkpoints as `--model lmtrain`.
"""

from __future__ import annotations

import sys

from lmtrain.cli.screen.print_messages_and_json import print_error
from lmtrain.errors import LmtrainError, UsageError
from lmtrain.runtime.machine.pip_install_hint import install_command


def main() -> None:
    """Run the command line of lm-evaluation-harness, with lmtrain checkpoints available as `--model lmtrain`."""
    try:
        try:
            from lmtrain.eval.harness import cli_evaluate
        except ImportError as error:
            raise UsageError(
                f"lm-evaluation-harness cannot be imported ({error}). Run `{install_command('harness')}`."
            ) from error
        cli_evaluate()
    except LmtrainError as error:
        print_error(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
