"""What one worker does: a portion of the sources to token ids, bad lines and counts. Called by pipeline.py.

Works in a thread beside others or in a process of its own; what it returns depends on its portion and the job alone,
so that the output is the same whatever the number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import RLock
from typing import Any

import numpy as np

from data_tools.preprocess.filters import Filters
from data_tools.preprocess.sequences import Batch, Sentences, ToSequences, Whole
from data_tools.read.chunks import Chunk, Limits, Portion
from data_tools.read.content import Bad, Content, TextList, judge, read_content
from lmtrain.tokenizer.base import Tokenizer
from lmtrain.tokenizer.fast import Encoder, build_encoder
from lmtrain.tokenizer.json_lines import Reject


@dataclass(frozen=True)
class Job:
    """All that a worker must know."""

    tokenizer: bytes
    keys: tuple[str, ...]
    eod_id: int | None  # is put behind every document
    limits: Limits
    filters: Filters
    split_sentences: bool = False
    lines_end_sentences: bool = False
    keep_content: bool = False  # of bad lines

    @property
    def looks_at_texts(self) -> bool:
        """Whether much of the work is done by the interpreter."""
        return self.filters.of_text or self.split_sentences


@dataclass
class Result:
    batches: list[Batch]  # one for each key; document i of each comes from the same line
    bad: list[list[Bad]]  # of each chunk, in order
    num_lines: list[int]  # of each chunk, but for ranges of plain files, where it is counted when it is asked for
    filtered: Counter[str]


class Worker:
    def __init__(self, job: Job, encoder: Encoder | None = None) -> None:
        self._job = job
        encoder = encoder if encoder is not None else build_encoder(Tokenizer.from_bytes(job.tokenizer))
        self._to_sequences: ToSequences = (
            Sentences(encoder, job.eod_id, job.lines_end_sentences)
            if job.split_sentences
            else Whole(encoder, job.eod_id is not None)
        )
        self._filters = job.filters.build()
        self._large = RLock()  # because: one document of the longest at a time, however many workers there are

    def run(self, portion: Portion) -> Result:
        if portion.chunks[0].kind == "text":
            return self._run_texts(portion.chunks)
        results = [self._run_chunk(chunk) for chunk in portion.chunks]
        for chunk in portion.chunks:
            chunk.held = None  # because: the portion is kept until its output is written
        return results[0] if len(results) == 1 else _joined(results)

    def _run_chunk(self, chunk: Chunk) -> Result:
        with ExitStack() as held:
            content, bad = read_content(chunk, self._job.limits, lambda: held.enter_context(self._large))
            batches, rejects, filtered = self._encode(content)
            bad += content.located(rejects, self._job.keep_content)
            bad, num_lines = judge(chunk, content, bad)
        return Result(batches, [bad], [num_lines], filtered)

    def _run_texts(self, chunks: list[Chunk]) -> Result:
        """Whole files, one document each, encoded together."""
        texts: list[tuple[Any, ...]] = []
        bad: list[list[Bad]] = []
        of_text: list[int] = []  # which chunk each text is of
        with ExitStack() as held:
            for number, chunk in enumerate(chunks):
                content, problems = read_content(chunk, self._job.limits, lambda: held.enter_context(self._large))
                texts += content.rows.values() if isinstance(content, TextList) else ()
                of_text += [number] * (len(texts) - len(of_text))
                bad.append(problems)
            together = TextList(texts)
            batches, rejects, filtered = self._encode(together)
        for reject in rejects:
            bad[of_text[reject.item]] += together.located([reject])
        return Result(batches, bad, [1] * len(chunks), filtered)

    def _encode(self, content: Content) -> tuple[list[Batch], list[Reject], Counter[str]]:
        filtered = self._filter_texts(content) if self._filters else Counter()
        batches = self._of_keys(content)
        rejects = batches[0].rejects
        if len(batches) > 1:  # what is bad for one key is bad for all
            found = {reject.item: reject for batch in reversed(batches) for reject in batch.rejects}
            rejects = [found[item] for item in sorted(found)]
            if any(len(batch.rejects) < len(rejects) for batch in batches):
                batches = self._of_keys(content.without(found))
        if self._job.filters.of_tokens and len(batches[0].num_sequences):
            filtered += self._filter_lengths(content, batches, {reject.item for reject in rejects})
        return batches, rejects, filtered

    def _of_keys(self, content: Content) -> list[Batch]:
        return [self._to_sequences(content, number, key) for number, key in enumerate(self._job.keys)]

    def _filter_texts(self, content: Content) -> Counter[str]:
        """The first key's text decides; bad ones are left for the encoder to name."""
        filtered: Counter[str] = Counter()
        dropped = []
        for item, text in content.texts(0, self._job.keys[0]):
            if isinstance(text, str):
                said_no = next((name for name, keep in self._filters if not keep(text)), None)
                if said_no is not None:
                    dropped.append(item)
                    filtered[said_no] += 1
        content.drop(dropped)
        return filtered

    def _filter_lengths(self, content: Content, batches: list[Batch], rejected: set[int]) -> Counter[str]:
        """Takes documents with too few or too many tokens of the first key out of every batch."""
        lengths = batches[0].document_lengths()
        verdict = self._job.filters.judge_lengths(lengths - (lengths > 0) * (self._job.eod_id is not None))
        if not verdict.any():
            return Counter()
        items = [item for item in content.items() if item not in rejected]
        out = content.only([item for item, v in zip(items, verdict.tolist(), strict=True) if v])
        for number, (batch, gone) in enumerate(zip(batches, self._of_keys(out), strict=True)):
            batches[number] = batch.only(verdict == 0, batch.num_text_bytes - gone.num_text_bytes)
        counts = {"min_tokens": int((verdict == 1).sum()), "max_tokens": int((verdict == 2).sum())}
        return Counter({name: count for name, count in counts.items() if count})


def _joined(results: Sequence[Result]) -> Result:
    """Of several small files, in order."""
    batches = []
    for parts in zip(*(result.batches for result in results), strict=True):
        arrays = [np.concatenate([getattr(p, name) for p in parts]) for name in ("tokens", "lengths", "num_sequences")]
        tokens, lengths, num_sequences = arrays
        batches.append(Batch(tokens, lengths, num_sequences, sum(p.num_text_bytes for p in parts), []))
    return Result(
        batches,
        [bad for result in results for bad in result.bad],
        [number for result in results for number in result.num_lines],
        sum((result.filtered for result in results), Counter()),
    )
