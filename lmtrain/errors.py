"""Every error a user can see, and the exit code that goes with it.

    LmtrainError                70  something of ours went wrong
    |-- UsageError               2  a wrong command line
    |   |-- SettingsError        2  one or more wrong settings, all reported at once
    |   `-- RanksDifferError     2  the processes of a run were started with different settings, data, code or libraries
    |-- DataError               65  a dataset, tokenizer or text file is damaged or does not fit
    |   `-- CheckpointError     65  a checkpoint is damaged or does not fit the run
    |-- MissingInputError       66  a file or folder that was asked for is not there
    |-- OutOfMemoryError        70  the device or the host ran out of memory
    |-- OutputError             73  an output folder is locked by another run or cannot be written
    |-- StorageError            74  reading or writing failed, or there is no room for it (disk full, device error)
    |-- StoppedEarly            75  stopped on request, or before its time was over: start the same command again
    |   `-- StoppedForGood      79  stopped by the file STOP: not to be started again by a machine
    |-- PeerLostError           76  another process hangs or is gone
    |-- LayoutError             78  the layout cannot work with this model or these processes
    |-- NonFiniteLossError      86  the loss or a gradient is not a finite number
    `-- NoProgressError         93  three starts from one step were lost before the next checkpoint: do not requeue

A message says four things in two sentences: what is wrong with which value, what is allowed, the key or
file, and a way out. The command line prints it without a traceback unless `--debug` is given.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class LmtrainError(Exception):
    exit_code = 70
    is_passed_on = False  # another process has met it, and has said so


class UsageError(LmtrainError):
    exit_code = 2


class SettingsError(UsageError):
    """Carries every problem found, so that one run of the command shows them all."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(_listed(self.problems))


class RanksDifferError(UsageError):
    """Raised on every rank, before the first step; rank 0 says what differs."""


_LONGEST = 1000  # characters of one problem: a value can have as many as it likes, and its message cannot


def _listed(problems: Sequence[str]) -> str:
    problems = [p if len(p) <= _LONGEST else f"{p[: _LONGEST // 2]} ... {p[-_LONGEST // 2 :]}" for p in problems]
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} settings are wrong:", *(f"  {i}. {p}" for i, p in enumerate(problems, 1))])


class DataError(LmtrainError):
    exit_code = 65


class CheckpointError(DataError):
    pass


class MissingInputError(LmtrainError):
    exit_code = 66


class OutOfMemoryError(LmtrainError):
    pass


class OutputError(LmtrainError):
    exit_code = 73


class StorageError(LmtrainError):
    exit_code = 74


class StoppedEarly(LmtrainError):
    exit_code = 75


class StoppedForGood(StoppedEarly):
    exit_code = 79


class PeerLostError(LmtrainError):
    """`rank` is to blame, where that is known; `stacks` is a folder that says what all were doing."""

    exit_code = 76

    def __init__(self, message: str, *, rank: int | None = None, stacks: str | None = None) -> None:
        super().__init__(message)
        self.rank, self.stacks = rank, stacks


class LayoutError(LmtrainError):
    """Where settings make the layout, it carries them as a SettingsError does."""

    exit_code = 78

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__(_listed(problems))


class NonFiniteLossError(LmtrainError):
    exit_code = 86


class NoProgressError(LmtrainError):
    exit_code = 93


class LayoutProblem(str):
    """A problem of settings that are each right and together make a layout that cannot work."""


def refusal(problems: Sequence[str]) -> LmtrainError:
    """Return one error with all problems: of the layout if nothing else is wrong, else of the settings."""
    if all(isinstance(problem, LayoutProblem) for problem in problems):
        return LayoutError(*problems)
    return SettingsError(problems)


def passed_on(exit_code: int, message: str) -> LmtrainError:
    """Return an error with the exit code of another process' error, which this process handles as its own."""
    known = {73: OutputError, 74: StorageError, 75: StoppedEarly, 79: StoppedForGood}
    error = known.get(exit_code, LmtrainError)(message)
    error.exit_code, error.is_passed_on = exit_code, True
    return error


def a_few(texts: Iterable[str], separator: str = ", ", most: int = 4) -> str:
    """Return the first texts and how many more there are, for a message."""
    texts = list(texts)
    return separator.join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def brief(value: object, most: int = 200) -> str:
    """Return a text or an error shortened for a message; for any other value, its type alone.

    because: what comes from a file may be as long as the file, and take forever to write out
    """
    text = value if isinstance(value, str) else str(value) if isinstance(value, BaseException) else type(value).__name__
    return text if len(text) <= most else f"{text[:most]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the way out for a misspelt name: "Did you mean X?", or all names if none is near."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]}?"
    return f"Known: {', '.join(known)}." if known else "There is nothing to choose from."
