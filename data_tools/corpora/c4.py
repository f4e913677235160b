"""C4 and corpora of its form: compressed JSON lines with text, url and timestamp. Found by recipe.py.

There are thousands of shards and many variants, so nothing is fetched by name. The url becomes the id; other keys stay.
"""

from __future__ import annotations

from pathlib import Path

from data_tools.corpora.recipe import Documents, Recipe, split_of
from data_tools.corpus.steps import Tally
from data_tools.read.records import SUFFIXES, WHOLE, Reading, cut, read_block
from lmtrain.errors import UsageError


def read(path: Path, tally: Tally) -> Documents:
    if not path.name.endswith(SUFFIXES):
        raise UsageError(f"{path} is none of {', '.join(SUFFIXES)}. Give C4's shards as they were published.")
    split = split_of(path.name)
    reading = Reading(on_error="skip")
    for block in cut([path], WHOLE, reading):
        for position, document in read_block(block, reading, tally.drop):
            name = document.get("url") or f"c4/{path.name}/{position}"
            yield split, {"id": name} | document


RECIPE = Recipe(
    name="c4",
    about="C4 and corpora of its form: shards of compressed JSON lines",
    files=(),
    read=read,
    takes="shards such as c4-train.00000-of-01024.json.gz",
)
