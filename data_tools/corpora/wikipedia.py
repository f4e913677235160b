"""Recipe for a Wikipedia dump (pages-articles.xml.bz2), read as a stream of plain texts. Found by corpus_definition.py.

expat parses the XML in pieces, without a tree; a document type or an entity declaration, which no dump has, is an
error. Redirects and pages that are not articles are dropped and counted.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.parsers import expat

from data_tools.corpora.corpus_definition import DocumentsBySplit, Recipe
from data_tools.corpus.flow.run_one_corpus_step_in_workers import Tally
from data_tools.read.compressed_and_parquet_readers import open_decompressed
from data_tools.read.cut_files_into_chunks import MAX_DOC_BYTES
from lmtrain.errors import DataError

_CHUNK = 1 << 18
_PAGE_FIELDS = frozenset({"title", "ns", "id", "text"})
_WIKI = re.compile(r"([a-z_]{2,20})wiki")
_DEPTH = 40  # because: genuine pages nest templates about 12 deep; deeper brackets are ignored
_DROPPED_TAGS = "ref|references|gallery|math|chem|timeline|score|syntaxhighlight|source|graph|imagemap|mapframe|table"
_TOKEN = re.compile(
    r"<!--|-->|\{\{|\}\}|\{\||\|\}(?!\})|\[\[|\]\]|"
    rf"<(?P<end>/?)(?P<tag>{_DROPPED_TAGS})\b[^<>]{{0,1000}}>",
    re.IGNORECASE,
)
_LONGEST_HEADING = 400
_CLOSES = {"}}": "{{", "|}": "{|", "]]": "[[", "-->": "<!--"}

_NOT_TEXT = re.compile(r"\s*(?:file|image|media|category|[a-z]{2,3}(?:-[a-z]+)?)\s*:", re.IGNORECASE)
_PICTURE = re.compile(r"[^|]*:[^|]*\.(?:jpe?g|png|svg|gif|webp|tiff?|og[gv]|webm|pdf)\s*(?:\||$)", re.IGNORECASE)
_WEB_LINK = re.compile(r"\[(?:https?:|ftp:)?//[^\s\[\]]+(?:[ \t]+([^\[\]\n]*))?\]")
_BREAK = re.compile(r"<(?:br|p|/p|hr)\b[^<>]{0,100}>", re.IGNORECASE)
_TAG = re.compile(r"</?[a-z][^<>]{0,1000}>", re.IGNORECASE)
_QUOTES = re.compile(r"'{2,}")
_MAGIC = re.compile(r"__[A-Z]{3,30}__")
_HEADING = re.compile(r"(={1,6})[ \t]*(\S.*?)[ \t]*\1[ \t]*")
_ITEM = re.compile(r"[*#:;]+[ \t]*")
_HOLLOW = re.compile(r"\([ \t,;:]*\)")
_SPACES = re.compile(r"[ \t\u00a0]+")
_LOOSE = re.compile(r" +([,.;:)])")


@dataclass
class _OpenBracket:
    """An open bracket and the text since it was opened."""

    kind: str
    parts: list[str] = field(default_factory=list)


def plain_text(markup: str) -> str:
    """Return the readable text of a Wikipedia page from its wiki markup, without templates, tables, references, link
    targets and tags.
    """
    text = _remove_brackets(markup)
    text = _WEB_LINK.sub(lambda match: match[1] or "", text)
    text = _TAG.sub("", _BREAK.sub("\n", text))
    text = html.unescape(_MAGIC.sub("", _QUOTES.sub("", text)))
    return "\n".join(_clean_lines(text)).strip()


def _remove_brackets(markup: str) -> str:
    """Return wiki markup without comments, templates, tables and the content of tags such as <ref>; a link is replaced
    by the text that it shows.
    """
    stack = [_OpenBracket("")]
    num_open: Counter[str] = Counter()
    at = 0
    for match in _TOKEN.finditer(markup):
        stack[-1].parts.append(markup[at : match.start()])
        at = match.end()
        mark, tag = match[0], (match["tag"] or "").lower()
        if (num_open["<!--"] and mark != "-->") or (tag and mark.endswith("/>")):
            continue
        kind = tag or _CLOSES.get(mark, mark)
        if match["end"] or mark in _CLOSES:
            if num_open[kind]:
                _close_bracket(stack, num_open, kind)
        elif len(stack) < _DEPTH:
            stack.append(_OpenBracket(kind))
            num_open[kind] += 1
    stack[-1].parts.append(markup[at:])
    # text after a bracket that is never closed is kept, except in comments
    return "".join("".join(level.parts) for level in stack if level.kind != "<!--")


def _close_bracket(stack: list[_OpenBracket], num_open: Counter[str], kind: str) -> None:
    """Remove from `stack` the innermost open bracket of the kind `kind` ("{{", "[[", "<!--" or a tag), with the
    unclosed ones inside it, and drop its content. Of a link, keep the text that it shows, as part of the bracket around
    it.
    """
    inner: list[str] = []
    while True:
        level = stack.pop()
        num_open[level.kind] -= 1
        inner.append("".join(level.parts))
        if level.kind == kind:
            break
    if kind == "[[":
        stack[-1].parts.append(_link_text("".join(reversed(inner))))


def _link_text(content: str) -> str:
    """Return the text that a wiki link shows, from the content between [[ and ]]. Return "" for a picture, a category
    or another language's page.
    """
    if content.startswith(":"):
        content = content[1:]
    elif _NOT_TEXT.match(content) or _PICTURE.match(content):
        return ""
    target, bar, words = content.partition("|")
    if not bar:
        return target
    return words.rsplit("|", 1)[-1] or target.partition(" (")[0]


def _clean_lines(text: str) -> list[str]:
    """Split a page's text into lines without list marks, empty parentheses and superfluous spaces. A heading without
    any text under it is removed.
    """
    lines: list[str] = []
    headings: list[tuple[int, str]] = []  # headings without text so far, outermost first
    for raw in text.split("\n"):
        line = _SPACES.sub(" ", raw).strip()
        # because: a very long line is no heading, and matching the pattern on it would take long
        if line.startswith("=") and len(line) < _LONGEST_HEADING and (heading := _HEADING.fullmatch(line)):
            level = len(heading[1])
            headings = [*(h for h in headings if h[0] < level), (level, heading[2])]
            continue
        item = _ITEM.match(line)
        line = _LOOSE.sub(r"\1", _SPACES.sub(" ", _HOLLOW.sub("", line[item.end() :] if item else line))).strip()
        if any(map(str.isalnum, line)):
            for _, title in headings:
                lines += ["", title, ""]
            headings = []
            lines.append(line)
        elif lines and lines[-1]:
            lines.append("")
    return [line for i, line in enumerate(lines) if line or (i and lines[i - 1])]


@dataclass
class Page:
    """A page of a Wikipedia dump: the XML fields that are used."""

    title: str = ""
    ns: str = ""
    id: str = ""
    text: str = ""
    is_redirect: bool = False
    too_long: bool = False


def read(path: Path, tally: Tally) -> DocumentsBySplit:
    """Yield ("train", document) for every article of a Wikipedia dump that has text. Count redirects, empty articles
    and other pages in `tally`.
    """
    match = _WIKI.match(path.name)
    wiki = match[0] if match else "wikipedia"
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
    """Yield every page of a Wikipedia dump (XML, compressed or not), in order. Raise DataError if the dump is not
    complete.
    """
    reader = _Reader(path)
    with open_decompressed(path) as file:
        try:
            while data := file.read(_CHUNK):
                reader.parser.Parse(data, False)
                yield from reader.take_pages()
            reader.parser.Parse(b"", True)
        except expat.ExpatError as error:
            raise DataError(f"{path} is not a complete Wikipedia dump ({error}). Get it again.") from error
    yield from reader.take_pages()


class _Reader:
    """A parser of the dump's XML that collects pages in expat's callbacks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done: list[Page] = []
        self._page: Page | None = None
        self._field = ""
        self._text_parts: list[str] = []
        self._num_chars = 0
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._characters
        self.parser.StartDoctypeDeclHandler = self._refuse
        self.parser.EntityDeclHandler = self._refuse

    def take_pages(self) -> list[Page]:
        """Return and forget the pages that are complete."""
        done, self._done = self._done, []
        return done

    def _refuse(self, *_: Any) -> None:
        raise DataError(f"{self._path} declares a document type, which no Wikipedia dump does. Do not trust the file.")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "page":
            self._page = Page()
        elif self._page is not None and name == "redirect":
            self._page.is_redirect = True
        # because: revisions and their authors have ids too; the page's own id comes first
        is_field = self._page is not None and name in _PAGE_FIELDS and not (name == "id" and self._page.id)
        self._field = name if is_field else ""
        self._text_parts, self._num_chars = [], 0

    def _characters(self, data: str) -> None:
        if self._field:
            self._num_chars += len(data)
            if self._num_chars <= MAX_DOC_BYTES:
                self._text_parts.append(data)

    def _end(self, name: str) -> None:
        if self._page is not None and self._field == name:
            setattr(self._page, name, "".join(self._text_parts))
            self._page.too_long |= self._num_chars > MAX_DOC_BYTES
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
