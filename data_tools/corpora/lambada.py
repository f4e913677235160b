"""LAMBADA (Paperno and others, 2016): passages whose last word needs the whole passage. Found by recipe.py.

The test set as OpenAI published it with GPT-2 (capitals and punctuation as in the books) is fetched; the original,
lower-cased files are read too, one passage a line. It is for evaluation: train on it and the measure is void.
"""

from __future__ import annotations

from pathlib import Path

from data_tools.corpora.recipe import Recipe, RemoteFile, SplitDocuments, split_of
from data_tools.corpus.reading import Reading, find_files, read_documents
from data_tools.corpus.steps import Tally
from data_tools.read.streams import unpacked
from lmtrain.errors import DataError

_MOST_BYTES = 64 << 20


def read(path: Path, tally: Tally) -> SplitDocuments:
    split = split_of(path.name, "test")
    for number, text in enumerate(_passages(path, tally)):
        yield split, {"id": f"lambada/{split}/{number}", "text": text}


def _passages(path: Path, tally: Tally) -> list[str]:
    if ".jsonl" in path.name:
        return [document["text"] for _, document in read_documents(find_files([path]), Reading(), tally.drop_bad)]
    with unpacked(path) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise DataError(f"{path} is larger than any edition of LAMBADA. Give the text as it was published.")
    try:
        return [line for line in data.decode("utf-8-sig").split("\n") if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8. Give the text as it was published.") from error


RECIPE = Recipe(
    name="lambada",
    about="LAMBADA's test set as published with GPT-2: 5,153 passages for evaluation",
    files=(
        RemoteFile(
            "lambada_test.jsonl",
            ("https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl",),
            "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
            1_819_752,
        ),
    ),
    read=read,
    takes="lambada_test.jsonl or a text with one passage a line",
)
