"""What is said of texts whose lines end otherwise than with a line feed. Such line ends stay as they are in a dataset.

Called by preprocess before it reads its inputs. It reads only the beginnings of files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress

from data_tools.read.find_input_files import Source
from lmtrain.errors import join_few, shell_quoted
from lmtrain.units import plural

_BEGINNING_BYTES = 1 << 16
_MAX_FILES = 1000  # because: a notice must be quick
# line end -> (its name, a command that makes line feeds of it, without the names of the files)
_KINDS = {
    rb"\r\n": ("\\r\\n, as on Windows", "tr -d '\\r'"),
    rb"\r(?!\n|$)": ("\\r alone, as on old Macs", "tr '\\r' '\\n'"),
}


def line_end_notices(sources: Iterable[Source]) -> Iterator[str]:
    """Yield a notice for each other kind of line end in the beginnings of text files, with how many files have it and
    how to replace it. Where lines are documents, what stands before a line feed is cut off, and not named.
    """
    texts = [source for source in sources if source.is_text and not source.codec and source.num_bytes][:_MAX_FILES]
    found: dict[bytes, list[str]] = {ends: [] for ends in _KINDS}
    for source in texts:
        with suppress(OSError), open(source.path, "rb") as file:
            beginning = file.read(_BEGINNING_BYTES)
            for ends, paths in found.items():
                if re.search(ends, beginning) and not (ends == rb"\r\n" and source.kind == "lines"):
                    paths.append(str(source.path))
    for ends, paths in found.items():
        name, command = _KINDS[ends]
        if paths:
            have = "has" if len(paths) == 1 else "have"
            yield (
                f"{plural(len(paths), 'text file')} ({join_few(paths, max_shown=3)}) {have} line ends {name}, which "
                f"are kept in the text: `{command} < {shell_quoted(paths[0])} > NEW` writes it with \\n"
            )
