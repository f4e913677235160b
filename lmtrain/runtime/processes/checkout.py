"""The commit of a checkout, read from git's files. Called by process for the bug report. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}")


def git_commit(root: Path) -> str | None:
    """The commit of the checkout with this root, read from its files; None where there is no checkout."""
    git = root / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head if _COMMIT.fullmatch(head) else None
        ref = head.removeprefix("ref: ")
        if (git / ref).is_file():
            lines = [f"{(git / ref).read_text().strip()} {ref}"]
        else:
            lines = (git / "packed-refs").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    found = [line.split()[0] for line in lines if line.endswith(f" {ref}")]
    return found[0] if found and _COMMIT.fullmatch(found[0]) else None
