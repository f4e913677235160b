"""Trains a tokenizer on text files, or counts the tokens that a tokenizer makes of them.

Called by `lmtrain tokenizer`, and by tokenizer_and_dataset_from_text.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from data_tools.read.find_input_files import STDIN, Source, TextSplit, find_sources, resolve_text_inputs
from data_tools.read.parse_chunks_and_bad_lines import (
    ALL_READ,
    COMMAND_LINE,
    OptionNames,
    SourceTexts,
    refuse_blank_texts,
)
from lmtrain.errors import UsageError, leave_out, shell_quoted
from lmtrain.runtime.files.similar_path import refuse_file_as_text
from lmtrain.runtime.files.unreadable_files import is_tokenizer
from lmtrain.tokenizer.count_tokens import TextCounts, count_tokens
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_bpe, train_wordpiece
from lmtrain.tokenizer.vocabulary_files import Pattern


def train_tokenizer(
    sources: Sequence[Source], key: str, kind: Literal["bpe", "wordpiece"], vocab_size: int, pattern: Pattern | None,
    lowercase: bool, report: Callable[[int], None], names: OptionNames = COMMAND_LINE,
) -> Tokenizer:  # fmt: skip
    """Return a tokenizer that is trained on the texts of the sources; `pattern` is for bpe, `lowercase` for wordpiece.
    `report` receives the bytes read so far, then ALL_READ. Raise DataError if a line is bad, or if all texts are blank;
    the message tells the user of options by their `names`.
    """
    texts: Iterable[str] = SourceTexts(sources, key, report=report, names=names)
    if any(source.path == STDIN for source in sources):
        texts = iter(texts)  # because: a pipe is read once; readers keep the texts of an iterator
    texts = refuse_blank_texts(texts, names)
    if kind == "bpe":
        return train_bpe(texts, vocab_size, pattern or "gpt2")
    return train_wordpiece(texts, vocab_size, lowercase)


def find_texts_to_count(
    text: list[str], data: list[str], format_: str | None, split: TextSplit, report: Callable[[str], None]
) -> list[Source]:
    """Return the files that --data of `lmtrain tokenizer show` and the words after it, `text`, name. Raise an
    LmtrainError unless they are text files, or without --data at most one text, which is not the name of a file.
    `report` receives a notice about files that are left out.
    """
    if data:
        for word in (words := [*data, *text]):
            if is_tokenizer(Path(word)):
                compared = f"type `lmtrain tokenizer show {shell_quoted(word)} --data FILE` to compare"
                raise UsageError(
                    f"{word} is a tokenizer, which would be counted as a text, and one command shows one tokenizer. "
                    f"{leave_out(word)}, and {compared}."
                )
        return find_sources(resolve_text_inputs(words, format_, None, report), split)
    for word in text:
        refuse_file_as_text("tokenizer show", word, "--data")
    if len(text) > 1:
        raise UsageError(f"tokenizer show takes one text, and there are {len(text)}. Put the text in quotes.")
    return []


def count_tokens_of_files(
    tokenizer: Tokenizer, sources: Sequence[Source], key: str, report: Callable[[int, int], None]
) -> dict[str, Any]:
    """Return the counts of each source, and of all together, as JSON values. `report` receives (bytes read, bytes of
    all sources, 0 if that is unknown).
    """
    total = total_bytes(sources)
    texts = SourceTexts(sources, key, report=lambda done: None if done == ALL_READ else report(done, total))
    found = count_tokens(tokenizer, ((str(path), text) for path, text in texts.iterate_with_paths()))
    counts = {str(source.path): found.get(str(source.path), TextCounts()) for source in sources}
    return {
        "files": [{"file": name, **count.to_dict()} for name, count in counts.items()],
        "total": sum(counts.values(), TextCounts()).to_dict(),
    }


def total_bytes(sources: Sequence[Source]) -> int:
    """Return the size of all sources together, 0 if that of one is unknown or 0."""
    sizes = [source.num_bytes for source in sources]
    return sum(sizes) if all(sizes) else 0
