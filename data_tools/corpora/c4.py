"""Recipe for C4 and corpora of its form: compressed JSON lines with text, url and timestamp. Found by recipe.py.

There are thousands of shards and many variants, so nothing is fetched by name. The url becomes the id; other keys are
kept.
"""

from __future__ import annotations

from pathlib import Path

from data_tools.corpora.recipe import Recipe, SplitDocuments, split_of
from data_tools.corpus.flow.steps import Reading, Tally, find_files, read_documents
from data_tools.read.content import OnError


def read(path: Path, tally: Tally) -> SplitDocuments:
    split = split_of(path.name)
    for position, document in read_documents(find_files([path]), Reading(on_error=OnError.SKIP), tally.drop_bad):
        yield split, {"id": document.get("url") or f"c4/{path.name}/{position}"} | document


RECIPE = Recipe(
    name="c4",
    about="C4 and corpora of its form: shards of compressed JSON lines",
    files=(),
    read=read,
    takes="shards such as c4-train.00000-of-01024.json.gz",
)
