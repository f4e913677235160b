"""Counts of documents, characters, bytes and tokens by name."""

from __future__ import annotations

from lmtrain.tokenizer.count_tokens import TextCounts, count_tokens
from lmtrain.tokenizer.train import train_bpe


def test_each_name_has_the_counts_of_its_documents() -> None:
    tokenizer = train_bpe(["The mill by the river, the old mill"], 270)
    texts = [("a", "The mill"), ("b", "\u20ac"), ("a", "by the river"), ("c", "")]
    counts = count_tokens(tokenizer, texts)
    num_tokens = len(tokenizer.encode("The mill")) + len(tokenizer.encode("by the river"))
    assert counts["a"] == TextCounts(2, 20, 20, num_tokens)
    assert counts["b"] == TextCounts(1, 1, 3, len(tokenizer.encode("\u20ac")))
    assert counts["c"].to_dict()["bytes_per_token"] is None, "no tokens, and no division by their number"
    assert (counts["a"] + counts["b"]).to_dict()["bytes_per_token"] == 23 / (num_tokens + counts["b"].num_tokens)
