"""Conversion of documents to sequences of ids: one per document, or one per sentence. Called by workers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_tools.read.parse_chunks_and_bad_lines import Content
from lmtrain.runtime import compiled_helpers
from lmtrain.tokenizer.bulk_encoding import Encoder
from lmtrain.tokenizer.text_from_json_lines import Reject


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Abbreviations that never end a sentence.
_NEVER_END = _word_set(
    "Mr Mrs Ms Dr Prof Rev Gen Col Lt Capt Sgt Cpl Maj Cmdr Adm Hon Gov Sen Rep Pres Supt Insp Messrs Mme Mlle Mons Fr "
    "Hr Dra Sra Srta Mt Ft vs Vs v cf Cf viz e.g E.g i.e I.e approx ca bzw z.B d.h"
)
# Abbreviations that end a sentence only if a word of _STARTERS follows.
_MAY_END = _word_set(
    "Inc Ltd Co Corp Bros Jr Sr St Ave Blvd Rd al Ph.D M.Sc B.Sc Assn Dept dept Univ univ Esq Cia Ariz Calif Colo Conn "
    "Fla Ill Kan Mass Mich Minn Mo Mont Neb Nev Okla Ore Pa Tenn Tex Va Vt Wash Wis Wyo"
)
# Abbreviations that do not end a sentence before a number.
_BEFORE_NUMBER = _word_set(
    "No Nos no nos Nr nr Fig fig Figs figs Vol vol Vols vols Ch ch Chap chap Sec sec Art art Eq eq Eqs Ref Pt pt pp Op "
    "op Ver ver Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec p b c d n l"
)
_STARTERS = _word_set(
    "A After All Also Although An And Another Are As At Because Before Both But By Can Could Did Do Does During Each "
    "Every For From Had Has Have He Her Here His How However I If In Instead Is It Its Many Meanwhile Moreover Most My "
    "No Not Now On Once One Or Other Our Over Perhaps She Should Since So Some Such That The Their Then There These "
    "They This Those Thus To Two Under Until Was We Were What When Where Which While Who Why With Without Would Yes "
    "You Your"
)
_LONGEST_WORD = 24  # characters searched backwards

_SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_STOPS = ".!?\u2026"
_FULL_STOPS = "\u3002\uff01\uff1f\uff61\u0964\u0965\u061f\u06d4\u0589\u1362\u17d4\u17d5\u104b"
_CLOSERS = "\"')\\]}\u00bb\u201d\u2019\uff09\uff3d\u300d\u300f\u3011\u300b\u3009\uff02\uff07"
_OPENERS = "\"'(\\[{\u00ab\u201c\u2018\u00bf\u00a1\u2014\u2013\\-*_\uff08\u300c\u300e\u3010\u300a\u3008"


def _cased_letters() -> tuple[frozenset[str], frozenset[str]]:
    """Return two sets: the small and the capital letters of Latin, Greek and Cyrillic.

    The list is fixed, because Unicode's changes with each version.
    """
    small = [*range(0x61, 0x7B), *range(0xDF, 0x100), *range(0x3AC, 0x3CF), *range(0x430, 0x460)]
    capital = [*range(0x41, 0x5B), *range(0xC0, 0xDF), *range(0x391, 0x3AA), *range(0x400, 0x430)]
    for first, last, small_is_odd in ((0x100, 0x137, 1), (0x139, 0x148, 0), (0x14A, 0x177, 1), (0x179, 0x17E, 0)):
        for code in range(first, last + 1):
            (small if code % 2 == small_is_odd else capital).append(code)
    return frozenset(map(chr, set(small) - {0xF7})), frozenset(map(chr, set(capital) - {0xD7}))


_SMALL, _CAPITAL = _cased_letters()
_BLANK = re.compile(f"[{_SPACES}]*")
_CANDIDATE = re.compile(f"[{_STOPS}{_FULL_STOPS}]+|[\n\f\u2029][{_SPACES}]*")
_CLOSING = re.compile(f"(?:[\xa0\u202f]?\u00bb|[{_CLOSERS}])*")  # because: French puts a space before its quotes
_REFERENCES = re.compile(r"(?:\[[0-9]{1,3}\])*")
_OPENING = re.compile(f"[{_OPENERS}]*")
_WORD = re.compile(f"[^{_SPACES}{_OPENERS}{_CLOSERS}{_FULL_STOPS},;:/]*")
_LIST_NUMBER = re.compile("[0-9]+|[IVXLC]+|[ivxlc]+")
_ACRONYM = re.compile("(?:[A-Za-z][.])*[A-Za-z]")
_LETTERS = re.compile(f"[A-Za-z]{{0,{_LONGEST_WORD}}}")
_AFTER_STARTER = re.compile(f"[{_SPACES},]|$")
_SPACE_CHARS = "".join(c for c in map(chr, range(0x3001)) if _BLANK.fullmatch(c))


def split_sentences(text: str, newlines: bool = False) -> list[str]:
    """Return the sentences of a text, without surrounding white space. With `newlines`, every line end ends a sentence
    too.
    """
    if compiled_helpers.lib is None:
        return split_sentences_twin(text, newlines)
    if text.isascii():  # because: in ASCII offsets in bytes and characters are equal
        return [text[begin:end] for begin, end in compiled_helpers.lib.sentence_spans(text.encode(), newlines).tolist()]
    data = text.encode("utf-8", "surrogatepass")
    spans = compiled_helpers.lib.sentence_spans(data, newlines).tolist()
    return [data[begin:end].decode("utf-8", "surrogatepass") for begin, end in spans]


def split_sentences_twin(text: str, newlines: bool = False) -> list[str]:
    """Compute `split_sentences` in Python: return the sentences of a text, without surrounding white space. With
    `newlines`, every line end ends a sentence too.
    """
    sentences = []
    begin = at = _match_end(_BLANK, text, 0)
    while match := _CANDIDATE.search(text, at):
        at = match.end()
        if match[0][0] in "\n\f\u2029":
            boundary = _boundary_at_line_end(match, newlines)
        else:
            boundary = _boundary_at_stop(text, begin, match)
        if boundary is not None:
            end, at = boundary
            sentences.append(text[begin:end])
            begin = at
    sentences.append(text[begin:])
    return [stripped for sentence in sentences if (stripped := sentence.strip(_SPACE_CHARS))]


def _boundary_at_line_end(match: re.Match[str], newlines: bool) -> tuple[int, int] | None:
    """Return (start, stop) in the text of the white space in `match` if it separates two sentences, else None. The
    white space begins with a line end; it separates sentences if it has a blank line, page break or paragraph separator
    or, with `newlines`, always.
    """
    gap = match[0]
    ends = newlines or "\f" in gap or "\u2029" in gap or gap.count("\n") > 1
    return match.span() if ends else None


def _boundary_at_stop(text: str, sentence_start: int, match: re.Match[str]) -> tuple[int, int] | None:
    """Return (end of the sentence, start of the next one) if the sentence that begins at `sentence_start` ends at the
    full stops, question or exclamation marks in `match`; else None.
    """
    stops, end = match[0], _match_end(_CLOSING, text, match.end())
    if any(stop in _FULL_STOPS for stop in stops):
        return end, _match_end(_BLANK, text, end)
    end = _match_end(_REFERENCES, text, end)
    following = _match_end(_BLANK, text, end)
    if following == len(text) or following == end:
        return None
    is_end = _ends_sentence(text, sentence_start, match.start(), stops, end > match.end(), following)
    return (end, following) if is_end else None


def _ends_sentence(
    text: str, sentence_start: int, stops_start: int, stops: str, is_closed: bool, next_start: int
) -> bool:
    """Return True if the punctuation `stops`, which is at offset `stops_start`, ends the sentence that begins at
    `sentence_start`. `is_closed`: a closing quote, bracket or reference follows it; `next_start` is where the text
    continues after white space.
    """
    following = _match_end(_OPENING, text, next_start)
    follows = text[following : following + 1]  # empty if only brackets and quotes are left
    if not follows or follows in _SMALL or follows in _STOPS or follows in ",;:":
        return False
    if stops != ".":
        return text[stops_start - 1 : stops_start] not in ("(", "[")
    word = _word_before(text, stops_start)
    if word is None or (is_closed and following > next_start):  # a quote or bracket closes here, and another one opens
        return True
    if not word or word in _NEVER_END:
        return not word
    if sentence_start == stops_start - len(word) and _LIST_NUMBER.fullmatch(word):
        return False
    if word in _BEFORE_NUMBER and follows in "0123456789":
        return False
    if word in _CAPITAL or (len(word) > 1 and (word in _MAY_END or _ACRONYM.fullmatch(word))):
        letters = _match_end(_LETTERS, text, following)
        return text[following:letters] in _STARTERS and _AFTER_STARTER.match(text, letters) is not None
    return True


def _word_before(text: str, stop: int) -> str | None:
    """Return the word that ends at the offset `stop`, which may be empty; None if it is longer than 24 characters."""
    begin = stop
    while begin > 0 and _WORD.fullmatch(text, begin - 1, begin):
        begin -= 1
        if stop - begin > _LONGEST_WORD:
            return None
    return text[begin:stop]


def _match_end(pattern: re.Pattern[str], text: str, offset: int) -> int:
    """Return the end of the pattern's match at this offset of a text. The pattern must match the empty string too."""
    match = pattern.match(text, offset)
    assert match is not None, "these patterns also match nothing"
    return match.end()


