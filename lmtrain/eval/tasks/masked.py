"""How well a model that sees both sides predicts what is masked, and whether one segment follows another.

A causal model has no such number, and these no perplexity: no product of them is the probability of a text.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lmtrain.data.masked_settings import MaskedSettings
from lmtrain.data.samples.masked import MaskedDataset, MaskVocabulary
from lmtrain.errors import DataError, UsageError
from lmtrain.eval.recipes.documents import dataset_prefix, groups_of, open_dataset, said_of_dataset, said_of_texts
from lmtrain.eval.recipes.masked_windows import MARKS, SEED, Documents, OneByOne, Pairs, SampledMasks
from lmtrain.eval.task import Asked, Columns, Facts, Prepared, Sums, Task, perplexity, ratio
from lmtrain.eval.text.texts import TextInput
from lmtrain.eval.text.windows import refuse_stride

LEAST_SEQ_LEN = 8
_TEXT = "any text that `lmtrain preprocess` reads (.txt, .jsonl, .parquet, compressed, a folder), or a .bin/.idx prefix"
_MARKS = "[CLS] before each window and [SEP] behind it, which are never asked"


class Masked(Task):
    data = _TEXT
    causal = False
    compares = False

    @abstractmethod
    def requests(self, documents: Documents, vocabulary: MaskVocabulary, asked: Asked) -> SampledMasks | OneByOne: ...

    def prepare_texts(self, texts: TextInput, asked: Asked) -> Prepared:
        documents = Documents.of(asked.tokenizer.encode_batch(texts.documents))
        known, facts = said_of_texts(texts)
        return self._prepared(documents, asked, known, facts, groups=groups_of(texts.files))

    def prepare(self, source: Path, asked: Asked) -> Prepared:
        prefix = dataset_prefix(source) or source
        indexed = open_dataset(prefix, asked.tokenizer)
        ranges = np.array([indexed.document_range(one) for one in range(indexed.num_documents)], np.int64)
        starts, stops = ranges.reshape(-1, 2).T
        documents = Documents(indexed.tokens, starts, stops - starts)
        known, facts = said_of_dataset(prefix, indexed, documents, asked.tokenizer)
        return self._prepared(documents, asked, known, facts)

    def _prepared(
        self, documents: Documents, asked: Asked, known: Columns, facts: dict[str, Any], **more: Any
    ) -> Prepared:
        vocabulary = checked(self, asked)
        requests = self.requests(documents, vocabulary, asked)
        num_targets = requests.num_targets
        return Prepared(
            requests=requests,
            num_targets=num_targets,
            known=known,
            facts=Facts(
                protocol=asked.protocol(self.id),
                num_tokens=int(documents.lengths.sum()),
                prefix=_MARKS,
                stride=requests.stride if isinstance(requests, OneByOne) else asked.seq_len - MARKS,
                denominator=f"masked tokens = {num_targets}",
                **facts | {"notes": facts["notes"] | {"masks": self.recipe["masks"]}},
            ),
            **more,
        )


class MaskedTokens(Masked):
    id = "masked/tokens"
    headline = "masked_token_perplexity"
    settings = MaskedSettings(path="text", pairs="none", min_sentences=1)
    recipe: ClassVar = {
        "text": "as it is, document by document",
        "windows": f"seq_len - {MARKS} tokens, disjoint",
        "masks": f"15 % of a window's tokens, in whole words; 80 % of them [MASK], 10 % any token, 10 % as they are; "
        f"seed {SEED}, the same whatever the batch size and the layout",
        "prefix": _MARKS,
        "denominator": "masked tokens, every piece of a masked word",
    }

    def requests(self, documents: Documents, vocabulary: MaskVocabulary, asked: Asked) -> SampledMasks:
        if asked.stride is not None:
            raise UsageError(f"--stride={asked.stride} is not {self.id}, whose windows are disjoint. Leave it out.")
        return SampledMasks(documents, vocabulary, asked.seq_len, self.settings)

    def measures(self, sums: Sums) -> dict[str, float]:
        return {
            "masked_token_perplexity": perplexity(sums["nll"], sums["targets"]),
            "masked_token_accuracy": ratio(sums["greedy"], sums["targets"]),
            "nll_per_masked_token_nats": ratio(sums["nll"], sums["targets"]),
        }


class PseudoPerplexity(Masked):
    id = "masked/pseudo-perplexity"
    headline = "pseudo_perplexity"
    recipe: ClassVar = {
        "text": "as it is, document by document",
        "windows": f"seq_len - {MARKS} tokens, moved by --stride (default: as many); the last one of a document is as "
        "long as the others; each token once",
        "masks": "one token at a time, by [MASK]; the other pieces of its word stay",
        "prefix": _MARKS,
        "denominator": "tokens, or words as the measure's name says; as many passes as tokens",
    }

    def requests(self, documents: Documents, vocabulary: MaskVocabulary, asked: Asked) -> OneByOne:
        room = asked.seq_len - MARKS
        stride = room if asked.stride is None else asked.stride
        refuse_stride(room, stride)
        return OneByOne(documents, vocabulary, asked.seq_len, stride)

    def measures(self, sums: Sums) -> dict[str, float]:
        found = {
            "pseudo_perplexity": perplexity(sums["nll"], sums["targets"]),
            "masked_token_accuracy": ratio(sums["greedy"], sums["targets"]),
            "nll_per_token_nats": ratio(sums["nll"], sums["targets"]),
        }
        if sums.get("words"):
            found["pseudo_word_perplexity"] = perplexity(sums["nll"], sums["words"])
        return found


class PairAccuracy(Task):
    headline = "pair_accuracy"
    data = "a .bin/.idx prefix, made with `lmtrain preprocess --split-sentences`"
    causal = False
    pairs = True
    compares = False

    def __init__(self, settings: MaskedSettings, wrong: str) -> None:
        self.settings, self.id = settings, f"masked/{settings.pairs.replace('_', '-')}"
        self.recipe: dict[str, str] = {  # type: ignore[misc]  # because: the two differ in it
            "text": "runs of sentences of a document that fill seq_len, cut in two",
            "pairs": f"in half of them {wrong}; seed {SEED}",
            "masks": "15 % of the tokens, as in training, whose validation counts alike",
            "denominator": "pairs",
        }

    def prepare(self, source: Path, asked: Asked) -> Prepared:
        if asked.stride is not None:
            raise UsageError(f"--stride={asked.stride} means nothing to {self.id}, which has no windows. Leave it out.")
        prefix = dataset_prefix(source)
        if prefix is None:
            raise DataError(
                f"--data={source} is no dataset, and {self.id} takes sentences. Give a .bin/.idx prefix that "
                "`lmtrain preprocess --split-sentences` has made."
            )
        vocabulary = checked(self, asked)
        indexed = open_dataset(prefix, asked.tokenizer)
        every = range(indexed.num_documents)
        pairs = Pairs(MaskedDataset(indexed, every, asked.seq_len, vocabulary, self.settings, SEED))
        documents = (indexed.document(one) for one in every)
        _, facts = said_of_dataset(prefix, indexed, documents, asked.tokenizer)
        return Prepared(
            requests=pairs,
            num_targets=pairs.num_targets,
            known={"bytes": np.zeros(pairs.num_targets)},
            facts=Facts(
                protocol=asked.protocol(self.id),
                num_tokens=indexed.num_tokens,
                prefix="[CLS] before a pair and [SEP] behind each segment",
                stride=None,
                denominator=f"pairs = {pairs.num_targets}",
                **facts | {"notes": facts["notes"] | {"pairs": self.recipe["pairs"], "masks": self.recipe["masks"]}},
            ),
        )

    def measures(self, sums: Sums) -> dict[str, float]:
        return {
            "pair_accuracy": ratio(sums["greedy"], sums["targets"]),
            "nll_per_pair_nats": ratio(sums["nll"], sums["targets"]),
        }


def checked(task: Task, asked: Asked) -> MaskVocabulary:
    if asked.seq_len < LEAST_SEQ_LEN:
        raise UsageError(f"A window of {asked.seq_len} tokens is too short for {task.id}. Use {LEAST_SEQ_LEN} or more.")
    return MaskVocabulary.of(asked.tokenizer)


TASKS = (
    MaskedTokens(),
    PseudoPerplexity(),
    PairAccuracy(MaskedSettings(path="text", pairs="sentence_order"), "the two change places"),
    PairAccuracy(MaskedSettings(path="text", pairs="next_sentence"), "the second is of another document"),
)
