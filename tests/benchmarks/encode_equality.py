"""Whether the compiled encoder gives the ids of `tokenizers`, on more documents than a test suite has time for.

    python -m tests.benchmarks.encode_equality --vocab gpt2-vocab.json --bert-vocab vocab.txt --books books.jsonl.xz
    python -m tests.benchmarks.encode_equality --smoke       anywhere: little text and vocabularies of our own

Text of many scripts (books, what documentation and manual pages this machine carries) and documents made to go wrong,
for GPT-2's vocabulary, a BPE of LLaMA 3's kind, and BERT's WordPiece with and without case, the last two trained here
where no vocabulary is given. Ends with an error if one document differs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np
import tokenizers

from lmtrain.tokenizer.bulk_encoding import CompiledEncoder, build_encoder
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_bpe, train_wordpiece
from tests.benchmarks.data_preprocess import book_texts, machine_texts, up_to
from tests.unit.tokenizer.adversarial import documents

PIECE = 40_000
BATCH = 512


def manual_texts() -> Iterator[str]:
    """Manual pages come in twenty languages."""
    for path in sorted(Path("/usr/share/man").rglob("*.gz")):
        try:
            yield gzip.decompress(path.read_bytes()).decode()
        except (OSError, EOFError, UnicodeDecodeError):
            continue


def pieces(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from (text[at : at + PIECE] for at in range(0, len(text), PIECE))


def with_whole_words(tokenizer: Tokenizer) -> Tokenizer:
    """LLaMA 3 takes a word that is in the vocabulary as it is, whatever the merges say."""
    tree = json.loads(tokenizer.to_bytes())
    tree["model"]["ignore_merges"] = True
    return Tokenizer.from_bytes(json.dumps(tree).encode())


def count_differences(name: str, tokenizer: Tokenizer, texts: Iterable[str]) -> int:
    """Documents whose ids differ; the first few are shown."""
    encoder = build_encoder(tokenizer)
    assert isinstance(encoder, CompiledEncoder), "the compiled helpers are missing: run `make native`"
    inner = tokenizers.Tokenizer.from_str(tokenizer.to_bytes().decode())
    inner.encode_special_tokens = True
    began, num_documents, num_bytes, num_tokens, different = time.perf_counter(), 0, 0, 0, 0
    texts = iter(texts)
    while batch := list(islice(texts, BATCH)):
        ours = encoder.encode_documents(batch)
        theirs = [encoding.ids for encoding in inner.encode_batch_fast(batch, add_special_tokens=False)]
        assert not ours.rejects
        ends = np.cumsum(ours.lengths).tolist()
        for text, start, stop, expected in zip(batch, [0, *ends], ends, theirs, strict=False):
            if ours.tokens[start:stop].tolist() != expected:
                different += 1
                if different <= 3:
                    print(f"{name}: {text[:300]!r}")
        num_documents, num_bytes, num_tokens = (
            num_documents + len(batch),
            num_bytes + ours.num_text_bytes,
            num_tokens + ends[-1],
        )
    took = time.perf_counter() - began
    print(
        f"{name}: {num_documents:,} documents, {num_bytes / 1e6:,.1f} MB, {num_tokens:,} tokens, "
        f"{different} differ ({took:.0f} s)",
        flush=True,
    )
    return different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=Path, help="GPT-2's vocab.json")
    parser.add_argument("--bert-vocab", type=Path, help="BERT's vocab.txt, uncased")
    parser.add_argument("--books", type=Path, help="a .jsonl or .jsonl.xz of books")
    parser.add_argument("--mb", type=int, default=320)
    parser.add_argument("--adversarial", type=int, default=200_000)
    parser.add_argument("--only", default="", help="tokenizers whose name starts so")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.mb, arguments.adversarial = 3, 2000
    texts = list(
        up_to(
            arguments.mb * 10**6,
            pieces(chain(manual_texts(), book_texts(arguments.books) if arguments.books else (), machine_texts())),
        )
    )
    sample = [*texts[:: max(1, len(texts) // 400)], *documents(2000, seed=1)]
    made: dict[str, Callable[[], Tokenizer]] = {
        "gpt2": lambda: Tokenizer.load(arguments.vocab) if arguments.vocab else train_bpe(sample, 20_000),
        "llama 3 style": lambda: with_whole_words(train_bpe(sample, 40_000, "cl100k")),
        "bert uncased": lambda: (
            Tokenizer.load(arguments.bert_vocab) if arguments.bert_vocab else train_wordpiece(sample, 20_000, True)
        ),
        "bert cased": lambda: train_wordpiece(sample, 20_000, False),
    }
    different = 0
    for name, make in made.items():
        if name.startswith(arguments.only):
            tokenizer = make()
            different += count_differences(f"{name}, text", tokenizer, texts)
            different += count_differences(f"{name}, adversarial", tokenizer, documents(arguments.adversarial, seed=7))
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