@dataclass
class SequenceBatch:
    """Documents of one key: concatenated ids, the length of each sequence, and the number of sequences per document."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    num_sequences: NDArray[np.int64]
    num_text_bytes: int
    rejects: list[Reject]  # rejected documents, which are not in the batch, in order

    def document_lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens in each document."""
        return _sum_groups(self.lengths, self.num_sequences)

    def select(self, mask: NDArray[np.bool_], num_text_bytes: int) -> SequenceBatch:
        """Return a batch of the documents for which `mask` is True. `num_text_bytes` is the number of bytes of their
        texts.
        """
        of_sequences = np.repeat(mask, self.num_sequences)
        tokens = self.tokens[np.repeat(of_sequences, self.lengths)]
        return SequenceBatch(tokens, self.lengths[of_sequences], self.num_sequences[mask], num_text_bytes, self.rejects)


def prepend_token(batch: SequenceBatch, token: int) -> SequenceBatch:
    """Return a copy of the batch in which every document that has a sequence begins with the additional id `token`, as
    part of its first sequence.
    """
    before = (np.cumsum(batch.num_sequences) - batch.num_sequences)[batch.num_sequences > 0]
    starts = (np.cumsum(batch.lengths) - batch.lengths)[before]
    lengths = batch.lengths.copy()
    lengths[before] += 1
    return replace(batch, tokens=np.insert(batch.tokens, starts, token), lengths=lengths)


