"""LAMBADA by four protocols with different targets, contexts and tokenization; their figures are not comparable.

The true tokens of a line are fed (teacher forcing), and its target is right if every token of it is the argmax.
Megatron's two protocols use the detokenized text that OpenAI published: `strict` asks for the last word, tokenized
apart from the text before it, `token` only for the last token, which is far easier. lm-evaluation-harness's two cut at
the last space and tokenize context and word together; `standard` uses the original, lower-cased text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from lmtrain.errors import DataError
from lmtrain.eval.read_texts import count_odd_characters, jsonl_texts, read_text_file, suffix_of_text
from lmtrain.eval.task import Facts, Prepared, Sums, Task, TaskOptions, bits_per_byte, encode_pair, perplexity, ratio
from lmtrain.eval.windows import Request
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

_COMMON = {
    "right": "every target token is the argmax given the true tokens before it",
    "prefix": "none; an empty context is the end-of-document token",
    "long lines": "cut on the left to seq_len + 1 tokens",
}


class Example(NamedTuple):
    context: list[int]
    target: list[int]
    scored: str  # text of the target


class Lambada(Task):
    published = "lambada_test.jsonl"
    data = 'lambada_test.jsonl, one {"text": ...} a line (OpenAI\'s detokenized variant, 5153 lines)'
    headline = "whole_word_accuracy"
    words_rule: ClassVar[str]

    @abstractmethod
    def example(self, tokenizer: Tokenizer, text: str) -> Example: ...

    def texts(self, content: str, source: Path) -> list[str]:
        return jsonl_texts(content, source)

    def prepare(self, source: Path, options: TaskOptions) -> Prepared:
        options.refuse_any_stride(self.id)
        content, sha256 = read_text_file(source)
        texts = self.texts(content, source)
        examples = list(self._examples(texts, options, source))
        prefix = _prefix(options.tokenizer, examples)
        rows = [(example.context or prefix) + example.target for example in examples]
        num_bytes = np.array([len(example.scored.encode()) for example in examples], np.float64)
        return Prepared(
            requests=[
                Request(np.array(cut_on_the_left(row, options.seq_len), np.int64), len(example.target), item)
                for item, (row, example) in enumerate(zip(rows, examples, strict=True))
            ],
            num_targets=sum(len(example.target) for example in examples),
            text_columns={"words": np.ones(len(texts)), "bytes": num_bytes},
            facts=Facts(
                protocol=options.protocol_id(self.id),
                text_sha256=sha256,
                num_documents=len(texts),
                num_words=len(texts),
                words_rule=self.words_rule,
                num_bytes=int(num_bytes.sum()),
                bytes_rule="UTF-8 bytes of what is scored, with the space before it",
                num_tokens=sum(len(example.context) + len(example.target) for example in examples),
                prefix="none (an empty context: end of document)",
                stride=None,
                denominator=f"lines = {len(texts)}",
                notes={
                    "lines_cut_on_the_left": sum(len(row) > options.seq_len + 1 for row in rows),
                    "lines_of_one_word": sum(len(text.split()) == 1 for text in texts),
                    **count_odd_characters(*texts),
                },
            ),
        )

    def _examples(self, texts: list[str], options: TaskOptions, source: Path) -> Iterator[Example]:
        for number, text in enumerate(texts, 1):
            if not text.strip():
                raise DataError(f"{source}: text {number} has no word to predict. Give texts that end in a word.")
            example = self.example(options.tokenizer, text)
            if not 1 <= len(example.target) <= options.seq_len:
                raise DataError(
                    f"{source}: the word to predict in text {number} has {len(example.target)} tokens; the window "
                    f"takes 1 to {options.seq_len}. Give a tokenizer trained on such text, or a longer window."
                )
            yield example

    def measures(self, sums: Sums) -> dict[str, float]:
        return {
            "whole_word_accuracy": ratio(sums["items_greedy"], sums["items"]),
            "last_word_perplexity": perplexity(sums["nll"], sums["items"]),
            "target_token_perplexity": perplexity(sums["nll"], sums["targets"]),
            "target_token_accuracy": ratio(sums["greedy"], sums["targets"]),
            "bits_per_byte": bits_per_byte(sums["nll"], sums["bytes"]),
        }


class MegatronStrict(Lambada):
    id = "lambada/megatron-strict"
    words_rule = "one a line: text.split()[-1]"
    recipe: ClassVar = {
        "context": "tokens of the text before its last word, stripped",
        "target": "tokens of a space and the last word, tokenized apart",
        **_COMMON,
    }

    def example(self, tokenizer: Tokenizer, text: str) -> Example:
        context, word = split_last_word(text)
        return Example(tokenizer.encode(context), tokenizer.encode(" " + word), " " + word)


class MegatronToken(Lambada):
    id = "lambada/megatron-token"
    headline = "last_token_accuracy"
    words_rule = "the last token of each line"
    recipe: ClassVar = {"context": "all tokens of the text but the last", "target": "the last token", **_COMMON}

    def example(self, tokenizer: Tokenizer, text: str) -> Example:
        ids, ends = tokenizer.encode_with_ends(text)
        return Example(ids[:-1], ids[-1:], text[ends[-2] if len(ends) > 1 else 0 :])

    def measures(self, sums: Sums) -> dict[str, float]:
        return {
            "last_token_accuracy": ratio(sums["greedy"], sums["targets"]),
            "last_token_perplexity": perplexity(sums["nll"], sums["targets"]),
            "bits_per_byte": bits_per_byte(sums["nll"], sums["bytes"]),
        }


class LambadaLmEval(Lambada):
    version = "1.0"
    words_rule = 'one a line: text.split(" ")[-1]'
    recipe: ClassVar = {
        "context": "tokens of the text before its last space, blanks at its end moved to the target",
        "target": "the tokens of the whole text behind as many as the context has",
        **_COMMON,
    }

    def __init__(self, name: str) -> None:
        self.id = f"lambada/lmeval-{name}-{self.version}"

    def example(self, tokenizer: Tokenizer, text: str) -> Example:
        before, _, word = text.rpartition(" ")
        return Example(*encode_pair(tokenizer, before, f" {word}"), f"{before[len(before.rstrip()) :]} {word}")


class LambadaLmEvalStandard(LambadaLmEval):
    published = "lambada_test_plain_text.txt"
    data = 'the original test set, one text a line in a .txt, or {"text": ...} in a .jsonl (lower case, 5153 lines)'

    def texts(self, content: str, source: Path) -> list[str]:
        lines = [line for line in content.split("\n") if line.strip()]
        return lines if suffix_of_text(source) == ".txt" else super().texts(content, source)


def split_last_word(text: str) -> tuple[str, str]:
    """Return the context, stripped, and the last word; punctuation attached to the word belongs to it."""
    last = text.split()[-1]
    return text[: text.rfind(last)].strip(), last


def cut_on_the_left(row: list[int], seq_len: int) -> list[int]:
    """Return the last seq_len + 1 tokens: as many as can be fed, and the last target."""
    return row[-(seq_len + 1) :]


def _prefix(tokenizer: Tokenizer, examples: list[Example]) -> list[int]:
    if tokenizer.eod_id is not None:
        return [tokenizer.eod_id]
    if all(example.context for example in examples):
        return []
    raise DataError("A line with one word needs an end-of-document token, which the tokenizer lacks. Remove the line.")


TASKS = (MegatronStrict(), MegatronToken(), LambadaLmEval("openai"), LambadaLmEvalStandard("standard"))
