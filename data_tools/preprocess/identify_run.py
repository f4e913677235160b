"""What identifies a run of preprocessing, its inputs, its tokenizer and its options: hashed, and compared with those of
another run. Called by resumable_dataset_writer.py, which records it.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmtrain.errors import join_few, leave_out, way

FILES, TOKENIZER = "files", "tokenizer"
Identity = dict[str, Any]  # options by the name that is typed, and the other facts; all values are of JSON


def identity_hash(identity: Identity | None) -> str | None:
    """Return a hash of a run's identity, None if it has none."""
    return None if identity is None else hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def describe_other_run(folder: Path, old: Identity, new: Identity) -> str:
    """Return the message that `folder` holds unfinished work of the run `old`, which differs from the run `new`: what
    differs, and both ways to go on. `old` is empty if it is unknown.
    """
    anew = f"add {way('--overwrite')} to begin anew"
    changed = [name for name in old if old[name] != new.get(name)]
    options = [name for name in changed if name.startswith("--")]
    if options:
        was, now = (" ".join(_typed(name, run.get(name)) for name in options) for run in (old, new))
        back = " and ".join(_way_back(name, old[name]) for name in options)
        return (
            f"{folder} holds unfinished work of a run with {was}, and this one has {now}. {back} to go on with it, "
            f"or {anew}."
        )
    what = "its input or its options have changed, or another version of lmtrain began it"
    if FILES in changed:
        what = _changed_files(old[FILES], new.get(FILES, []))
    elif changed:
        what = f"the {changed[0].removeprefix('the ')} was another then"
    return f"{folder} holds unfinished work, and {what}. Give what it began with to go on with it, or {anew}."


def _typed(option: str, value: Any) -> str:
    """Return an option and its value as words of a command line, or "no OPTION" if it is not set."""
    if value is None or value is False or value == []:
        return f"no {option}"
    return option if value is True else shlex.join(_words(option, value))


def _words(option: str, value: Any) -> list[str]:
    return [word for each in (value if isinstance(value, list) else [value]) for word in (option, str(each))]


def _way_back(option: str, old: Any) -> str:
    """Return the beginning of a sentence that gives an option its old value again."""
    if option == "--append-eod":
        words = ("--append-eod", "--no-append-eod")
        return f"Use {way(words[not old], instead_of=words[bool(old)])}"
    if old is None or old is False or old == []:
        return leave_out(option, shown=f"Leave {option} out")
    return f"Use {way(option) if old is True else way(*_words(option, old))}"


def _changed_files(old: Sequence[Sequence[Any]], new: Sequence[Sequence[Any]]) -> str:
    """Return a clause that says how the input files of two runs differ; each is a path, a size and a time."""
    was, now = ({path: state for path, *state in files} for files in (old, new))
    if missing := [path for path in was if path not in now]:
        return f"{join_few(missing)} {'was' if len(missing) == 1 else 'were'} among its input files"
    if added := [path for path in now if path not in was]:
        return f"{join_few(added)} {'was' if len(added) == 1 else 'were'} not among its input files"
    if changed := [path for path in was if was[path] != now[path]]:
        return f"the content or the time of {join_few(changed)} has changed since"
    return "its input files were in another order"
