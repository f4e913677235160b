"""A Wikipedia dump (pages-articles.xml.bz2) as a stream of plain texts. Found by recipe.py.

The XML is read in pieces by expat, without a tree; a document type or an entity of its own, which no dump has, is
refused. Redirects and pages that are not articles are left out and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.parsers import expat

from data_tools.corpora.recipe import Recipe, SplitDocuments
from data_tools.corpora.wiki_markup import plain_text
from data_tools.corpus.flow.steps import Tally
from data_tools.read.chunks import MAX_DOC_BYTES
from data_tools.read.streams import unpacked
from lmtrain.errors import DataError

_CHUNK = 1 << 18
_KEPT = frozenset({"title", "ns", "id", "text"})
_WIKI = re.compile(r"([a-z_]{2,20})wiki")


@dataclass
class Page:
    title: str = ""
    ns: str = ""
    id: str = ""
    text: str = ""
    is_redirect: bool = False
    too_long: bool = False


def read(path: Path, tally: Tally) -> SplitDocuments:
    found = _WIKI.match(path.name)
    wiki = found[0] if found else "wikipedia"
    for page in pages(path):
        if page.ns != "0":
            tally.drop("no article")
        elif page.is_redirect:
            tally.drop("redirect")
        elif page.too_long:
            tally.drop("too long")
        elif text := plain_text(page.text):
            yield "train", {"id": f"{wiki}/{page.id}", "title": page.title, "text": text}
        else:
            tally.drop("empty")


def pages(path: Path) -> Iterator[Page]:
    """Every page of a dump, compressed or not, in order."""
    reader = _Reader(path)
    with unpacked(path) as file:
        try:
            while data := file.read(_CHUNK):
                reader.parser.Parse(data, False)
                yield from reader.taken()
            reader.parser.Parse(b"", True)
        except expat.ExpatError as error:
            raise DataError(f"{path} is not a whole dump ({error}). Get it again.") from error
    yield from reader.taken()


class _Reader:
    """Collects pages while expat calls it back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done: list[Page] = []
        self._page: Page | None = None
        self._field = ""
        self._held: list[str] = []
        self._held_chars = 0
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._characters
        self.parser.StartDoctypeDeclHandler = self._refuse
        self.parser.EntityDeclHandler = self._refuse

    def taken(self) -> list[Page]:
        done, self._done = self._done, []
        return done

    def _refuse(self, *_: Any) -> None:
        raise DataError(f"{self._path} declares a document type, which no dump does. Do not trust it.")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "page":
            self._page = Page()
        elif self._page is not None and name == "redirect":
            self._page.is_redirect = True
        # because: revisions and their authors have an id too, and the page's own comes first
        wanted = self._page is not None and name in _KEPT and not (name == "id" and self._page.id)
        self._field = name if wanted else ""
        self._held, self._held_chars = [], 0

    def _characters(self, data: str) -> None:
        if self._field:
            self._held_chars += len(data)
            if self._held_chars <= MAX_DOC_BYTES:
                self._held.append(data)

    def _end(self, name: str) -> None:
        if self._page is not None and self._field == name:
            setattr(self._page, name, "".join(self._held))
            self._page.too_long |= self._held_chars > MAX_DOC_BYTES
        self._field = ""
        if name == "page" and self._page is not None:
            self._done.append(self._page)
            self._page = None


RECIPE = Recipe(
    name="wikipedia",
    about="A Wikipedia dump in any language, as plain text",
    files=(),
    read=read,
    takes="a dump such as enwiki-20260101-pages-articles.xml.bz2",
)
