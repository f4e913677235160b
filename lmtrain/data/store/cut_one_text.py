"""How a text that is one document can be cut into several, for messages that advise it.

Called where a run, or preprocessing, finds that its text is one document. Reads only the beginning of the text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from glob import iglob
from pathlib import Path

_READ_BYTES = 1 << 20
# values of data.text_split, the coarsest first: what ends a document, and how a message names the documents
_ENDS = {"blank-line": (r"\n[ \t]*\r?\n", "paragraphs"), "line": (r"\n", "lines")}


def finer_split(texts: Sequence[str], split: str) -> tuple[str, str] | None:
    """Return the coarsest value of data.text_split that cuts the only file among `texts` into several documents where
    `split` does not, and what it makes documents of: ("blank-line", "paragraphs"). None if there is no such value, if
    there are several files, or if the file is not plain text.
    """
    found = [Path(path) for text in texts for path in iglob(os.path.expanduser(text), recursive=True)]
    files = [file for path in found for file in (path.rglob("*.*") if path.is_dir() else [path])]
    if len(files) != 1:
        return None
    with suppress(OSError, UnicodeDecodeError), open(files[0], "rb") as file:
        data = file.read(_READ_BYTES)
        text = data.decode(errors="strict" if len(data) < _READ_BYTES else "ignore").strip()
        for name, (end, documents) in _ENDS.items():
            if re.search(end, text) and name != split and "\0" not in text:
                return name, documents
    return None
