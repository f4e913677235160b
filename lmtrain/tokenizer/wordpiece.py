"""BERT's WordPiece: its vocab.txt and how a tokenizer is made of a vocabulary.

Called by base.py (loading) and train.py. A word is cut greedily into the longest pieces of the vocabulary, where `##`
marks a piece that does not begin a word; a word that cannot be cut is [UNK].
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lmtrain.errors import DataError, brief

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def build(vocab: dict[str, int], lowercase: bool) -> Tokenizer:
    inner = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))  # noqa: S106 - no password
    apply_splitting(inner, lowercase)
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL if name in vocab])
    return inner


def apply_splitting(inner: Tokenizer, lowercase: bool) -> None:
    """How BERT cleans a text and cuts it into words; accents go when case goes."""
    inner.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()


def read_vocab(data: bytes, name: str) -> Tokenizer:
    """The contents of vocab.txt: one piece a line, its id the line's number from 0."""
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}, byte {error.start}: invalid UTF-8. It is damaged or another kind of file.") from error
    if lines[-1] == "":
        lines.pop()
    vocab: dict[str, int] = {}
    for number, line in enumerate(lines):
        piece = line.removesuffix("\r")
        if piece in vocab or piece != piece.strip() or not piece:
            what = "an empty line"
            if piece in vocab:
                what = f"{brief(piece)!r}, as line {vocab[piece] + 1} does"
            elif piece.strip():  # because: some programs take blanks off, and ids must not depend on who reads
                what = f"{brief(piece)!r}, which ends or begins with a blank"
            raise DataError(f"{name}:{number + 1} holds {what}. Each line of a vocab.txt is a piece of its own.")
        vocab[piece] = number
    if "[UNK]" not in vocab:
        raise DataError(f"{name} has no [UNK]. It is damaged or no WordPiece vocabulary.")
    return build(vocab, lowercase=not _has_capitals(vocab))


def _has_capitals(vocab: dict[str, int]) -> bool:
    """vocab.txt does not say whether text is lower-cased first; a piece with a capital would then never be used."""
    return any(piece != piece.lower() for piece in vocab if not (piece.startswith("[") and piece.endswith("]")))
