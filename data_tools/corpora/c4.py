"""Recipe for C4 and corpora of its form: compressed JSON lines with text, url and timestamp.

Found by corpus_definition.py.

There are thousands of shards and many variants, so nothing is fetched by name. The url becomes the id; other keys are
kept.
"""

from __future__ import annotations

from pathlib import Path

from data_tools.corpora.corpus_definition import DocumentsBySplit, Recipe, split_from_name
from data_tools.corpus.flow.run_one_corpus_step_in_workers import ReadOptions, Tally, find_step_sources, read_documents
from data_tools.read.parse_chunks_and_bad_lines import OnError


def read(path: Path, tally: Tally) -> DocumentsBySplit:
    """Yield (split, document) for each line of a C4 shard. The file's name tells the split. Bad lines are left out and
    counted in `tally`.
    """
    split = split_from_name(path.name)
    options = ReadOptions(on_error=OnError.SKIP)
    for position, document in read_documents(find_step_sources([path]), options, tally.drop_bad):
        yield split, {"id": document.get("url") or f"c4/{path.name}/{position}"} | document


RECIPE = Recipe(
    name="c4",
    about="C4 and corpora of its form: shards of compressed JSON lines",
    files=(),
    read=read,
    takes="shards such as c4-train.00000-of-01024.json.gz",
)
