"""The errors that a user can see, and the exit code of each.

    LmtrainError                70  an error inside lmtrain
    |-- UsageError               2  a wrong command line
    |   |-- SettingsError        2  one or more wrong settings, reported together
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

Ways out are marked within the message. A message is built as text, often in several rooms: a check knows the rule, its
caller the group's name. So a way stands in the text itself, between two control characters, until the error is made:
then the marks are taken out, and `ways` holds what can be typed. The command line applies these to what was typed
(lmtrain/start/other_tools/typed_line.py).

    way("parallel.schedule=1f1b")         type this setting, in place of any other value of its key
    way(".zero=1")                        the same; the key is relative to the group that is checked
    way("--nproc", "2")                   type this option with its value
    way("optim.lr=1", instead_of="lr=1")  in place of this word, key or option
    own(2)                                give the key that the message begins with this value; shown as "2"
    leave_out()                           "Leave it out": remove the key that the message begins with
    fill_in("data.path=PREFIX")           type this with a value of one's own in place of the capitals
    example(0.1)                          a value of that key which is allowed, shown but not meant: it is not applied
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence

_START, _END = "\x02", "\x03"
_MARK = re.compile(f"{_START}(.*?){_END}", re.DOTALL)
_OWN_KEY = "="  # a word that begins so sets the key that the message begins with


class LmtrainError(Exception):
    """The base of every error that a user can see. Ways out that are marked in its message are in `ways`: for each
    problem that it reports, the alternatives to type.
    """

    exit_code = 70
    is_from_peer = False  # True if another process raised this error first and reported it

    def __init__(self, message: object = "") -> None:
        self.marked = str(message)  # with the marks, for a caller that puts the message into another
        text, ways = split_ways(self.marked)
        self.ways: tuple[tuple[Way, ...], ...] = (tuple(ways),)
        super().__init__(text)


class UsageError(LmtrainError):
    exit_code = 2


class SettingsError(UsageError):
    """Wrong settings: the error holds every problem found, so that one run of the command shows them all."""

    problems: tuple[str, ...]
    marked_problems: tuple[str, ...]
    subject: str

    def __init__(self, problems: Sequence[str], subject: str = "settings") -> None:
        _hold_problems(self, problems, subject)


class RanksDifferError(UsageError):
    """An error raised on every rank before the first step; rank 0's message names the difference."""


def _hold_problems(error: SettingsError | LayoutError, problems: Sequence[str], subject: str = "settings") -> None:
    """Make `error` report these problems: `marked_problems` as given, `problems` without the marks of their ways.
    `subject` says what is wrong, if there are several.
    """
    problems = _one_for_each_value(problems)
    split = [split_ways(problem) for problem in problems]
    error.subject, error.marked_problems = subject, tuple(problems)
    error.problems = tuple(type(problem)(text) for problem, (text, _) in zip(problems, split, strict=True))
    LmtrainError.__init__(error, _numbered_list(error.problems, subject))
    error.ways = tuple(tuple(ways) for _, ways in split)


def _one_for_each_value(problems: Sequence[str]) -> list[str]:
    """Return the first problem of each wrong value: one that begins with the KEY=VALUE of an earlier one is left out.

    because: what else is wrong with a value seldom is, once the first problem is mended
    """
    first = {_VALUE.sub(r"\1", problem): problem for problem in reversed(problems)}
    return [problem for problem in problems if problem in first.values()]


_VALUE = re.compile(r"^(\S+= ?\S+).*", re.DOTALL)
_MAX_PROBLEM_CHARS = 1000  # characters of a problem's text; because: a value can be of any length, a message cannot


def _numbered_list(problems: Sequence[str], subject: str) -> str:
    """Return the text of an error with these problems: one as it is, several as numbered lines below "2 settings are
    wrong:", with this `subject`. The middle of a very long line is cut out.
    """
    half = _MAX_PROBLEM_CHARS // 2
    lines = [
        "\n   ".join(t if len(t) <= _MAX_PROBLEM_CHARS else f"{t[:half]} ... {t[-half:]}" for t in problem.split("\n"))
        for problem in problems
    ]
    if len(problems) == 1:
        return lines[0].replace("\n   ", "\n")
    return "\n".join([f"{len(problems)} {subject} are wrong:", *(f"  {i}. {line}" for i, line in enumerate(lines, 1))])


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

    problems: tuple[str, ...]
    marked_problems: tuple[str, ...]
    subject: str

    exit_code = 78

    def __init__(self, *problems: str) -> None:
        _hold_problems(self, problems)