@dataclass(frozen=True)
class DocumentConverter:
    """Converter of content to one sequence per document; an empty document has none. It is called with the content, and
    the number and name of the key.
    """

    encoder: Encoder
    append_eod: bool

    def __call__(self, content: Content, key_number: int, key: str) -> SequenceBatch:
        encoded = content.encode(self.encoder, key_number, key, self.append_eod)
        is_filled = encoded.lengths > 0
        return SequenceBatch(
            encoded.tokens, encoded.lengths[is_filled], is_filled.astype(np.int64), encoded.num_text_bytes,
            encoded.rejects,
        )  # fmt: skip


@dataclass(frozen=True)
class SentenceConverter:
    """Converter of content to one sequence per sentence; the end-of-document token, if any, is in the last one."""

    encoder: Encoder
    eod_id: int | None
    newlines: bool = False  # a line end ends a sentence too

    def __call__(self, content: Content, key_number: int, key: str) -> SequenceBatch:
        rejects: list[Reject] = []
        sentences: list[str] = []
        counts, num_text_bytes = [], 0
        for _, text in content.texts(key_number, key):
            if isinstance(text, Reject):
                rejects.append(text)
                continue
            document_sentences = split_sentences(text, self.newlines)
            sentences += document_sentences
            counts.append(len(document_sentences))
            num_text_bytes += len(text.encode())
        encoded = self.encoder.encode_documents(sentences)
        num_sequences = _sum_groups(encoded.lengths > 0, np.array(counts, np.int64))
        tokens, lengths = encoded.tokens, encoded.lengths[encoded.lengths > 0]
        if self.eod_id is not None:
            last = np.cumsum(num_sequences)[num_sequences > 0] - 1
            tokens = np.insert(tokens, np.cumsum(lengths)[last], self.eod_id)
            lengths[last] += 1
        return SequenceBatch(tokens, lengths, num_sequences, num_text_bytes, rejects)


def _sum_groups(values: NDArray[Any], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sums of consecutive groups of values: of the first counts[0] values, the next counts[1], ..."""
    before = np.concatenate(([0], np.cumsum(values)))
    return np.diff(before[np.concatenate(([0], np.cumsum(counts)))])
