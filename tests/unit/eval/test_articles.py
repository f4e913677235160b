"""Articles of WikiText: where they begin, that nothing is lost, and which tokens are whose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lmtrain.eval.tasks.wikitext import article_of_each_token, detokenize, split_articles, split_pages
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from tests.unit.eval.protocol_twins import harness_pages
from tests.unit.eval.protocols import WIKI


@pytest.mark.parametrize("text", [WIKI, WIKI[2:], WIKI.rstrip(), "no heading\n", " \n = A = \n = B = \n", "\n", ""])
def test_pages_are_the_harnesss_and_articles_lose_nothing(text: str) -> None:
    assert split_pages(text) == harness_pages(text)
    assert "".join(split_articles(text)) == text


def test_headings_of_the_first_level_alone_begin_an_article() -> None:
    titles = [part.strip().split("\n")[0] for part in split_articles(WIKI)]
    assert titles == ["= The Old Mill = ", "= 5 x 3 = ", "= Second Mill = ", "= Third Mill = "]


def test_the_real_files_have_62_pages_of_60_articles(shared_data: Path) -> None:
    for name in ("wt103.wiki.test.tokens", "wiki.test.raw"):
        text = (shared_data / name).read_text()
        assert len(split_articles(text)) == len(split_pages(text)) == 62
        assert sum(len(page.encode()) + 1 for page in split_pages(text)) + len(" \n") == len(text.encode()) + 1


def test_tokens_belong_to_the_article_that_they_end_in(tokenizer: Tokenizer) -> None:
    """Also where a quote or a bracket that opens in one article closes in another, and what is between them goes."""
    parts, whole = split_articles(WIKI), detokenize(WIKI)
    assert whole != "".join(map(detokenize, parts))
    ids, ends = tokenizer.encode_with_ends(whole)
    of = article_of_each_token(np.array(ends), [detokenize(part) for part in parts], whole)
    assert (np.diff(of) >= 0).all()
    texts = [tokenizer.decode([i for i, part in zip(ids, of, strict=True) if part == number]) for number in range(4)]
    assert "".join(texts) == whole
    for text, part in zip(texts, parts, strict=True):
        assert "".join(text.split()) == "".join(detokenize(part).split())
    assert [text.lstrip()[:8] for text in texts] == ["= The Ol", "= 5 x 3 ", "= Second", "= Third "]


def test_a_text_of_one_article_has_all_tokens(tokenizer: Tokenizer) -> None:
    ids, ends = tokenizer.encode_with_ends("the mill \n")
    assert article_of_each_token(np.array(ends), ["the mill \n"], "the mill \n").tolist() == [0] * len(ids)