class NonFiniteLossError(LmtrainError):
    exit_code = 86


class NoProgressError(LmtrainError):
    exit_code = 93


# of an error that the same command would meet again in the same way
class AlreadyReported(Exception):
    """The end of a process of which no more is to be said, by `exit_code`: its error, if any, has been reported."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


REFUSED_CODES = tuple(kind.exit_code for kind in (UsageError, DataError, MissingInputError, OutputError, LayoutError))


def is_refusal(error: BaseException) -> bool:
    """Return True if the error, or the exit of a process that has reported it, refuses the command."""
    return getattr(error, "exit_code", None) in REFUSED_CODES


class LayoutProblem(str):
    """A problem of settings that are each valid but together make a layout that cannot work."""


def settings_error(problems: Sequence[str]) -> LmtrainError:
    """Return one error that reports all problems of a run's settings: a LayoutError if all are LayoutProblems, else a
    SettingsError.
    """
    if all(isinstance(problem, LayoutProblem) for problem in problems):
        return LayoutError(*problems)
    return SettingsError(problems)


def joined(errors: Sequence[LmtrainError]) -> LmtrainError:
    """Return one error that reports the problems of all, each once, with the exit code and notes of the first."""
    first = errors[0]
    problems = dict.fromkeys(text for error in errors for text in getattr(error, "marked_problems", (error.marked,)))
    if len(errors) == 1 or len(problems) == 1:
        return first
    of_settings = all(getattr(error, "subject", "") == "settings" for error in errors)
    result = SettingsError([*problems], "settings" if of_settings else "things")
    result.exit_code = first.exit_code
    for note in getattr(first, "__notes__", ()):
        result.add_note(note)
    return result


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


def spelling_hint(name: str, known_names: Iterable[str], mark: Callable[[str], str] = str) -> str:
    """Return a sentence to append to an error about an unknown name: "Did you mean X?", or the list of known names if
    none is similar. `mark` marks the similar name as a way out, such as `own` for the value of the message's key.
    """
    known_names = sorted(known_names)
    matches = difflib.get_close_matches(name, known_names, n=1, cutoff=0.6)
    if matches:
        return f"Did you mean {mark(matches[0])}?"
    return f"Known: {', '.join(known_names)}." if known_names else "There is nothing to choose from."


# because: a run's companion process imports this file, and dataclasses and typing would double its memory
class Way(namedtuple("Way", ("new", "old", "is_example", "is_form"), defaults=((), False, False))):
    """A change of the command line that is a way out of a problem: remove the words, keys or options `old`, and add the
    words `new`; both are tuples of texts. `is_example` marks an allowed value to show, which nobody asked for, and
    `is_form` words to fill in, such as data.path=PREFIX.
    """

    __slots__ = ()

    def with_words(self, change: Callable[[str], str]) -> Way:
        return self._replace(new=tuple(map(change, self.new)), old=tuple(map(change, self.old)))


def way(*words: str, instead_of: str | Iterable[str] = (), shown: str | None = None) -> str:
    """Return the text of `words` to type, marked as a way out. `instead_of` are the words, keys or options that they
    replace; a key's or option's own other values need not be named. `shown` replaces the text that a person reads.
    """
    return _marked(Way(words, (instead_of,) if isinstance(instead_of, str) else tuple(instead_of)), shown)


def own(value: object) -> str:
    """Return a value to give to the key that the message begins with, marked as a way out."""
    return _marked(Way((f"{_OWN_KEY}{value}",)), str(value))


def example(value: object) -> str:
    """Return an allowed value of the key that the message begins with, marked as one that is shown but not applied."""
    return _marked(Way((f"{_OWN_KEY}{value}",), is_example=True), str(value))


def fill_in(*words: str, instead_of: str | Iterable[str] = (), shown: str | None = None) -> str:
    """Return words with a place in capitals to fill in, such as data.path=PREFIX, marked as a way out. `instead_of` and
    `shown` are as for `way`.
    """
    old = (instead_of,) if isinstance(instead_of, str) else tuple(instead_of)
    return _marked(Way(words, old, is_form=True), " ".join(words) if shown is None else shown)


def leave_out(*keys: str, shown: str = "Leave it out") -> str:
    """Return `shown`, marked as the advice to remove the words of these keys, options or arguments: by default those
    of the key that the message begins with.
    """
    return _marked(Way((), keys or (_OWN_KEY,)), shown)


def within_group(group: str, message: str, *, applies: Callable[[str], bool] | None = None) -> str:
    """Return the message "KEY=VALUE ..." on a setting of `group` as one on GROUP.KEY, the relative words of its ways
    included: those with a leading dot, or those of which `applies` says that their key is one of the group.
    """
    if not group:
        return message

    def moved(word: str) -> str:
        relative = word.removeprefix(".")
        is_inside = word != relative if applies is None else applies(relative.partition("=")[0])
        return f".{group}.{relative}" if is_inside else word

    return f"{group}.{_with_words(message, moved)}"


def with_own_key(key: str, message: str) -> str:
    """Return a message in whose ways the own key is `key`, which may begin with "." if it is relative."""

    def named(word: str) -> str:
        return f"{key}{'' if word == _OWN_KEY else word}" if word.startswith(_OWN_KEY) else word

    return _with_words(message, named)


def split_ways(message: str) -> tuple[str, list[Way]]:
    """Return the text of a message that a person reads, and the ways that were marked in it, in their order."""
    ways: list[Way] = []
    return with_other_ways(message, ways.append), ways


def with_other_ways(message: str, change: Callable[[Way], Way | None]) -> str:
    """Return a message with each of its ways replaced by `change` of it, for a verb that takes other words than those
    in which the message was written. Where the result is None, the text of the way stays, without a mark.
    """
    option = re.match(r"--?[A-Za-z][\w-]*", message)
    key = option[0] if option else _MARK.sub("", message).partition("=")[0].split(" ")[-1]

    def changed(way: Way, shown: str | None) -> str:
        # because: what is to be typed may begin with a dot itself, as --suffix .py
        new = tuple(word.removeprefix(".") if "=" in word else word for word in way.new)
        way = way._replace(new=new, old=tuple(word.removeprefix(".") for word in way.old))
        other = change(way)
        if other is not None:
            return _marked(other, shown)
        return " ".join(map(shell_quoted, way.new)) if shown is None else shown

    return _sub_marks(with_own_key(key, message), changed)


def _with_words(message: str, change: Callable[[str], str]) -> str:
    """Return the message with `change` applied to every word of its ways."""
    return _sub_marks(message, lambda way, shown: _marked(way.with_words(change), shown))


def _marked(way: Way, shown: str | None) -> str:
    """Return the mark of a way; `shown` is the text that a person reads, by default the way's new words."""
    return f"{_START}{json.dumps([way.new, way.old, way.is_example, way.is_form, shown])}{_END}"


def _sub_marks(message: str, change: Callable[[Way, str | None], str]) -> str:
    """Return a message with each mark replaced by `change` of its way and the text to show."""

    def replace(match: re.Match[str]) -> str:
        try:
            new, old, is_example, is_form, shown = json.loads(match[1])
        except ValueError:
            return match[0]  # because: the characters came from what a user typed
        return change(Way(tuple(new), tuple(old), is_example, is_form), shown)

    return _MARK.sub(replace, message)


def shell_quoted(word: str) -> str:
    """Return `word` in quotes as a POSIX shell needs it; unchanged if it needs none."""
    if re.fullmatch(r"[\w@%+=:,./-]+", word):
        return word
    return shlex.quote(word) if re.search(r'["$`\\!]', word) else f'"{word}"'
