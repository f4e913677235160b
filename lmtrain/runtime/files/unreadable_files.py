"""What is said of a file that is not read as text, such as a table, tokens or weights: what it is, and what makes of it
a file that is read.

Called by everything that reads texts which a user names, before it offers to read a file with an unknown suffix as
plain text. It reads only the beginning of a file.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lmtrain.errors import shell_quoted, way

_SNIFFED_BYTES = 4096
_MAX_SNIFFED_BYTES = 1 << 24  # because: an error must be quick
_CODECS = {".gz": "gunzip -k", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zst": "unzstd"}
_LLM_C_MAGIC = (20240520).to_bytes(4, "little")  # followed by 1020 other bytes before the tokens
_ROWS = "then name the column of the text with --key, or data.text_key in a run"
_PANDAS = 'python3 -c "import pandas, sys; pandas.{reader}(sys.argv[1]).to_parquet(sys.argv[2])" {path} {out}.parquet'
_PREPROCESS_AGAIN = "Make the dataset of its texts again, with `lmtrain preprocess`."
_NO_TEXTS = "Give files with texts."
_CSV = (
    'python3 -c "import csv, json, sys; csv.field_size_limit(2**31 - 1); [print(json.dumps(row)) for row in '
    "csv.DictReader(open(sys.argv[1], newline='', encoding='utf-8-sig'), delimiter='{delimiter}')]\" {path} > "
    "{out}.jsonl"
)
_JSON_ARRAY = (
    'python3 -c "import json, sys; [print(json.dumps(row)) for row in json.load(open(sys.argv[1]))]" {path} > '
    "{out}.jsonl"
)
_DECODE = (
    'python3 -c "import json, numpy as np; from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer; '
    "t = Tokenizer.load('TOKENIZER'); end = t.special['eod']; x = np.fromfile('{name}', 'uint16'{offset}); "
    "[print(json.dumps({{'text': t.decode(d[d != end].tolist())}})) for d in "
    'np.split(x, np.flatnonzero(x == end) + 1) if (d != end).any()]" > {out}.jsonl'
)
# suffixes -> what such a file is, and a sentence that says how to make of it what is read
_KINDS: dict[str, tuple[str, str]] = {
    ".npy .npz": ("an array of NumPy, which is no text", _PREPROCESS_AGAIN),
    ".pt .pth .ckpt .pkl .pickle": ("a file of torch or a pickle, which is no text", _NO_TEXTS),
    ".safetensors .gguf .onnx": ("a file of a model's weights, which is no text", _NO_TEXTS),
    ".arrow": (
        "a table of Arrow, which is not read",
        "`python3 -c \"import datasets, sys; datasets.Dataset.from_file(sys.argv[1]).to_parquet(sys.argv[2])\" {path} "
        f"{{out}}.parquet` makes a table that is read; {_ROWS}.",
    ),
    ".feather": (
        "a table of Arrow, which is not read",
        f"`{_PANDAS.replace('{reader}', 'read_feather')}` makes a table that is read; {_ROWS}.",
    ),
    ".orc": (
        "a table of ORC, which is not read",
        f"`{_PANDAS.replace('{reader}', 'read_orc')}` makes a table that is read; {_ROWS}.",
    ),
    ".xlsx .xls .ods": (
        "a spreadsheet, which is not read",
        f"`{_PANDAS.replace('{reader}', 'read_excel')}` makes a table that is read; {_ROWS}.",
    ),
    ".h5 .hdf5": ("a file of HDF5, which is not read", "Write its texts to a .jsonl file, one JSON object a line."),
    ".db .sqlite .sqlite3": (
        "a database of SQLite, which is not read",
        "Write its texts to a .jsonl file, one JSON object a line, as with Python's sqlite3.",
    ),
    ".avro .tfrecord .lmdb .mdb .mds .tfds": (
        "a file of records, which is not read", "Write its texts to a .jsonl file, one JSON object a line.",
    ),
    ".html .htm .xhtml": (
        "a web page, whose marks are no text",
        "`pandoc -t plain {path} -o {out}.txt` writes its text to a file that is read.",
    ),
    ".xml": (
        "XML, whose marks are no text", "Write its texts to a .jsonl file, one JSON object a line, or to .txt files.",
    ),
    ".warc .wet .wat": (
        "an archive of web pages, which is not read", "Write its texts to a .jsonl file, one JSON object a line.",
    ),
    ".pdf": ("a PDF, which is not read", "`pdftotext {path} {out}.txt` writes its text to a file that is read."),
    ".docx .odt .epub .rtf": (
        "a document with layout, which is not read",
        "`pandoc -t plain {path} -o {out}.txt` writes its text to a file that is read.",
    ),
    ".doc .pptx .ppt": (
        "a document with layout, which is not read", "Save it as plain text, in a .txt file.",
    ),
    ".zip": ("an archive, which is not read", "`unzip {path} -d {out}` unpacks it; then give the folder {out}."),
    ".tar .tgz .tar.gz .tar.bz2 .tar.xz .tar.zst .tbz2 .txz": (
        "an archive, which is not read",
        "`mkdir {out} && tar -xf {path} -C {out}` unpacks it; then give the folder {out}.",
    ),
    ".7z .rar": ("an archive, which is not read", "Unpack it and give the folder."),
    ".png .jpg .jpeg .gif .webp .bmp .tif .tiff .ico": ("a picture, which is no text", _NO_TEXTS),
    ".mp3 .wav .flac .ogg .mp4 .mkv .avi .mov .webm": ("sound or film, which is no text", _NO_TEXTS),
    ".exe .dll .so .o .a .class .pyc .wasm": ("a program, which is no text", _NO_TEXTS),
}  # fmt: skip
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer_config.json", "special_tokens_map.json", "merges.txt")


def explain_unreadable(path: Path) -> str:
    """Return two sentences on a file that is not read: what it is, by its name or by its beginning, and what makes of
    it a file that is read. Return "" if it is one whose text may be read as it is.
    """
    name = path.name.lower()
    if path.name in _TOKENIZER_FILES:
        return f"{path} is a file of a tokenizer, which is no text. Give it, or its folder, as the tokenizer."
    for suffixes, (kind, way_out) in _KINDS.items():
        if suffix := next((suffix for suffix in suffixes.split() if name.endswith(suffix)), ""):
            return f"{path} is {kind}. {way_out.format(**_names(path, suffix))}"
    if (unpack := _CODECS.get(path.suffix)) and (is_not_read := explain_unreadable(path.with_suffix(""))):
        what = is_not_read.partition(". ")[0].removeprefix(f"{path.with_suffix('')} is ")
        return f"{path} holds {what}. `{unpack} {shell_quoted(str(path))}` unpacks it; give what it makes to see more."
    explain = _BY_CONTENT.get(path.suffix)
    if explain is not None and (sentences := explain(path)):
        return sentences
    if path.is_file() and path.suffix not in _CODECS and not is_text_file(path):
        return f"{path} is not text: it does not begin with characters in UTF-8. {encoding_advice(path) or _NO_TEXTS}"
    return ""


def is_tokenizer(path: Path) -> bool:
    """Return True if a path is a folder with the files of a tokenizer, or one of these: vocab.txt by another name too.
    """
    if path.is_dir():
        return any((path / name).is_file() for name in (*_TOKENIZER_FILES[:2], "vocab.txt"))
    pieces = _beginning(path).split(b"\n") if path.suffix == ".txt" else []
    return path.name in _TOKENIZER_FILES or (b"[UNK]" in pieces and not any(b" " in piece for piece in pieces))


def is_text_file(path: Path) -> bool:
    """Return True if the beginning of a file is text: UTF-8 without a zero byte."""
    with suppress(OSError, UnicodeDecodeError):
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(_beginning(path))
    return False


def guess_encoding(data: bytes) -> str:
    """Return the name, as iconv takes it, of the encoding that a text's beginning is probably in if it is not UTF-8;
    "" if it is not likely to be text.
    """
    for mark, name in ((codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16")):
        if data.startswith(mark):
            return name
    controls = sum(byte < 32 and byte not in b"\t\n\r\f" for byte in data)
    high = sum(byte >= 128 for byte in data)
    if controls or not high:
        return ""
    # because: in Western texts most letters are ASCII, and in Chinese texts hardly any are
    if high > len(data) / 3:
        if _decodes(data, "gb18030"):
            return "GB18030"
        # because: Russian small letters are E0-FF in the one, and C0-DF in the other
        return "CP1251" if sum(byte >= 0xE0 for byte in data) > high / 2 else "KOI8-R"
    return "CP1252" if _decodes(data, "cp1252") else "ISO-8859-1"


def encoding_advice(path: Path, bad_byte: int = 0) -> str:
    """Return the sentence that names the encoding in which a text probably is, with the line that makes UTF-8 of it;
    "" if it cannot be told. `bad_byte` is the offset of the first byte that is not UTF-8.
    """
    if path.suffix in _CODECS:
        return ""
    data = _beginning(path, bad_byte + _SNIFFED_BYTES)
    # because: letters in UTF-8 before it say that a single place is damaged
    if len(data) <= bad_byte or any(byte >= 128 for byte in data[:bad_byte]) or not (name := guess_encoding(data)):
        return ""
    new = path.with_name(f"{path.stem}.utf8{path.suffix}")
    line = f"iconv -f {name} -t UTF-8 {shell_quoted(str(path))} > {shell_quoted(str(new))}"
    return f"It is probably in {name}: `{line}` makes UTF-8 of it; then give {new}."


def _decodes(data: bytes, encoding: str) -> bool:
    with suppress(UnicodeDecodeError):
        codecs.getincrementaldecoder(encoding)().decode(data)
        return True
    return False


def _names(path: Path, suffix: str) -> dict[str, str]:
    """Return the names that a way out has: the file's, and that of what is made of it, without a suffix."""
    stem = path.name[: -len(suffix)] or "new"
    while any((path.parent / f"{stem}{end}").exists() for end in ("", ".jsonl", ".txt", ".parquet")):
        stem += "_new"
    return {"path": shell_quoted(str(path)), "out": shell_quoted(str(path.with_name(stem)))}


