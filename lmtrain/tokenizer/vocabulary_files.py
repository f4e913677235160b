"""Tokenizers' files: GPT-2's and BERT's vocabularies as tokenizers, checks of loaded tokenizers, ids that end a text.

Called by text_to_ids_and_back.py (loading), train.py and bulk_encoding.py; `end_ids` by the readers of model folders.
BPE: bytes become letters, text is split by a pattern (no space is prepended), and pairs merge in the order of their
rank; so every text has ids and nothing is unknown. WordPiece: a word is split greedily into the longest pieces of the
vocabulary, with `##` before pieces that do not begin a word; a word that cannot be split is [UNK].
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lmtrain.errors import DataError, shorten
from lmtrain.runtime.files.atomic_files import parse_json

EOD = "<|endoftext|>"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # special tokens of WordPiece
ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())  # one letter for each of the 256 bytes
_LETTERS_LEFT = [letter for letter in sorted(ALPHABET) if ord(letter) > 255]  # letters for bytes that are not printable
LETTERS = tuple(chr(byte) if chr(byte) in ALPHABET else _LETTERS_LEFT.pop(0) for byte in range(256))  # indexed by byte
_SURROGATE = re.compile("[\ud800-\udfff]")

_MAX_ENTRIES = 4_000_000  # entries between commas or on lines: pieces, merges, ...
_MAX_ID = 2**31 - 1  # because: the widest dtype of ids in datasets is int32
_MAX_GROWTH = 64  # maximal factor by which replacement rules may lengthen a text
_MAX_RULES = 256
_MAX_AFFIX = 100  # characters of a prefix or suffix of pieces
_MAX_WORD = 1000  # characters; because: WordPiece's time is quadratic in a word's length, and BERT's limit is 100
GET_AGAIN = "Get the file again, or give another tokenizer."
# the files that may name the ids after which generation stops; transformers reads the second only if there is no first.
END_ID_FILES = ("generation_config.json", "config.json")

CL100K = (  # the pattern of GPT-4 and LLaMA 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2 = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")  # the pattern of Qwen 2, 2.5 and 3: each digit is a word
_REGEXES = {"cl100k": CL100K, "qwen2": QWEN2}
Pattern = Literal["gpt2", "cl100k", "qwen2"]


def build_bpe_pre_tokenizer(pattern: Pattern) -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer that splits text into words by a regular expression (that of GPT-2, cl100k of GPT-4 and
    LLaMA 3, or Qwen's) and turns bytes into letters. BPE merges pieces only within a word.
    """
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern == "gpt2")
    if pattern == "gpt2":
        return to_letters
    split = pre_tokenizers.Split(Regex(_REGEXES[pattern]), "isolated")
    return pre_tokenizers.Sequence([split, to_letters])


def bpe_pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """Return the name of the regular expression by which a byte-level BPE splits text into words: "gpt2", "cl100k" or
    "qwen2". Return None for every other `pre_tokenizer`, an entry of tokenizer.json.
    """
    split = pre_tokenizer or {}
    parts = split["pretokenizers"] if split.get("type") == "Sequence" else [split]
    *before, to_letters = parts or [{}]
    if to_letters.get("type") != "ByteLevel" or to_letters["add_prefix_space"]:
        return None
    if to_letters["use_regex"]:
        return None if before else "gpt2"
    for name, regex in _REGEXES.items():
        if before == [{"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}]:
            return name
    return None


def build_bpe(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """Build a byte-level BPE tokenizer that splits words like GPT-2. `vocab` maps pieces to ids, `merges` lists pairs
    of pieces, the pair to merge first at the front.
    """
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = build_bpe_pre_tokenizer("gpt2")
    inner.decoder = decoders.ByteLevel()
    if EOD in vocab:
        inner.add_special_tokens([AddedToken(EOD, normalized=False)])
    return inner


def read_gpt2(vocab: bytes, merges: bytes, vocab_name: str, merges_name: str) -> Tokenizer:
    """Build a tokenizer from the contents of vocab.json (piece -> id) and merges.txt (a pair of pieces per line, the
    pair to merge first at the top). The names are for error messages.
    """
    pieces = _read_vocab(vocab, vocab_name)
    return build_bpe(pieces, _read_merges(merges, merges_name, pieces))


def _read_vocab(data: bytes, file_name: str) -> dict[str, int]:
    """Parse the content of GPT-2's vocab.json and return piece -> id. Raise DataError unless all ids are different and
    a piece exists for each of the 256 bytes.
    """
    pieces = parse_json(data, Path(file_name))
    if not isinstance(pieces, dict) or not pieces:
        raise DataError(f"{file_name} is not a JSON object that maps pieces to ids. It is damaged or another file.")
    for piece, number in pieces.items():
        if type(number) is not int or not 0 <= number < 2**31:
            shown = repr(number) if isinstance(number, (bool, int, float)) else shorten(number)
            raise DataError(
                f"{file_name} is damaged: it gives {shorten(piece)!a} the id {shown}, but ids are whole numbers from 0."
            )
        if not piece.isascii() and _SURROGATE.search(piece):
            raise DataError(
                f"{file_name} is damaged: its piece {shorten(piece)!a} holds half of a character (a surrogate)."
            )
    if len(set(pieces.values())) < len(pieces):
        raise DataError(f"{file_name} is damaged: it gives two pieces the same id.")
    missing = ALPHABET - pieces.keys()
    if missing:
        raise DataError(
            f"{file_name} is no vocabulary of a byte-level BPE: {len(missing)} of the 256 byte pieces are missing."
        )
    return pieces


def _read_merges(data: bytes, file_name: str, pieces: dict[str, int]) -> list[tuple[str, str]]:
    """Parse the content of GPT-2's merges.txt and return its pairs of pieces. Raise DataError at a line that is not a
    pair of pieces in the vocabulary `pieces`.
    """
    lines = _decode_lines(data, file_name)
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if (not line and number == len(lines)) or (number == 1 and line.startswith("#version")):
            continue
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise DataError(
                f"{file_name}:{number}: {shorten(line)!r} is not a pair of pieces. Give a valid merges.txt."
            )
        if left not in pieces or right not in pieces or left + right not in pieces:
            piece = next(piece for piece in (left, right, left + right) if piece not in pieces)
            raise DataError(
                f"{file_name}:{number}: {shorten(piece)!r} is not in vocab.json. Give files of the same tokenizer."
            )
        merges.append((left, right))
    return merges


def build_wordpiece(vocab: dict[str, int], lowercase: bool) -> Tokenizer:
    """Build a WordPiece tokenizer like BERT's. `vocab` maps pieces to ids; with `lowercase`, the tokenizer lower-cases
    all text and removes accents.
    """
    inner = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))  # noqa: S106 - no password
    apply_wordpiece_splitting(inner, lowercase)
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL if name in vocab])
    return inner


