"""The errors that a user can see, and the exit code of each.

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
    is_from_peer = False  # True if another process raised this error first and reported it


class UsageError(LmtrainError):
    exit_code = 2


class SettingsError(UsageError):
    """Wrong settings: the error holds every problem found, so that one run of the command shows them all."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(_numbered_list(self.problems))


class RanksDifferError(UsageError):
    """An error raised on every rank before the first step; rank 0's message names the difference."""


_MAX_PROBLEM_CHARS = 1000  # characters of a problem's text; because: a value can be of any length, a message cannot


def _numbered_list(problems: Sequence[str]) -> str:
    """Return the text of an error with these problems: one as it is, several as numbered lines. The middle of a very
    long problem is cut out.
    """
    half = _MAX_PROBLEM_CHARS // 2
    problems = [p if len(p) <= _MAX_PROBLEM_CHARS else f"{p[:half]} ... {p[-half:]}" for p in problems]
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
        super().__init__(_numbered_list(problems))


class NonFiniteLossError(LmtrainError):
    exit_code = 86


class NoProgressError(LmtrainError):
    exit_code = 93


class LayoutProblem(str):
    """A problem of settings that are each valid but together make a layout that cannot work."""


def settings_error(problems: Sequence[str]) -> LmtrainError:
    """Return one error that reports all problems of a run's settings: a LayoutError if all are LayoutProblems, else a
    SettingsError.
    """
    if all(isinstance(problem, LayoutProblem) for problem in problems):
        return LayoutError(*problems)
    return SettingsError(problems)


def error_from_peer(exit_code: int, message: str) -> LmtrainError:
    """Return the error to raise in this process for an error that another process raised and reported, with the same
    exit code.
    """
    error_types = {73: OutputError, 74: StorageError, 75: StoppedEarly, 79: StoppedForGood}
    error = error_types.get(exit_code, LmtrainError)(message)
    error.exit_code, error.is_from_peer = exit_code, True
    return error


def join_few(texts: Iterable[str], separator: str = ", ", max_shown: int = 4) -> str:
    """Join the first `max_shown` texts and append "and N more" for the rest, so that a message stays short."""
    texts = list(texts)
    return separator.join(texts[:max_shown]) + (f" and {len(texts) - max_shown} more" if len(texts) > max_shown else "")


def shorten(value: object, max_chars: int = 200) -> str:
    """Return a string's or exception's text, cut to `max_chars` characters; for another object, its type's name.

    because: a value from a file may be as long as the file, and converting it to text may take very long
    """
    text = value if isinstance(value, str) else str(value) if isinstance(value, BaseException) else type(value).__name__
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."


def spelling_hint(name: str, known_names: Iterable[str]) -> str:
    """Return a sentence to append to an error about an unknown name: "Did you mean X?", or the list of known names if
    none is similar.
    """
    known_names = sorted(known_names)
    matches = difflib.get_close_matches(name, known_names, n=1, cutoff=0.6)
    if matches:
        return f"Did you mean {matches[0]}?"
    return f"Known: {', '.join(known_names)}." if known_names else "There is nothing to choose from."
