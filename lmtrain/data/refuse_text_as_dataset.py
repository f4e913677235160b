"""Refuse settings that give a text where a dataset belongs, with the setting or the command that makes one of it.

Called where the datasets of a run are opened, and by the command line before it prints a line to type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path

from lmtrain.config.settings_base import show
from lmtrain.data.data_settings import BlendSettings, DataChoice, DataSettings
from lmtrain.data.store.indexed_dataset import dataset_file
from lmtrain.data.store.joined_dataset import shard_prefixes
from lmtrain.errors import SettingsError, shell_quoted, way
from lmtrain.runtime.files.unreadable_files import explain_unreadable

# texts that data.text reads without data.text_suffixes
_READABLE = re.compile(r".*\.(txt|jsonl|parquet|zst|(txt|jsonl?)\.(gz|bz2|xz|zst))", re.DOTALL)


def refuse_text_as_dataset(data: DataChoice) -> None:
    """Raise SettingsError if a setting that names datasets names a text: a file, a folder of texts or a glob."""
    if problems := [*_problems(data)]:
        raise SettingsError(problems)


def _problems(data: DataChoice) -> Iterator[str]:
    if isinstance(data, DataSettings):
        if data.text is None and _is_text(data.path):
            yield _about_training(f"data.path={data.path}", [data.path], ["data.path"])
        if data.valid_path and _is_text(data.valid_path):
            yield _to_preprocess(f"data.valid_path={data.valid_path}", data.valid_path, [data.path])
    elif isinstance(data, BlendSettings):
        for key in ("datasets", "valid_datasets"):
            parts = getattr(data, key)
            texts = [part.path for part in parts if _is_text(part.path)]
            is_plain = len(texts) == len(parts) and len({part.weight for part in parts}) == 1
            if texts and key == "datasets" and is_plain:
                yield _about_training(f"data.datasets has the path {texts[0]}, which", texts, ["data.datasets", "data"])
            elif texts:
                others = [part.path for part in data.datasets]
                yield _to_preprocess(f"data.{key} has the path {texts[0]}, which", texts[0], others)
    for name, path in data.valid_paths.items():
        if _is_text(path):
            yield _to_preprocess(f"data.valid_paths.{name}={path}", path, [getattr(data, "path", "")])


def _about_training(subject: str, texts: Sequence[str], keys: Sequence[str]) -> str:
    """Return the problem that training data are texts: data.text makes a dataset of them in the run itself."""
    if is_not_read := next(filter(None, map(_explain, texts)), ""):
        return f"{subject} is no dataset. {is_not_read}"
    suffixes = sorted({Path(path).suffix for path in texts if Path(path).is_file() and not _READABLE.fullmatch(path)})
    words = [f"data.text={show(texts[0] if len(texts) == 1 else tuple(texts))}"]
    words += [f"data.text_suffixes=[{','.join(suffixes)}]"] if all(suffixes) and suffixes else []
    made = way(*words, instead_of=keys)
    return f"{subject} is a text, not a dataset. Use {made} to make a dataset of it, or {_command(texts[0])}."


def _to_preprocess(subject: str, text: str, datasets: Sequence[str]) -> str:
    """Return the problem that a text is given where only datasets are read. The tokenizer to make one with is that of
    the first of `datasets` that has one.
    """
    if is_not_read := _explain(text):
        return f"{subject} is no dataset. {is_not_read}"
    stored = (dataset_file(Path(path), ".tokenizer.json") for path in datasets if path)
    tokenizer = next((str(path) for path in stored if path.is_file()), "TOKENIZER")
    return f"{subject} is a text, not a dataset. To make a dataset of it, {_command(text, tokenizer)}."


def _explain(text: str) -> str:
    """Return what a file is that is not read as text either, "" for other paths."""
    path = Path(text)
    return explain_unreadable(path) if path.is_file() and not _READABLE.fullmatch(text) else ""


def _command(text: str, tokenizer: str = "TOKENIZER") -> str:
    output = Path(text).with_name(Path(text).name.partition(".")[0] or "NAME") if "*" not in text else "PREFIX"
    made = f"lmtrain preprocess {shell_quoted(text)} --tokenizer {shell_quoted(tokenizer)} --output {output}"
    return f"type `{made}`; then give {output}"


def _is_text(path: str) -> bool:
    """Return whether a path names no dataset but a file, a folder of texts, or files by a glob."""
    prefix = Path(path)
    if not path.strip() or dataset_file(prefix, ".idx").is_file() or shard_prefixes(prefix):
        return False
    if prefix.is_dir():
        return not any(prefix.glob("*.idx")) and any(map(_READABLE.fullmatch, map(str, prefix.glob("**/*"))))
    if prefix.is_file():
        return prefix.suffix not in (".bin", ".idx", ".json")
    return "*" in path and any(map(_READABLE.fullmatch, glob(path)))
