"""The texts that evaluations score, read as `lmtrain preprocess` reads them.

Called by evaluations of a checkpoint and by those during training. Torch-free.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from data_tools.read.find_input_files import Source

if TYPE_CHECKING:
    from lmtrain.eval.read_texts import TextInput


def read_texts(sources: list[Source], key: str, report: Callable[[int], None]) -> TextInput:
    """Read all documents of the input files `sources` into memory and return them with a SHA-256, which is that of the
    file if there is only one, else of all documents.

    `key` is the key or column of the text; `report` receives the number of bytes read.
    """
    from data_tools.read.parse_chunks_and_bad_lines import ALL_READ, SourceTexts
    from lmtrain.eval.read_texts import TextInput

    texts = SourceTexts(sources, key, report=lambda done: None if done == ALL_READ else report(done))
    texts_with_paths = list(texts.iterate_with_paths())
    documents = [text for _, text in texts_with_paths]
    files = {str(path): count for path, count in Counter(path for path, _ in texts_with_paths).items()}
    if len(sources) == 1 and sources[0].num_bytes:
        with open(sources[0].path, "rb") as file:
            return TextInput(
                str(sources[0].path), documents, hashlib.file_digest(file, "sha256").hexdigest(), "the file", files
            )
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.encode() + b"\0")
    name = str(sources[0].path) if len(sources) == 1 else f"{len(sources)} files, the first {sources[0].path}"
    return TextInput(name, documents, digest.hexdigest(), "the documents, each with a zero byte behind it", files)
