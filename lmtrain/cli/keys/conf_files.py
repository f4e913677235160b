"""The files of conf/ and of a user's own folder: which one counts, what each sets and says of itself. Torch-free.

Called by the reference pages, `lmtrain config` and shell completion; what the files compose to is for lmtrain.config.
"""

from __future__ import annotations

import re
from pathlib import Path

from lmtrain.config.compose import conf_dir
from lmtrain.config.yaml_file import MAX_BYTES


def config_file(group: str, name: str, config_dir: Path | None = None) -> Path | None:
    """The one that counts: a user's folder comes before ours."""
    roots = [*([config_dir] if config_dir else []), conf_dir()]
    return next((path for root in roots if (path := root / group / f"{name}.yaml").is_file()), None)


def default_choices() -> dict[str, str]:
    """What conf/pretrain.yaml picks from each group."""
    text = (conf_dir() / "pretrain.yaml").read_text(encoding="utf-8")
    return {group: name for group, name in re.findall(r"^  - (\w+): (\w+)", text, re.MULTILINE) if name != "null"}


def part_of_root(name: str) -> tuple[Path, str] | None:
    """A part of the root config that is no group, such as `train`, as it is written there."""
    path = conf_dir() / "pretrain.yaml"
    found = re.search(rf"^{re.escape(name)}:\n(?: .*\n|\n)+", path.read_text(encoding="utf-8"), re.MULTILINE)
    return (path, found[0].rstrip() + "\n") if found else None


def text_of(path: Path) -> str:
    """A config as it is written, for people: at most as much of it as a config may have."""
    with path.open("rb") as file:
        return file.read(MAX_BYTES).decode("utf-8", errors="replace")


def headline(path: Path) -> str:
    """What a config file says of itself: the first line of the comment at its top, or that beside its kind."""
    for line in text_of(path).splitlines():
        if not line.startswith("# @package"):
            return line.lstrip("# ") if line.startswith("#") else CommentedFile(path).comments.get("kind", "")
    return ""


class CommentedFile:
    """The dotted keys of a YAML file with their plain values and their comments: beside the key, or right above it."""

    def __init__(self, path: Path) -> None:
        self.values: dict[str, str] = {}
        self.comments: dict[str, str] = {}
        above: list[str] = []
        parents: list[tuple[int, str]] = []  # indentation and name of every key that is still open
        for line in text_of(path).splitlines():
            text = line.strip()
            if text.startswith("#"):
                above.append(text.lstrip("# "))
                continue
            name, colon, rest = text.partition(":")
            if not text or not colon or not name.replace("_", "").isalnum():
                above = []
                continue
            indent = len(line) - len(line.lstrip())
            parents = [*((i, n) for i, n in parents if i < indent), (indent, name)]
            key = ".".join(n for _, n in parents)
            value, _, beside = f"{rest} ".partition(" #")
            if value.strip():
                self.values[key] = value.strip()
            if comment := beside.strip() or " ".join(above):
                self.comments[key] = comment
            above = []