def apply_wordpiece_splitting(inner: Tokenizer, lowercase: bool) -> None:
    """Make a tokenizer clean text and split it into words like BERT. With `lowercase`, it lower-cases all text and
    removes accents.
    """
    inner.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()


def read_wordpiece(data: bytes, file_name: str) -> Tokenizer:
    """Build BERT's tokenizer from the content of a vocab.txt, which has one piece per line; a piece's id is its line
    number, counted from 0. Raise DataError for a bad line.
    """
    lines = _decode_lines(data, file_name)
    if lines[-1] == "":
        lines.pop()
    vocab: dict[str, int] = {}
    for number, line in enumerate(lines):
        piece = line.removesuffix("\r")
        if piece in vocab or piece != piece.strip() or not piece:
            content = "an empty line"
            if piece in vocab:
                content = f"{shorten(piece)!r}, as line {vocab[piece] + 1} does"
            elif piece.strip():  # because: other readers strip blanks, and ids must not depend on the reader
                content = f"{shorten(piece)!r}, which ends or begins with a blank"
            raise DataError(
                f"{file_name}:{number + 1} holds {content}. Each line of a vocab.txt must be a different piece."
            )
        vocab[piece] = number
    if "[UNK]" not in vocab:
        raise DataError(f"{file_name} has no piece [UNK], so it is damaged or no WordPiece vocabulary.")
    # because: vocab.txt does not record whether text is lower-cased; if it is, no piece has a capital letter
    plain = (piece for piece in vocab if not (piece.startswith("[") and piece.endswith("]")))
    return build_wordpiece(vocab, lowercase=all(piece == piece.lower() for piece in plain))


def _decode_lines(data: bytes, file_name: str) -> list[str]:
    """Split the content of a UTF-8 file into lines. Raise DataError with `file_name` if it is not valid UTF-8."""
    try:
        return data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file_name} is not UTF-8 text at byte {error.start}. It is damaged or another kind of file."
        ) from error


def check_num_entries(data: bytes, file_name: str) -> None:
    """Raise DataError if a tokenizer's file, whose content is `data`, has too many entries (pieces, merges) to parse.
    Each entry becomes Python objects of about 100 bytes.
    """
    count = data.count(b"\n") + data.count(b",")
    if count > _MAX_ENTRIES:
        raise DataError(
            f"{file_name} has {count} entries; a tokenizer's file may have at most {_MAX_ENTRIES}. Check the path."
        )


def check_tokenizer(library_tokenizer: Tokenizer, file_name: str) -> int:
    """Return the vocabulary size of a loaded tokenizer: its highest id + 1. Raise DataError, with `file_name` in the
    message, if the tokenizer is damaged or could exhaust memory or time.
    """
    vocab_size = _check_ids(library_tokenizer, file_name)
    _check_model(library_tokenizer.model, file_name)
    _check_rules(library_tokenizer, file_name)
    _check_template(library_tokenizer, file_name)
    return vocab_size