def _explain_table(path: Path) -> str:
    """Return the sentences on a table in text: its separator is the one of which its first line has the most."""
    first = _beginning(path).split(b"\n")[0].decode(errors="replace")
    delimiter = "\t" if path.suffix == ".tsv" else max(",;\t|", key=first.count)
    line = _CSV.format(**_names(path, path.suffix), delimiter="\\t" if delimiter == "\t" else delimiter)
    out = _names(path, path.suffix)["out"]
    return f"{path} is a table in {path.suffix[1:].upper()}, which is not read. `{line}` makes {out}.jsonl; {_ROWS}."


def _explain_json(path: Path) -> str:
    """Return the sentences on a file of JSON: an array, lines, an object, or a file of a dataset."""
    prefix = path.with_suffix("")
    if path.with_suffix(".idx").is_file():
        return _explain_dataset(prefix, path)
    beginning = _beginning(path).lstrip(codecs.BOM_UTF8).lstrip()
    if beginning.startswith(b"["):
        names = _names(path, path.suffix)
        line = _JSON_ARRAY.format(**names)
        return f"{path} is one JSON array, which is not read. `{line}` makes {names['out']}.jsonl, an object a line."
    lines = beginning.split(b"\n")
    with suppress(ValueError):
        if len(lines) > 1 and isinstance(json.loads(lines[0]), dict):
            lines_name = path.with_suffix(".jsonl").name
            return f"{path} has lines of JSON. Add {way('--format', 'jsonl')}, or rename it to {lines_name}."
    return f"{path} is no list of documents. Write its texts to a .jsonl file, one JSON object a line."


