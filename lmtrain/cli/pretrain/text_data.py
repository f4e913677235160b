"""`data.text`: the tokenizer and the dataset that a run makes of a text before it begins, and what is printed about it.

Called by pretrain between the settings and preflight; data_tools.preprocess.text_dataset does the work.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lmtrain.cli.screen.print_output import print_notice, progress
from lmtrain.data.data_settings import DataSettings
from lmtrain.errors import DataError, SettingsError
from lmtrain.runfolder.file_names import TEXT_PREFIX, TEXT_RECORD
from lmtrain.units import format_bytes, format_count, format_seconds, plural

if TYPE_CHECKING:
    from data_tools.preprocess.text_dataset import Report, TextDataset, TextRequest
    from lmtrain.runtime.processes.process_environment import ProcessEnv
    from lmtrain.train.run_config import RunConfig


def make_data_of_text(config: RunConfig, overrides: Sequence[str], env: ProcessEnv) -> None:
    """Make the tokenizer and the dataset of data.text, unless an earlier start has made them, and print what was made;
    do nothing without data.text. Raise if the text is too large, or has changed since.

    `overrides` are the settings of the command line, for the commands that a message suggests.
    """
    data = config.data
    if not isinstance(data, DataSettings) or data.text is None or env.is_child:
        return
    from data_tools.preprocess.text_dataset import make_text_dataset

    request, folder = _build_request(config, data), Path(data.path).parent
    if (made := _find_made(request, data, config)) is None:
        _check_size(request, data, config, overrides)
        with _show_progress() as report:
            made = make_text_dataset(request, folder, TEXT_PREFIX, TEXT_RECORD, report, print_notice)
    for line in _describe(made, data, folder):
        print_notice(line)


def _build_request(config: RunConfig, data: DataSettings) -> TextRequest:
    """Return the request for a dataset of data.text, with the tokenizer of data.tokenizer, or else of the checkpoint
    that the run begins from.
    """
    from data_tools.preprocess.text_dataset import TextRequest
    from data_tools.read.parse_documents import OptionNames
    from lmtrain.runtime.processes.process_environment import num_usable_cpus

    names = OptionNames(key="data.text_key=KEY", skip=None, split="data.text_split=blank-line")
    return TextRequest(
        text=Path(str(data.text)), key=data.text_key, split=data.text_split, cuts_sentences=data.cuts_sentences,
        tokenizer=Path(data.tokenizer) if data.tokenizer else _checkpoint_tokenizer(config),
        max_vocab=config.model.to_dict().get("vocab_size"), workers=num_usable_cpus(), names=names,
    )  # fmt: skip


def _checkpoint_tokenizer(config: RunConfig) -> Path | None:
    """Return the tokenizer file of the checkpoint, or the folder of another program, that the run begins from, by
    checkpoint.init_from or checkpoint.resume; None if it begins with random weights.
    """
    from lmtrain.checkpoint.find_and_prune import is_best, latest_checkpoint, resolve_checkpoint
    from lmtrain.exchange.source_format import lmtrain_kind
    from lmtrain.runfolder.file_names import IMPORTED, TOKENIZER

    settings = config.checkpoint
    source = settings.init_from or (settings.resume if settings.resume not in ("auto", "none") else None)
    if source is None:
        return None
    path, imported = Path(source), latest_checkpoint(Path(config.run.dir) / IMPORTED)
    if imported is not None:
        return imported / TOKENIZER
    is_foreign = path.is_dir() and not is_best(path) and not lmtrain_kind(path)
    return path if is_foreign else resolve_checkpoint(path) / TOKENIZER


def _find_made(request: TextRequest, data: DataSettings, config: RunConfig) -> TextDataset | None:
    """Return the dataset that an earlier start has made, None if there is none. Raise DataError if it was made of
    another text.
    """
    from data_tools.preprocess.text_dataset import TextChangedError, find_text_dataset

    try:
        return find_text_dataset(request, Path(data.path).parent, TEXT_PREFIX, TEXT_RECORD)
    except TextChangedError as error:
        raise DataError(
            f"data.text={data.text} is not the text of which {data.path} was made: {error}. Give another run.dir to "
            f"train on the text as it is now, or data.path={data.path} instead of data.text to go on with the old one."
        ) from error


def _check_size(request: TextRequest, data: DataSettings, config: RunConfig, overrides: Sequence[str]) -> None:
    """Raise SettingsError, with the commands that make the dataset beforehand, if the text is larger than
    data.text_limit.
    """
    from data_tools.preprocess.text_dataset import estimate_text_bytes

    num_bytes = estimate_text_bytes(request.find_sources(), request.key)
    if num_bytes <= data.text_limit:
        return
    text = str(data.text)
    name = Path(text).name.partition(".")[0] or "text"
    kind = ["--kind", "wordpiece"] if data.cuts_sentences else []
    key = ["--key", data.text_key] if data.text_key != "text" else []
    tokenizer = str(request.tokenizer or f"data/{name}_tokenizer")
    size = str(request.vocab_size(num_bytes))
    train = ["tokenizer", "train", text, "--output", tokenizer, "--vocab-size", size]
    split = ["--split", data.text_split] if data.text_split != "file" else []
    sentences = ["--split-sentences"] if data.cuts_sentences else []
    rest = [word for word in overrides if not word.lstrip("+").startswith(("data.text", "data.tokenizer="))]
    commands = [
        *([[*train, *kind, *key]] if request.tokenizer is None else []),
        ["preprocess", text, "--tokenizer", tokenizer, "--output", f"data/{name}", *key, *split, *sentences],
        ["pretrain", f"data.path=data/{name}", *rest],
    ]
    lines = "\n".join(f"  lmtrain {shlex.join(words)}" for words in commands)
    raise SettingsError([
        f"data.text={data.text} holds about {format_bytes(num_bytes)} of text, more than the "
        f"data.text_limit={format_bytes(data.text_limit)} of which a run makes a dataset by itself. Raise the limit, "
        f"or make the dataset beforehand:\n{lines}"
    ])  # fmt: skip


@contextmanager
def _show_progress() -> Iterator[Report]:
    """Context manager: show the progress of making the dataset; yield a function that receives the step's name, the
    amount done and the total, in bytes.
    """
    with progress("read", "bytes", interrupted="the same command goes on where this one was.") as shown:

        def show(step: str, done: int, total: int) -> None:
            shown.set_activity(step)
            if done:
                shown(done, total)

        yield show


def _describe(made: TextDataset, data: DataSettings, folder: Path) -> Iterator[str]:
    """Yield lines that say what was made: the files and documents, the tokenizer, and the dataset."""
    from data_tools.preprocess.text_dataset import TOKENIZER_FILE

    text = f"{plural(made.num_documents, 'document')}, {format_count(made.num_tokens)} tokens"
    if made.was_there:
        yield f"data.text={data.text} is unchanged: {data.path} was made of it at an earlier start ({text})"
        return
    origin = (
        f"trained on this text in {format_seconds(made.tokenizer_seconds)}: {folder / TOKENIZER_FILE}"
        if made.tokenizer_source is None
        else f"read from {made.tokenizer_source}"
    )
    yield f"data.text={data.text}: {plural(made.num_files, 'file')}, {format_bytes(made.num_bytes)} of text"
    yield f"tokenizer: {made.tokenizer_kind}, {made.vocab_size:,} pieces, {origin}"
    yield f"dataset: {text}, made in {format_seconds(made.seconds)}: {data.path}"