def _check_ids(library_tokenizer: Tokenizer, file_name: str) -> int:
    """Return the highest id of the vocabulary + 1. Raise DataError if the vocabulary is empty, an id is too large for
    the number of tokens, or two tokens have the same id.
    """
    ids = library_tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise DataError(f"{file_name} has no vocabulary, so it is damaged or no tokenizer. {GET_AGAIN}")
    # because: a model allocates an embedding row for every id up to the largest
    limit = min(_MAX_ID, 8 * len(ids) + (1 << 18))
    if max(ids) > limit:
        raise DataError(
            f"{file_name} has the id {max(ids)}; with {len(ids)} tokens, at most {limit} is allowed. {GET_AGAIN}"
        )
    if len(set(ids)) < len(ids):
        raise DataError(f"{file_name} gives the same id to two tokens. {GET_AGAIN}")
    return int(max(ids)) + 1


def _check_model(model: Any, file_name: str) -> None:
    """Raise DataError if a tokenizer's model (BPE, WordPiece, ...) sets max_input_chars_per_word too high, because long
    words take too much time, or marks word pieces with a prefix or suffix of more than 100 characters.
    """
    longest = getattr(model, "max_input_chars_per_word", 0)
    if longest > _MAX_WORD:
        raise DataError(
            f"{file_name} has max_input_chars_per_word={longest}; at most {_MAX_WORD} is allowed, because longer words "
            "take too much time. Lower it: BERT's is 100."
        )
    for kind in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(getattr(model, kind, None) or "") > _MAX_AFFIX:
            raise DataError(f"{file_name} has a {kind} of more than {_MAX_AFFIX} characters. {GET_AGAIN}")


def _check_rules(library_tokenizer: Tokenizer, file_name: str) -> None:
    """Raise DataError if the normalizer, pre-tokenizer or decoder has too many rules, or rules that could make a text
    more than 64 times as long.
    """
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        component = getattr(library_tokenizer, part)
        rules = [] if component is None else list(_iterate_rules(json.loads(component.__getstate__())))
        growth = 1.0
        for rule in rules:
            growth = min(growth * _growth_factor(rule), 1e9)
        if growth > _MAX_GROWTH:
            raise DataError(
                f"{file_name} has a {part} that makes a text {growth:.0f} times as long; at most {_MAX_GROWTH} times "
                f"is allowed. It is damaged, or made to fill the memory. {GET_AGAIN}"
            )
        if len(rules) > _MAX_RULES:
            raise DataError(
                f"{file_name} has a {part} of {len(rules)} rules; at most {_MAX_RULES} are allowed. {GET_AGAIN}"
            )


def _check_template(library_tokenizer: Tokenizer, file_name: str) -> None:
    """Raise DataError if the post-processor has a template that does not contain the text exactly once: a text would
    get other ids.

    Special tokens that a template adds around the text are never used.
    """
    if library_tokenizer.post_processor is None:
        return
    for rule in _iterate_rules(json.loads(library_tokenizer.post_processor.__getstate__())):
        texts = [part["Sequence"]["id"] for part in rule.get("single") or () if "Sequence" in part]
        if rule["type"] == "TemplateProcessing" and texts != ["A"]:
            raise DataError(
                f"{file_name} has a post_processor whose template for a single text contains {len(texts)} texts; it "
                "must contain exactly one, A. Change the template so that it keeps the text, or get the file again."
            )


def _iterate_rules(component: Any) -> Iterator[dict[str, Any]]:
    """Yield every rule in the JSON of a tokenizer's component (normalizer, pre-tokenizer, ...): the component itself,
    and all rules nested in it.
    """
    if isinstance(component, dict) and "type" in component:
        yield component
        for key in ("normalizers", "pretokenizers", "decoders", "processors"):
            for rule in component.get(key) or ():
                yield from _iterate_rules(rule)


def _growth_factor(rule: dict[str, Any]) -> float:
    """Return the largest factor by which a rule of a tokenizer.json can lengthen a text, at least 1.0."""
    if rule["type"] == "Replace":
        pattern, content = rule["pattern"], len(rule["content"])
        return max(1.0, content / max(1, len(pattern["String"])) if "String" in pattern else content)
    if rule["type"] == "Precompiled":
        return _longest_replacement(base64.b64decode(rule["precompiled_charsmap"]))
    return 2.0 if rule["type"] == "ByteLevel" else 1.0


def _longest_replacement(charsmap: bytes) -> float:
    """Return the length in bytes of the longest replacement text in SentencePiece's table of normalizations (charsmap).
    Return 1.0 if no replacement has more than 64 bytes, as in genuine tables.

    The charsmap is the size of a trie, the trie, then zero-terminated replacement texts.
    """
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
    # because: the longest expansion of a single character in Unicode (an Arabic greeting) takes 33 bytes
    return 1.0 if max(map(len, texts)) <= 64 else float(max(map(len, texts)))


def end_ids(files: Mapping[str, bytes]) -> frozenset[int]:
    """Return the token ids at which transformers stops generating, read from generation_config.json or else
    config.json. `files` maps names of files in a Hugging Face folder to their content. Return an empty set if no ids
    are given.
    """
    name = next((name for name in END_ID_FILES if name in files), None)
    config = parse_json(files[name], Path(name)) if name is not None else None
    ids = config.get("eos_token_id") if isinstance(config, dict) else None
    return frozenset(token for token in (ids if isinstance(ids, list) else [ids]) if type(token) is int and token >= 0)