def _explain_dataset(prefix: Path, path: Path) -> str:
    return f"{path} is a file of the dataset {prefix}, which holds tokens and no text. Give the texts it was made of."


def _explain_tokens(path: Path) -> str:
    """Return the sentences on a .bin or .idx: part of a dataset, or tokens as nanoGPT and llm.c write them."""
    other = path.with_suffix(".bin" if path.suffix == ".idx" else ".idx")
    if other.is_file() or path.suffix == ".idx":
        return _explain_dataset(path.with_suffix(""), path)
    offset = ", offset=1024" if _beginning(path).startswith(_LLM_C_MAGIC) else ""
    line = _DECODE.format(**_names(path, ".bin"), name=path, offset=offset)
    return (
        f"{path} has no .idx beside it: it may be bare tokens, as nanoGPT and llm.c write them, which are not read. "
        f"Run `lmtrain preprocess` on the texts, or if these are gone, `{line}` makes texts of tokens of two bytes "
        "again, with the tokenizer's file or folder in place of TOKENIZER."
    )


def _beginning(path: Path, num_bytes: int = _SNIFFED_BYTES) -> bytes:
    """Return the first bytes of a file, b"" if it cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        return file.read(min(num_bytes, _MAX_SNIFFED_BYTES))
    return b""


_BY_CONTENT: dict[str, Callable[[Path], str]] = {
    ".csv": _explain_table, ".tsv": _explain_table, ".tab": _explain_table, ".json": _explain_json,
    ".bin": _explain_tokens, ".idx": _explain_tokens,
}  # fmt: skip
