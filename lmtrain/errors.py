"""Every error that a user can see, and the exit code of each.

    LmtrainError                70  an error inside lmtrain
    |-- UsageError               2  a wrong command line
    |   |-- SettingsError        2  one or more wrong settings, all reported at once
    |   `-- RanksDifferError     2  the processes of a run were started with different settings, data, code or libraries
    |-- DataError               65  a dataset, tokenizer or text file is damaged or does not fit
    |   `-- CheckpointError     65  a checkpoint is damaged or does not fit the run
    |-- MissingInputError       66  a requested file or folder does not exist
    |-- OutOfMemoryError        70  the device or the host ran out of memory
    |-- OutputError             73  an output folder is locked by another run or cannot be written
    |-- StorageError            74  reading or writing failed, or the storage is full (disk full, device error)
    |-- StoppedEarly            75  stopped on request, or before its time limit: start the same command again
    |   `-- StoppedForGood      79  stopped by the file STOP: a scheduler must not requeue the run
    |-- PeerLostError           76  another process hangs or is gone
    |-- LayoutError             78  the layout cannot work with this model or these processes
    |-- NonFiniteLossError      86  the loss or a gradient is not a finite number
    `-- NoProgressError         93  three starts from one step were lost before the next checkpoint: do not requeue

A message has four parts in two sentences: what is wrong with which value, what is allowed, the key or file, and a way
out. The command line prints the message without a traceback unless `--debug` is given.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class LmtrainError(Exception):
    """The base of every error that a user can see."""

    exit_code = 70
    is_passed_on = False  # True if another process raised this error first and reported it


class UsageError(LmtrainError):
    exit_code = 2


class SettingsError(UsageError):
    """Wrong settings: the error holds every problem found, so that one run of the command shows them all."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(_listed(self.problems))


class RanksDifferError(UsageError):
    """An error raised on every rank before the first step; rank 0's message names the difference."""


_LONGEST = 1000  # characters of a problem's text; because: a value can be of any length, a message cannot


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
    """A lost peer: `rank` is the rank to blame, or None if unknown; `stacks` is a folder with all ranks' stack dumps.
    """

    exit_code = 76

    def __init__(self, message: str, *, rank: int | None = None, stacks: str | None = None) -> None:
        super().__init__(message)
        self.rank, self.stacks = rank, stacks


class LayoutError(LmtrainError):
    """A layout that cannot work; if settings cause it, `problems` holds all of them, as in a SettingsError."""

    exit_code = 78

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__(_listed(problems))


class NonFiniteLossError(LmtrainError):
    exit_code = 86


class NoProgressError(LmtrainError):
    exit_code = 93


class LayoutProblem(str):
    """A problem of settings that are each valid but together make a layout that cannot work."""


def refusal(problems: Sequence[str]) -> LmtrainError:
    """Return the error that reports all these problems: a LayoutError if all are LayoutProblems, else a SettingsError.
    """
    if all(isinstance(problem, LayoutProblem) for problem in problems):
        return LayoutError(*problems)
    return SettingsError(problems)


def passed_on(exit_code: int, message: str) -> LmtrainError:
    """Build the error with which this process repeats an error that another process raised and reported."""
    known = {73: OutputError, 74: StorageError, 75: StoppedEarly, 79: StoppedForGood}
    error = known.get(exit_code, LmtrainError)(message)
    error.exit_code, error.is_passed_on = exit_code, True
    return error


def a_few(texts: Iterable[str], separator: str = ", ", most: int = 4) -> str:
    """Join the first `most` texts and state how many more there are, so that a message stays short."""
    texts = list(texts)
    return separator.join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def brief(value: object, most: int = 200) -> str:
    """Return the text of a string or exception, cut to `most` characters; for another object, the type's name.

    because: a value from a file may be as long as the file, and converting it to text may take very long
    """
    text = value if isinstance(value, str) else str(value) if isinstance(value, BaseException) else type(value).__name__
    return text if len(text) <= most else f"{text[:most]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the hint for a misspelt name: "Did you mean X?", or the whole list if no known name is close."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]}?"
    return f"Known: {', '.join(known)}." if known else "There is nothing to choose from."
