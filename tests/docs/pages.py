"""Pages as a reader uses them: their fenced blocks in order, and the commands in these.

Called by tests/docs/test_commands.py, which runs them, and tests/house/test_docs.py, which looks at how they are spelt.

A block that no test can run has a comment before it that says why, in one of the words of WHY_NOT:

    <!-- not run: needs GPUs -->

    ```console
    $ lmtrain pretrain ... --nproc 8
    ```
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = [
    ROOT / "docs/reference" / f"{name}.md" for name in ("cli", "settings", "errors", "python", "model_families")
]
WHY_NOT = (
    "needs GPUs", "needs a cluster", "needs the network", "needs your files", "needs a browser", "takes minutes",
    "changes your shell", "needs pandas",
)  # fmt: skip
_BLOCK = re.compile(r"^(?:<!-- not run: ([^\n]*) -->\n\n?)?```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"(?:# @package _global_\n)?# ([\w./-]+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    kind: str  # console, bash, text, yaml, ...
    text: str
    why_not: str | None  # why it is not run
    line: int  # of the page, where it begins

    @property
    def commands(self) -> list[str]:
        """What is typed: lines after `$ `, and all lines of a script. A backslash joins lines."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.kind == "bash":
            return [line for line in lines if line.strip() and not line.startswith("#")]
        return [line[2:] for line in lines if line.startswith("$ ")]

    @property
    def printed(self) -> str:
        """What stands below a single command."""
        return "\n".join(line for line in self.text.replace("\\\n", " ").splitlines() if not line.startswith("$ "))

    @property
    def file(self) -> str | None:
        """The path in the first line of a block that shows a file: `# configs/model/mine.yaml`."""
        found = _FILE.match(self.text)
        return found[1] if found and self.kind in ("yaml", "python", "toml") else None


def blocks(text: str) -> list[Block]:
    return [
        Block(found[2], found[3], found[1], text.count("\n", 0, found.start(2)) + 1) for found in _BLOCK.finditer(text)
    ]


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of every command of ours that is to succeed, whatever starts it."""
    for block in blocks(text):
        for line in block.commands if block.kind in ("console", "bash") else ():
            words = shlex.split(line, comments=True)
            if "lmtrain" in words and words[0] != "git":  # because: there it is a folder
                yield list(takewhile(lambda word: word not in ("|", "&&"), words[words.index("lmtrain") :]))


def pages_with_commands() -> list[Path]:
    """README.md and the site's pages, but for those that are generated."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        page for page in pages
        if page not in GENERATED and any(block.commands for block in blocks(page.read_text("utf-8")))
    ]  # fmt: skip
