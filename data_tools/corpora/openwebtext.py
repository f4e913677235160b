"""Recipe for OpenWebText (Gokaslan and Cohen, 2019): web pages linked from Reddit, like GPT-2's corpus.

The archive is a tar of tars, which are read as streams, page by page: nothing is unpacked to disk, and no name in the
archive becomes a path. Found by corpus_definition.py.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from data_tools.corpora.corpus_definition import DocumentsBySplit, Recipe
from data_tools.corpora.download import RemoteFile
from data_tools.corpus.flow.run_one_corpus_step_in_workers import Tally
from data_tools.read.compressed_and_parquet_readers import as_file, open_decompressed, read_stream
from data_tools.read.cut_files_into_chunks import MAX_DOC_BYTES
from lmtrain.errors import DataError


def read(path: Path, tally: Tally) -> DocumentsBySplit:
    """Yield ("train", document) for each web page in OpenWebText's archive, or in one of the archives inside it
    (urlsf_subset00-1_data.xz). Pages that are left out are counted in `tally`.
    """
    try:
        with open_decompressed(path) as file:
            for name, text in _pages(file, path, tally, depth=0):
                yield "train", {"id": f"openwebtext/{name}", "text": text}
    except tarfile.TarError as error:
        raise DataError(f"{path} is not a complete tar archive ({error}). Get it again.") from error


def _pages(file: IO[bytes], path: Path, tally: Tally, depth: int) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for each web page in the tar archive `file`. At depth 0, also read the archives inside it,
    which have depth 1. `path` is for messages; pages that are left out are counted in `tally`.
    """
    with tarfile.open(fileobj=file, mode="r|") as archive:
        for member in archive:
            inner = archive.extractfile(member) if member.isreg() else None
            if inner is None:
                continue
            if member.name.endswith(".xz") and depth == 0:
                yield from _pages(as_file(read_stream(inner, "xz"), path), path, tally, depth + 1)
            elif member.name.endswith(".txt"):
                if member.size > MAX_DOC_BYTES:
                    tally.drop("too long")
                    continue
                try:
                    yield member.name.rsplit("/", 1)[-1].removesuffix(".txt"), inner.read().decode()
                except UnicodeDecodeError:
                    tally.drop("not UTF-8")
    while file.read(1 << 20):  # because: only reading to the end detects a truncated archive
        pass


RECIPE = Recipe(
    name="openwebtext",
    about="OpenWebText: 8 million web pages, 38 GB of text (12.9 GB to fetch)",
    files=(
        RemoteFile(
            "openwebtext.tar.xz",
            ("https://zenodo.org/records/3834942/files/openwebtext.tar.xz?download=1",),
            "9fe39d154c5bc67da8c359415372b79510eb1e2edb0d035fe4f7fc3a732b9336",
            12_880_189_440,
        ),
    ),
    read=read,
    takes="openwebtext.tar.xz, or one of the urlsf_subset archives in it",
)
