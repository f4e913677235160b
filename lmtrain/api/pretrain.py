"""`lmtrain.pretrain`: train a run as `lmtrain pretrain` does, in a child process. Torch-free.

A process of its own leaves the caller's alone: its signal handlers, its GPU memory, its process groups and the working
of its notebook.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path

from lmtrain import errors
from lmtrain.api.check_arguments import checked
from lmtrain.api.read_run_metrics import Metrics, metrics
from lmtrain.api.settings_and_plugins import settings
from lmtrain.config import settings_base
from lmtrain.errors import LmtrainError
from lmtrain.runtime.terminal_safe_text import write_line

_ERROR = "error: "  # begins the lines of an error, the last ones of a command that fails
_MAX_LINES = 200  # lines of output that are kept for an error


@checked
def pretrain(
    *overrides: str, nproc: int | None = None, config_dir: str | os.PathLike[str] | None = None,
    config_name: str = "pretrain", from_run: str | os.PathLike[str] | None = None, from_beginning: bool = False,
) -> Metrics:  # fmt: skip
    """Train the run of `lmtrain pretrain OVERRIDES` to its end, such as `pretrain("model=gpt_tiny",
    "data.path=data/train", "train.steps=100")`, and return what it has recorded; `path` of the result is its folder.
    Called again, it goes on from the newest checkpoint, as the command does.

    The run has a process of its own, or `nproc` of them on this machine. What it prints is printed as it comes. The
    other parameters mean what the options of these names mean. An interrupt stops the run, which saves a checkpoint.
    Raise an LmtrainError with the message of the command if settings are wrong or the run fails; its `exit_code` is the
    command's.
    """
    folder = settings(
        *overrides, config_dir=config_dir, config_name=config_name, from_run=from_run, from_beginning=from_beginning
    ).run.dir
    options = {"--nproc": nproc, "--config-dir": config_dir, "--from-run": from_run}
    code, message = _run_command([
        "pretrain", *(f"{name}={value}" for name, value in options.items() if value is not None),
        f"--config-name={config_name}", *["--from-beginning"] * from_beginning,
        *(f"--plugin={name}" for name in settings_base.plugins), *overrides,
    ])  # fmt: skip
    if code:
        raise _error_of(code, message)
    return metrics(Path(folder))


def _run_command(words: list[str]) -> tuple[int, str]:
    """Run `lmtrain WORDS` in a child process, print its lines as they come, and return (exit code, message of its
    error). An interrupt is passed on to it, and raised again once it has ended.
    """
    lines = deque[str](maxlen=_MAX_LINES)
    interrupted: KeyboardInterrupt | None = None
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "lmtrain", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as child:  # fmt: skip
        assert child.stdout is not None
        while child.returncode is None:
            try:
                for line in child.stdout:
                    lines.append(line)
                    write_line(line.removesuffix("\n"), sys.stdout)
                child.wait()
            except KeyboardInterrupt as error:
                interrupted = error
                child.send_signal(signal.SIGINT)
    if interrupted is not None:
        raise interrupted
    return child.returncode, _message(lines)


def _message(lines: deque[str]) -> str:
    """Return the text of the error among the last lines of a command's output: without the line to type, which belongs
    to the command line.
    """
    text = "".join(lines)
    start = max(text.rfind(f"\n{_ERROR}"), 0 if text.startswith(_ERROR) else -1)
    return re.split(r"\nType[:,]", text[start:].strip().removeprefix(_ERROR))[0].strip() if start >= 0 else ""


def _error_of(code: int, message: str) -> LmtrainError:
    """Return the exception for a command that ended with this exit code and message."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LmtrainError)]
    plain = [kind for kind in kinds if kind.__init__ is LmtrainError.__init__ and kind.exit_code == code]
    error = (plain[0] if plain else LmtrainError)(message or f"The run ended with exit code {code}.")
    error.exit_code = code
    return error
