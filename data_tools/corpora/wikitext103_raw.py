"""Recipe for WikiText-103 (Merity and others, 2016), raw, for training: articles of Wikipedia.

Found by corpus_definition.py.

An article begins at a first-level heading between two blank lines. Texts are unchanged, including the blank line before
the heading: concatenated they are the published file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from data_tools.corpora.corpus_definition import DocumentsBySplit, Recipe, split_from_name
from data_tools.corpora.download import RemoteFile
from data_tools.corpus.flow.run_one_corpus_step_in_workers import Tally
from data_tools.read.compressed_and_parquet_readers import archive_contents
from lmtrain.errors import DataError

MEMBERS = tuple(f"wiki.{split}.{kind}" for kind in ("raw", "tokens") for split in ("train", "valid", "test"))
_HEADING = re.compile(r" = (?!= )(.*[^ =].*|.) = ?\n?")


def read(path: Path, tally: Tally) -> DocumentsBySplit:
    """Yield (split, document) for each article of WikiText-103, from its zip archive or from a single file such as
    wiki.test.tokens; both the raw and the word-level release are accepted.
    """
    for name, file in archive_contents(path, lambda name, _: name in MEMBERS):
        split = split_from_name(name)
        for number, (title, text) in enumerate(articles(_decode_lines(file, path))):
            yield split, {"id": f"wikitext103/{split}/{number}", "title": title, "text": text}


def articles(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Split the lines of WikiText into articles at first-level headings, and yield (title, text) of each. Lines before
    the first heading belong to the first article.
    """
    article: list[str] = []
    title = ""
    previous = "\n"
    current: str | None = None
    for line in chain(lines, [""]):
        if current is not None:
            heading = _HEADING.fullmatch(current)
            if heading and not previous.strip() and not line.strip():
                blank = article.pop() if article and not article[-1].strip() else ""
                if title:
                    yield title, "".join(article)
                    article = []
                title = heading[1].strip()
                article += [blank] if blank else []
            article.append(current)
            previous = current
        current = line
    if title:
        yield title, "".join(article)


def _decode_lines(file: Iterable[bytes], path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file as text. Raise DataError with `path` and the line's number if a line is not
    UTF-8.
    """
    for number, line in enumerate(file, 1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text in line {number}. Get it again.") from error


RECIPE = Recipe(
    name="wikitext103_raw",
    about="WikiText-103, raw: 28,475 articles of Wikipedia, train, valid and test",
    files=(
        RemoteFile(
            "wikitext-103-raw-v1.zip",
            (
                "https://wikitext.smerity.com/wikitext-103-raw-v1.zip",
                "https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip",
                "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-raw-v1.zip",
            ),
            "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
            191_984_949,
        ),
    ),
    read=read,
    takes="wikitext-103-raw-v1.zip, wikitext-103-v1.zip, or files such as wiki.test.tokens",
)
