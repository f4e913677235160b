"""What is known of a published file before it is here: its addresses, its size and its SHA-256.

And what is said to who has to bring it by hand. Called by recipe.py, published.py and the files of corpora.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RemoteFile:
    """One file at any of several addresses, or at none where it comes in an archive; they all give the same bytes."""

    name: str
    urls: tuple[str, ...]
    sha256: str
    num_bytes: int

    def lines(self) -> Iterator[str]:
        yield f"  {self.name}, {self.num_bytes:,} bytes, SHA-256 {self.sha256}"
        yield from (f"    {url}" for url in self.urls)


def how_to_bring(name: str, output: Path, files: Sequence[RemoteFile], archives: Sequence[RemoteFile] = ()) -> str:
    """What to bring by other means, where to put it, and what to type then."""
    lines = [line for file in files for line in file.lines()]
    if archives:
        lines.append("also to be had in" if any(file.urls for file in files) else "to be had in")
        lines += [line for archive in archives for line in archive.lines()]
    again, to = f"  lmtrain corpus get {name}", f"--output {shlex.quote(str(output))}"
    what = "the files, or an archive of that name," if archives else "it"
    lines += [f"Put {what} into {output / 'source'} and run", f"{again} {to}"]
    return "\n".join([*lines, f"or leave {'them' if archives else 'it'} elsewhere and run", f"{again} PATH {to}"])
