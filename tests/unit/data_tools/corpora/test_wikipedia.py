"""A Wikipedia dump made by hand: articles become plain text, the rest is counted, hostile XML is refused."""

from __future__ import annotations

import bz2
from collections import Counter
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.corpora.corpus_definition import Recipe, find_recipe, get_corpus
from data_tools.corpora.wikipedia import pages, plain_text
from lmtrain.errors import DataError
from tests.unit.data_tools.corpus_files import read_jsonl

ARTICLE = """{{Infobox river|name={{lang|de|Elbe}}|length=1{{,}}000}}
[[File:Elbe.jpg|thumb|A [[bridge]] over it]]
The '''Elbe''' ({{lang-cs|Labe}}) is a [[river]] in [[Central Europe|central]] Europe.<ref name="a">{{cite web|x}}</ref>
It is {{convert|1094|km}} long,<ref name="a"/> says [http://example.org its page].<!-- not to be read -->

== Course ==
It rises at 1,386&nbsp;m &amp; flows past:
* [[Dresden]]
* [[Hamburg#Port|Hamburg]]
{| class="wikitext"
| a table || [[link]]
|}

== Gallery ==
<gallery>
File:a.jpg
</gallery>
== References ==
{{reflist}}
[[Category:Rivers]] [[de:Elbe]] __NOTOC__
"""
PLAIN = """The Elbe is a river in central Europe.
It is long, says its page.

Course

It rises at 1,386 m & flows past:
Dresden
Hamburg"""


def page(title: str, text: str, number: int = 1, ns: int = 0, extra: str = "") -> str:
    return (
        f"<page><title>{escape(title)}</title><ns>{ns}</ns><id>{number}</id>{extra}"
        f"<revision><id>99{number}</id><contributor><username>x</username><id>7</id></contributor>"
        f'<text bytes="5" xml:space="preserve">{escape(text)}</text></revision></page>'
    )


def dump(path: Path, *found: str, head: str = "") -> Path:
    xml = f'{head}<mediawiki xml:lang="en"><siteinfo><sitename>W</sitename></siteinfo>{"".join(found)}</mediawiki>'
    path.write_bytes(bz2.compress(xml.encode()) if path.suffix == ".bz2" else xml.encode())
    return path


def test_articles_come_out_plain_and_the_rest_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_tools.corpora.wikipedia.MAX_DOC_BYTES", 2000)
    path = dump(
        tmp_path / "enwiki-20260101-pages-articles.xml.bz2",
        page("Elbe & co", ARTICLE, 12),
        page("Labe", "#REDIRECT [[Elbe]]", 13, extra='<redirect title="Elbe" />'),
        page("Talk:Elbe", "chatter", 14, ns=1),
        page("Nothing", "{{stub}}", 15),
        page("Endless", "word " * 401, 17),
        page("Second", "Plain text.", 16),
    )
    recipe = find_recipe("wikipedia")
    assert isinstance(recipe, Recipe)
    report = get_corpus(recipe, [path], tmp_path / "out")
    assert report is not None
    tally = report.tally
    rows = read_jsonl(tmp_path / "out" / "train.jsonl")
    assert rows == [
        {"id": "enwiki/12", "title": "Elbe & co", "text": PLAIN},
        {"id": "enwiki/16", "title": "Second", "text": "Plain text."},
    ]
    assert tally.dropped == {"redirect": 1, "no article": 1, "empty": 1, "too long": 1}
    assert (tally.num_in, tally.num_out) == (6, 2)


@pytest.mark.parametrize(
    ("markup", "plain"),
    [
        ("[[a]]s and [[b (town)|]] and [[:Category:C|c]]", "as and b and c"),
        ("[[Datei:x.png|mini|Bild]]text", "text"),
        ("''it'' '''bold''' '''''both''''' don't", "it bold both don't"),
        ("{{a|{{b|{{c}}}}}}x", "x"),
        ("an {{unclosed template", "an unclosed template"),
        ("an [[unclosed link and {{t}} text", "an unclosed link and text"),
        ("stray }} and ]] and |} brackets", "stray and and brackets"),
        ("a<!-- {{ [[ -->b", "ab"),
        ("a <!-- never closed", "a"),
        ("one<br/>two<br>three", "one\ntwo\nthree"),
        ("H<sub>2</sub>O <math>\\frac{a}{b}</math>x", "H2O x"),
        ("[//example.org words] [https://example.org]", "words"),
        ("# one\n## two\n: three\n; four", "one\ntwo\nthree\nfour"),
        ("=== deep ===\ntext\n== Empty ==\n== See ==\nmore", "deep\n\ntext\n\nSee\n\nmore"),
        ("x ( ; , ) y ()", "x y"),
        ("if 1 < 2 and 3 > 2", "if 1 < 2 and 3 > 2"),
        ("&lt;b&gt; &eacute;", "<b> é"),
    ],
)
def test_markup(markup: str, plain: str) -> None:
    assert plain_text(markup) == plain


PIECES = ["{{", "}}", "[[", "]]", "[[a|", "[[File:", "<ref>", "</ref>", "<ref/>", "{|", "|}", "<!--", "-->"]
PIECES += ["(", ")", "=", "[//", "]", "<", "''", "*", "\n", " ", "a", "b.", "|", "|]]", ":"]


@given(st.lists(st.sampled_from(PIECES), max_size=60))
def test_no_markup_breaks_the_stripper_or_makes_it_invent(pieces: list[str]) -> None:
    markup = "".join(pieces)
    before, after = Counter(markup), Counter(plain_text(markup))
    assert all(number <= before[letter] for letter, number in after.items() if not letter.isspace())


@pytest.mark.parametrize("piece", [*PIECES, "&", "[[]]", "[[x]]", "=="])
def test_hostile_markup_takes_time_in_proportion(piece: str) -> None:
    plain_text(piece * 60_000 + "\n" + piece.join(["x"] * 20_000))


def test_a_document_type_is_refused(tmp_path: Path) -> None:
    laughs = '<!DOCTYPE m [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]>'
    path = dump(tmp_path / "d.xml", page("A", "x"), head=laughs)
    with pytest.raises(DataError, match="declares a document type"):
        list(pages(path))
    outside = '<!DOCTYPE m SYSTEM "file:///etc/passwd">'
    with pytest.raises(DataError, match="declares a document type"):
        list(pages(dump(tmp_path / "e.xml", page("A", "x"), head=outside)))


def test_a_dump_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    whole = dump(tmp_path / "d.xml.bz2", *(page(f"P{i}", "text " * 50, i) for i in range(200)))
    assert len(list(pages(whole))) == 200
    cut = tmp_path / "cut.xml.bz2"
    cut.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(DataError, match="the archive is cut short"):
        list(pages(cut))
    plain = tmp_path / "cut.xml"
    plain.write_bytes(bz2.decompress(whole.read_bytes())[:-30])
    with pytest.raises(DataError, match="not a complete Wikipedia dump"):
        list(pages(plain))


def test_several_streams_in_one_file_are_one_dump(tmp_path: Path) -> None:
    xml = f"<mediawiki>{page('A', 'x')}{page('B', 'y', 2)}</mediawiki>".encode()
    path = tmp_path / "multistream.xml.bz2"
    path.write_bytes(bz2.compress(xml[:70]) + bz2.compress(xml[70:]))
    assert [(found.title, found.id, found.text) for found in pages(path)] == [("A", "1", "x"), ("B", "2", "y")]
