"""`data.text`: the tokenizer and the dataset that a run makes of a text before it begins, and what is told of them.

Called between the settings and preflight, and by dry runs. The work is done by
data_tools.preprocess.tokenizer_and_dataset_from_text.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.checkpoint.find_and_prune import is_best, latest_checkpoint, resolve_checkpoint
from lmtrain.config.settings_base import show
from lmtrain.config.typed_words import typed_words, without_settings
from lmtrain.data.data_settings import DataSettings
from lmtrain.data.store.cut_one_text import finer_split
from lmtrain.errors import DataError, SettingsError, split_ways, way
from lmtrain.exchange.detect_model_folder_format import lmtrain_kind
from lmtrain.runfolder.file_names import CHECKPOINTS, CONFIG, IMPORTED, TEXT_PREFIX, TEXT_RECORD, TOKENIZER
from lmtrain.runtime.files.atomic_files import check_output_folder
from lmtrain.runtime.processes.process_environment import ProcessEnv, num_usable_cpus
from lmtrain.start.launch_ranks import wait_for_rank_0
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.check_machine_and_processes import check_machine
from lmtrain.units import format_bytes, format_count, format_seconds, plural

if TYPE_CHECKING:
    from data_tools.preprocess.tokenizer_and_dataset_from_text import Report, TextDataset, TextFolder, TextRequest
    from lmtrain.observe.screen.command_progress import ShowProgress

_PREVIEW_BYTES = 4 << 20  # because: a tokenizer is trained on so much text in a second or two


def make_data_of_text(
    config: RunConfig, overrides: Sequence[str], env: ProcessEnv, made_text: ExitStack,
    report: Callable[[str], None], show_progress: ShowProgress, *, elastic: bool = False,
) -> None:  # fmt: skip
    """Make a tokenizer and a dataset from the text files of data.text, unless an earlier start has, and tell `report`
    what was made; do nothing without data.text. Every process may call this: rank 0 makes them, the others wait. Raise
    an LmtrainError if the text is too large or has changed since then, or if the run could not start on this machine.

    `overrides` are the settings of the command line, for the commands that a message suggests; `elastic` means that the
    layout is still to be adapted to the processes. If `made_text` is closed by a refusal, what was made is removed.
    """
    data = config.data
    if not isinstance(data, DataSettings) or data.text is None or env.is_child:
        return  # because: the launcher of a rank has made it
    if not (config.parallel.auto or elastic):
        check_machine(config, env)  # because: making the dataset can take minutes
    folder = _text_folder(Path(data.path))
    if env.rank > 0:
        wait_for_rank_0(
            env, config.parallel.timeout_s, lambda: folder.is_complete, f"the dataset of data.text={show(data.text)}",
            lambda: _sizes_below(folder.prefix.parent),
        )  # fmt: skip
        return
    request = _build_request(config, data)
    with _explain_changed_text(data):
        made = _find_made(config, data, request)
        if made is not None:
            report(
                f"data.text={show(data.text)} is unchanged: {data.path} was made of it at an earlier start "
                f"({_describe_dataset(made)})"
            )
            return
        _check_size(request, data, overrides)
        if notice := request.suffixes.left_out(request.texts):
            report(split_ways(notice)[0])
        check_output_folder(Path(config.run.dir), f"run.dir={config.run.dir}", check_lock=True)
        with _show_steps(show_progress) as report_step:
            making = folder.make(request, report_step, report, replaces=_is_unused(config, data))
            made = made_text.enter_context(making)
    for line in _describe(made, data, folder):
        report(line)


@dataclass(frozen=True)
class TextPreview:
    """The dataset that a start would make of data.text, for a dry run, which checks the settings with a temporary
    dataset of the text or of its beginning.
    """

    data: DataSettings  # the run's data settings
    temporary_prefix: Path
    num_files: int
    made: TextDataset
    share: float  # of the text that is in the temporary dataset

    def complete_facts(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Return `facts`, those of a dry run with the temporary dataset, corrected for the whole text: paths are
        replaced, and epochs and samples, if only a part of the text was read, are scaled up to all of it.
        """
        about = "about " if self.share < 1 else ""
        way = "to be trained on it" if self.made.tokenizer_source is None else f"read from {self.made.tokenizer_source}"
        size, tokens = format_bytes(self.made.num_bytes / self.share), format_count(self.made.num_tokens / self.share)
        basis = f", by its first {format_bytes(self.made.num_bytes)}" if self.share < 1 else ""
        text = {
            "text": f"{show(self.data.text)}: {plural(self.num_files, 'file')}, {about}{size}",
            "tokenizer": f"{self.made.tokenizer_kind}, {self.made.vocab_size:,} pieces, {way}",
            "dataset": f"{self.data.path}, to be made: {about}{tokens} tokens{basis}",
        }
        facts = {key: self._with_final_path(value) for key, value in facts.items()}
        if self.share < 1:
            facts.pop("validation", None)  # because: it counts the tokens of the beginning
            epochs = [facts["epochs"] * self.share] if "epochs" in facts else []
            if "epochs" in facts:
                facts["training_samples"] = round(facts["training_samples"] / self.share)
                facts["steps_per_epoch"] = round(facts["steps_per_epoch"] / self.share)
                facts["epochs"] *= self.share
            for source in (source for stage in facts.get("stages", ()) for source in stage["sources"]):
                if source["dataset"] == self.data.path and "epochs" in source:
                    source["epochs"] *= self.share
                    source["epochs_in_stage"] *= self.share
                    epochs.append(source["epochs"])
            if self.data.max_epochs is not None:
                # because: wrong settings are refused before it is imported
                from lmtrain.data.training_data_by_source import excess_warnings

                excess = excess_warnings({Path(self.data.path).name: max(epochs, default=0.0)}, self.data.max_epochs)
                warnings = [*([facts["warning"]] if "warning" in facts else []), *excess]
                facts |= {"warning": " ".join(warnings)} if warnings else {}
        return text | facts

    def _with_final_path(self, value: Any) -> Any:
        """Return `value`, a fact or nested dicts and lists of facts, with the path of the temporary dataset replaced by
        data.path.
        """
        if isinstance(value, dict):
            return {key: self._with_final_path(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._with_final_path(item) for item in value]
        return value.replace(str(self.temporary_prefix), self.data.path) if isinstance(value, str) else value


@contextmanager
def preview_data_of_text(
    config: RunConfig, overrides: Sequence[str], report: Callable[[str], None], *, needed: bool = True
) -> Iterator[tuple[RunConfig, TextPreview | None]]:
    """Context manager for a dry run: yield (settings to check, preview of the dataset that a real start would make from
    data.text). The settings name a temporary dataset, made of the text's first 4 MiB at most. The preview is None, and
    the settings unchanged, if no dataset is to be made, or with `needed=False` unless parallel=auto needs it. Raise if
    the text is too large or has changed since the run's start.
    """
    data = config.data
    if not isinstance(data, DataSettings) or data.text is None or not (needed or config.parallel.auto):
        yield config, None
        return
    from data_tools.preprocess.tokenizer_and_dataset_from_text import write_sample

    request = _build_request(config, data)
    with _explain_changed_text(data):
        if _find_made(config, data, request) is not None:
            yield config, None
            return
    _check_size(request, data, overrides)
    num_bytes, num_files = request.estimated_bytes, len(request.find_sources())
    with tempfile.TemporaryDirectory(prefix="lmtrain-") as name:
        prefix, is_whole = Path(name) / TEXT_PREFIX, num_bytes <= _PREVIEW_BYTES
        sample = request if is_whole else write_sample(request, Path(name), _PREVIEW_BYTES)
        with _text_folder(prefix).make(sample, lambda *step: None, report) as made:
            share = 1.0 if is_whole else min(made.num_bytes / num_bytes, 1.0)
            changed: dict[str, Any] = {key: entry.default for key, entry in data.text_fields().items()}
            changed |= {"max_epochs": data.max_epochs if is_whole else None}  # because: a part would be read more often
            checked = replace(data, **changed | {"path": str(prefix), "index_dir": None})
            yield replace(config, data=checked), TextPreview(data, prefix, num_files, made, share)


def _is_unused(config: RunConfig, data: DataSettings) -> bool:
    """Return True if no run has begun with the dataset of data.text, if there is one: it is in the folder of this run,
    which has not begun.
    """
    return data.text_dir is None and not (Path(config.run.dir) / CONFIG).exists()


def _find_made(config: RunConfig, data: DataSettings, request: TextRequest) -> TextDataset | None:
    """Return facts about the dataset that an earlier start completed; None if there is none, or one of another text
    that no run has begun with, which is to be replaced. Raise TextChangedError if the run's text has changed.
    """
    from data_tools.preprocess.tokenizer_and_dataset_from_text import TextChangedError

    try:
        return _text_folder(Path(data.path)).find(request)
    except TextChangedError:
        if _is_unused(config, data):
            return None
        raise


def _text_folder(prefix: Path) -> TextFolder:
    from data_tools.preprocess.tokenizer_and_dataset_from_text import TextFolder

    return TextFolder(prefix, prefix.with_name(TEXT_RECORD))


def _sizes_below(folder: Path) -> dict[str, tuple[int, int]]:
    """Return {path: (size in bytes, modification time in ns)} of all files below a folder; {} if it does not exist.
    Comparing two results shows whether another process is still writing there.
    """
    sizes = {}
    for path in folder.rglob("*") if folder.is_dir() else ():
        try:
            status = path.stat()
        except OSError:
            continue  # because: the other process may have removed or renamed it
        sizes[str(path)] = (status.st_size, status.st_mtime_ns)
    return sizes


def _build_request(config: RunConfig, data: DataSettings) -> TextRequest:
    """Return the description of the dataset to make from data.text. Its tokenizer is data.tokenizer, else that of the
    checkpoint that the run begins from; with neither, one is to be trained on the text.
    """
    from data_tools.preprocess.tokenizer_and_dataset_from_text import TextRequest
    from data_tools.read.find_input_files import TextSuffixes
    from data_tools.read.parse_chunks_and_bad_lines import OptionNames
    from lmtrain.data.samples.masked_language_samples import MaskVocabulary

    request = TextRequest(
        texts=tuple(map(os.path.expanduser, data.texts)),
        suffixes=TextSuffixes(data.text_suffixes, _suffix_setting, types_all=True),
        key=data.text_key, split=data.text_split, cuts_sentences=data.cuts_sentences,
        tokenizer=Path(data.tokenizer) if data.tokenizer else _checkpoint_tokenizer(config),
        max_vocab=config.model.to_dict().get("vocab_size"), workers=num_usable_cpus(),
        names=OptionNames(
            key="data.text_key=KEY", skip=None, split="data.text_split", vocab_size="model.vocab_size"
        ),
    )  # fmt: skip
    if data.cuts_sentences and request.tokenizer is not None:
        MaskVocabulary.of(Tokenizer.load(request.tokenizer))  # raises if it cannot mask words
    return request


def _suffix_setting(suffixes: Sequence[str]) -> str:
    """Return the setting that makes files with these suffixes be read as text."""
    return f"data.text_suffixes={show(list(suffixes))}"


def _checkpoint_tokenizer(config: RunConfig) -> Path | None:
    """Return the path of the tokenizer to use with the run's first weights: in its own newest checkpoint, else in that
    of checkpoint.init_from or checkpoint.resume; if this is another program's folder, the folder. Return None if the
    run begins with random weights.
    """
    settings = config.checkpoint
    source = settings.init_from or (settings.resume if settings.resume not in ("auto", "none") else None)
    # because: the checkpoint of the first weights may be gone once the run has one of its own
    if (own := latest_checkpoint(Path(config.run.dir) / CHECKPOINTS)) is not None:
        return own / TOKENIZER
    if source is None:
        return None
    path, imported = Path(source), latest_checkpoint(Path(config.run.dir) / IMPORTED)
    if imported is not None:
        return imported / TOKENIZER
    is_foreign = path.is_dir() and not is_best(path) and not lmtrain_kind(path)
    return path if is_foreign else resolve_checkpoint(path) / TOKENIZER


@contextmanager
def _explain_changed_text(data: DataSettings) -> Iterator[None]:
    """Context manager that turns a TextChangedError (the text differs from the one the dataset was made from) into a
    DataError whose message says how to go on.
    """
    from data_tools.preprocess.tokenizer_and_dataset_from_text import TextChangedError

    try:
        yield
    except TextChangedError as error:
        place = "data.text_dir" if data.text_dir else "run.dir"
        old = way(f"data.path={data.path}", instead_of="data.text")
        raise DataError(
            f"data.text={show(data.text)} is not the text of which {data.path} was made: {error}. Give another {place} "
            f"to train on the text as it is now, or {old} instead of data.text to go on with the old one."
        ) from error


def _check_size(request: TextRequest, data: DataSettings, overrides: Sequence[str]) -> None:
    """Raise SettingsError if the text to make a dataset from is larger than data.text_limit bytes. Its message holds
    the lmtrain commands that make the dataset beforehand; `overrides` are repeated in the last of them.
    """
    num_bytes = request.estimated_bytes
    if num_bytes <= data.text_limit:
        return
    name = _name_of_texts(request.texts)
    kind = ["--kind", "wordpiece"] if data.cuts_sentences else []
    key = ["--key", data.text_key] if data.text_key != "text" else []
    key += ["--format", "txt"] if request.has_unknown_file else []
    key += [word for suffix in data.text_suffixes for word in ("--suffix", suffix)]
    split = ["--split", data.text_split] if data.text_split != "file" else []
    sentences = ["--split-sentences"] if data.cuts_sentences else []
    tokenizer, size = str(request.tokenizer or f"data/{name}_tokenizer"), str(request.vocab_size(num_bytes))
    train = ["tokenizer", "train", *request.texts, "--output", tokenizer, "--vocab-size", size, *kind, *key, *split]
    of_text = [key for key in typed_words(overrides) if key.startswith("data.text") or key == "data.tokenizer"]
    commands = [
        *([train] if request.tokenizer is None else []),
        ["preprocess", *request.texts, "--tokenizer", tokenizer, "--output", f"data/{name}", *key, *split, *sentences],
        ["pretrain", f"data.path=data/{name}", *without_settings(overrides, of_text)],
    ]
    lines = "\n".join(f"  lmtrain {shlex.join(words)}" for words in commands)
    raise SettingsError([
        f"data.text={show(data.text)} holds about {format_bytes(num_bytes)} of text, more than "
        f"data.text_limit={format_bytes(data.text_limit)}, up to which a run makes a dataset by itself. Raise the "
        f"limit, or make the dataset beforehand:\n{lines}"
    ])  # fmt: skip


def _name_of_texts(texts: Sequence[str]) -> str:
    """Return a name for the tokenizer and the dataset of these texts: that of a single file or folder, else "texts"."""
    from data_tools.read.find_input_files import is_glob, name_without_suffix

    return "texts" if len(texts) > 1 or is_glob(texts[0]) else name_without_suffix(Path(texts[0]))


@contextmanager
def _show_steps(show_progress: ShowProgress) -> Iterator[Report]:
    """Context manager: show a progress display while the dataset is made. Yield a function `(step, done, total)` to
    call with the name of the step under way and the bytes done and in all.
    """
    with show_progress("read", "bytes", "the same command goes on where this one was.") as shown:
        earlier: dict[str, int] = {}  # by step: what was done when it was first reported, perhaps by an earlier start

        def show(step: str, done: int, total: int) -> None:
            shown.set_activity(step)
            if done:
                shown(done, total, earlier.setdefault(step, done))

        yield show


def _describe(made: TextDataset, data: DataSettings, folder: TextFolder) -> Iterator[str]:
    """Yield the lines to print about a dataset made from data.text: the files and their size, the tokenizer, the
    dataset's documents and tokens, and a hint if all text is one document.
    """
    seconds = made.tokenizer_seconds
    when = "at an earlier start" if seconds is None else f"in {format_seconds(seconds)}"
    origin = (
        f"trained on this text {when}: {folder.tokenizer}"
        if made.tokenizer_source is None
        else f"read from {made.tokenizer_source}"
    )
    yield f"data.text={show(data.text)}: {plural(made.num_files, 'file')}, {format_bytes(made.num_bytes)} of text"
    yield f"tokenizer: {made.tokenizer_kind}, {made.vocab_size:,} pieces, {origin}"
    yield f"dataset: {_describe_dataset(made)}, made in {format_seconds(made.seconds)}: {data.path}"
    if made.num_documents == made.num_files == 1 and (finer := finer_split(data.texts, data.text_split)):
        yield f"the text is one document; data.text_split={finer[0]} makes a document of each of its {finer[1]}"


def _describe_dataset(made: TextDataset) -> str:
    return f"{plural(made.num_documents, 'document', format_count(made.num_documents))}, " + (
        f"{format_count(made.num_tokens)} tokens"
    )
