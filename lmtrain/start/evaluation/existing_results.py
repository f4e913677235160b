"""What is at the place of an evaluation's outputs already, found out before anything is scored. Torch-free."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.data.store.indexed_dataset import dataset_file
from lmtrain.data.store.joined_dataset import shard_prefixes
from lmtrain.errors import LmtrainError, OutputError, UsageError
from lmtrain.eval.resume_journal import NO_COMMAND, is_journal, journal_file
from lmtrain.eval.task_recipes.hash_and_count_texts import dataset_prefix
from lmtrain.runtime.files.atomic_files import check_output_folder, read_json, refuse_special_file
from lmtrain.runtime.files.existing_output import Found, Kind, begins_with, check_output, has_rows_with, made_from

_FORMATS = (b'{\n "format": "lmtrain evaluation', b'{\n "format": "lmtrain comparison')
_RESULTS = Kind("a results file of `lmtrain eval`", begins_with(*_FORMATS))
_SAMPLES = Kind("a samples file of `lmtrain eval`", has_rows_with("result", "task", "item"))
_JOURNAL = Kind("the journal of an evaluation", is_journal)
# parameters on which no result depends
_WITHOUT_EFFECT = ("output", "overwrite", "as_json", "full", "batch_size", "list_tasks", "nproc", "nproc_per_node")


@dataclass(frozen=True)
class ResultsOrigin:
    """The command and inputs of a results file, as texts that it records and that differ where these do."""

    command: str = NO_COMMAND  # its options
    made_from: str | None = None  # its options and inputs; None if it reads standard input

    @classmethod
    def of(
        cls, params: Mapping[str, Any], models: Sequence[Path], texts: Sequence[str], task_files: Sequence[Path] = ()
    ) -> ResultsOrigin:
        """Return the origin of results with these parameters of `lmtrain eval`, of these models, texts and files of
        tasks, such as recipes.
        """
        options = {name: value for name, value in params.items() if name not in _WITHOUT_EFFECT}
        files = [*_model_files(models), *_text_files(texts), *task_files]
        return cls(made_from(options, []), None if "-" in texts else made_from(options, files))


def _model_files(models: Sequence[Path]) -> Iterator[Path]:
    """Yield the manifest of each checkpoint, which changes with its weights, or all files of another folder."""
    for model in models:
        if model.is_dir():
            yield from [model / MANIFEST] if (model / MANIFEST).is_file() else sorted(model.iterdir())
        else:
            yield model


def _text_files(texts: Sequence[str]) -> Iterator[Path]:
    """Yield the files that paths, globs and prefixes of datasets name; of a dataset those of all its shards."""
    for text in texts:
        path = Path(text)
        if (prefix := dataset_prefix(path)) is not None:
            for shard in shard_prefixes(prefix) or [prefix]:
                yield from (dataset_file(shard, suffix) for suffix in (".bin", ".idx"))
        elif path.is_dir():
            yield from sorted(path.rglob("*"))
        else:  # because: a file may have the signs of a pattern in its name
            yield from [path] if path.exists() else map(Path, sorted(glob.glob(text, recursive=True)))


def check_output_files(output: Path | None, samples: Path | None) -> None:
    """Raise OutputError if the file of --output or --samples cannot be written, or UsageError if both are the same
    file; called before scoring, which can take hours. None is an output that was not named.
    """
    for option, path in (("--output", output), ("--samples", samples)):
        if path is None:
            continue
        refuse_special_file(path)
        if path.is_dir():
            raise OutputError(f"{option}={path} is a folder, but a file is written. Give the name of a file.")
        check_output_folder(path.parent, f"The folder of {option}={path}", check_lock=False)
    if output is not None and samples is not None and output.absolute() == samples.absolute():
        raise UsageError(f"--output and --samples cannot both be {output}. Give two different files.")


def check_results(output: Path | None, samples: Path | None, origin: ResultsOrigin, *, overwrite: bool) -> Found:
    """Return what is at the place of the results of a command, with their samples and their journal: OTHER if it is
    so of one of them. Raise OutputError if one of the files must not be replaced. None is an output that was not named.
    """
    recorded = {} if output is None else _read(output)
    is_complete = bool(recorded.get("complete"))
    is_begun = recorded.get("command") == origin.command and not is_complete
    is_same = is_complete and origin.made_from is not None and recorded.get("made_from") == origin.made_from
    is_same &= samples is None or _SAMPLES.fits(samples)
    found = []
    if output is not None:
        found = [check_output(output, _RESULTS, overwrite=overwrite, is_same=is_same, is_unfinished=is_begun)]
        if found != [Found.SAME]:
            journal = journal_file(output)
            goes_on = is_journal(journal, origin.command)
            check_output(journal, _JOURNAL, overwrite=overwrite, is_unfinished=goes_on)
    if samples is not None:
        goes_on = is_begun and _SAMPLES.fits(samples)
        found.append(check_output(samples, _SAMPLES, overwrite=overwrite, is_same=is_same, is_unfinished=goes_on))
    return Found.OTHER if Found.OTHER in found else next(iter(found), Found.NOTHING)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a results file, {} if it is missing, damaged or another file."""
    with suppress(LmtrainError):
        if _RESULTS.fits(path) and isinstance(content := read_json(path), dict):
            return content
    return {}
