"""What a run's folder holds, read however it was left: running, killed, damaged. What is not there is said.

Called by report and runs. `inspect` refuses what is damaged; a page or a table shows the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmtrain.errors import LmtrainError, MissingInputError, brief

_MARKS = ("metrics.jsonl", "log.txt", "environment.json", "checkpoints")  # of which a run has at least one
_DEEPEST = 4  # folders between the one asked for and a run


@dataclass
class Seen:
    path: Path
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    stop: dict[str, Any] | None = None
    state: str = "killed"
    problems: list[str] = field(default_factory=list)

    @property
    def why(self) -> str:
        """Why it stopped, in the words of stop.json."""
        if self.stop is None:
            return "left no stop.json" if self.state == "killed" else ""
        return "" if self.state == "finished" else str(self.stop.get("cause", "?"))


def is_run(path: Path) -> bool:
    if (path / "metrics.jsonl").is_file():
        return True
    return (path / "config.json").is_file() and any((path / name).exists() for name in _MARKS)


def see(path: Path, name: str | None = None) -> Seen:
    from lmtrain.cli.inspect.run_view import state_of
    from lmtrain.train.stop_file import STOP

    if not is_run(path):
        raise MissingInputError(
            f"{path} is not the folder of a run: it has neither metrics.jsonl nor config.json with what runs leave. "
            "Give a folder that `lmtrain pretrain` has written, its run.dir."
        )
    seen = Seen(path, name or path.resolve().name)
    seen.settings = _read(seen, "config.json", "its settings, layout and model are not known") or {}
    seen.environment = _read(seen, "environment.json", "versions and machine are not known") or {}
    seen.stop = _read(seen, STOP, "why it stopped is not known") if (path / STOP).exists() else None
    try:
        seen.state = str(state_of(path, seen.stop)["state"])
    except (LmtrainError, OSError) as error:
        seen.problems.append(f"whether it still runs is not known: {brief(error)}")
    return seen


def see_all(paths: list[Path]) -> list[Seen]:
    """With names that tell them apart, as short as that allows."""
    whole = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, whole), default=1) + 1):
        names = ["/".join(parts[-length:]) for parts in whole]
        if len(set(names)) == len(names):
            break
    return [see(path, name) for path, name in zip(paths, names, strict=True)] if paths else []


def find_runs(folder: Path) -> Iterator[Path]:
    """All runs in a folder, sorted; nothing is looked for inside of a run."""
    yield from _below(folder, _DEEPEST)


def _below(folder: Path, deep: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    try:
        inside = sorted(one for one in folder.iterdir() if one.is_dir() and not one.is_symlink())
    except OSError:
        return
    for one in inside if deep else ():
        if not one.name.startswith("."):
            yield from _below(one, deep - 1)


def _read(seen: Seen, name: str, without: str) -> dict[str, Any] | None:
    from lmtrain.runtime.files.files import read_json

    try:
        found = read_json(seen.path / name)
    except (LmtrainError, OSError) as error:
        why = "is not there" if not (seen.path / name).exists() else f"cannot be read ({brief(error, 120)})"
        seen.problems.append(f"{name} {why}: {without}")
        return None
    if not isinstance(found, dict):
        seen.problems.append(f"{name} holds no object of JSON: {without}")
        return None
    return found


def flat(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """optim.lr and its like, each with its value; parts of a list by their number."""
    if isinstance(tree, dict) and (tree or not key):
        for name, value in tree.items():
            yield from flat(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list) and any(isinstance(one, dict) for one in tree):
        for number, value in enumerate(tree):
            yield from flat(value, f"{key}[{number}]")
    else:
        yield key, tree


def differences(trees: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Keys whose values are not the same in all, with the value in each; None where one lacks the key."""
    each = [dict(flat(tree)) for tree in trees]
    keys = list(dict.fromkeys(key for one in each for key in one))
    found = {key: [one.get(key) for one in each] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}
