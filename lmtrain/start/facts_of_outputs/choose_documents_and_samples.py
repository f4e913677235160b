"""What `lmtrain data show` reads: which documents of a dataset, or which training samples of a run, are meant.

Called by the command and by the check of a corrected line. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.config.settings_file import expand_settings_file
from lmtrain.errors import DataError, UsageError, example, fill_in, join_few, joined, leave_out, own, spelling_hint, way
from lmtrain.start.init_from_settings_and_import import compose_settings

if TYPE_CHECKING:
    from lmtrain.data.store.indexed_dataset import IndexedDataset
    from lmtrain.data.training_data_by_source import TrainingData
    from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer


def check_shown(*, prefix: str | None, overrides: list[str] | None, **options: Any) -> tuple[list[str], list[str]]:
    """Return (the arguments that are no settings, the settings) of `lmtrain data show`. Raise a UsageError that names
    every word which has no effect beside the others.
    """
    words = expand_settings_file([*([prefix] if prefix else []), *(overrides or [])]) or []
    given, settings = [word for word in words if "=" not in word], [word for word in words if "=" in word]
    chosen = [name for name in ("sample", "document", "random") if options[name]]
    needs = {"--seed": "random", "--run": "sample", "--config-dir": "sample", "--stage": "sample"}
    typed = [name for name in needs if options[name.removeprefix("--").replace("-", "_")] is not None]
    without = [(name, [name]) for name in typed if needs[name] != (chosen or ["random"])[0]]
    without += [(settings[0], settings)] if settings and chosen != ["sample"] else []
    problems = [f"--{' and --'.join(chosen)} were given together. Give only one of them."] * (len(chosen) > 1)
    problems += [
        f"{name} has an effect only with --{(needed := needs.get(name, 'sample'))} NUMBER, which was not given. Give "
        f"--{needed} NUMBER, or {leave_out(*names, shown=f'leave {name} out')}."
        for name, names in without
    ]  # fmt: skip
    if len(given) > 1:
        numbers = [word for word in given[1:] if word.isdecimal()]
        new = way(*(part for word in numbers for part in ("--document", word)), instead_of=given[1:])
        is_clear = numbers and not options["sample"] and not options["random"]
        way_out = f"To show a document, give its number: {new}." if is_clear else "Give one of them."
        problems.append(f"`lmtrain data show` shows one dataset, but {' and '.join(given)} were given. {way_out}")
    if options["run"] is None and not given:
        problems.append("PREFIX is missing. Give a dataset such as data/books, or --run RUN --sample NUMBER.")
    if problems:
        raise joined([UsageError(problem) for problem in problems])
    return given, settings


def parse_number_range(option: str, text: str) -> range:
    """Return the numbers that a value of --document or --sample names: "7" or, with both ends, "0-19"."""
    match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text)
    if match is not None and int(match[1]) <= int(match[2] or match[1]):
        return range(int(match[1]), int(match[2] or match[1]) + 1)
    slice_ = re.fullmatch(r"(\d{0,18})(?::|\.\.)(\d{1,18})", text)
    if slice_ is not None and int(slice_[1] or 0) < int(slice_[2]):
        meant = f"{int(slice_[1] or 0)}-{int(slice_[2]) - 1}"
        raise UsageError(
            f"{option}={text} is not a number or a range of numbers. Did you mean "
            f"{_other_range(option, text, meant)}?"
        )
    raise UsageError(
        f"{option}={text} is not a number or a range of numbers. Give one such as {example('7')} or "
        f"{example('0-19')}."
    )


def choose_documents(
    prefix: Path, documents: Sequence[range] | None, num_random: int, seed: int, *, reads_text: bool,
    tokenizer_path: Path | None,
) -> tuple[IndexedDataset, list[int], Tokenizer | None]:  # fmt: skip
    """Open the dataset `prefix`. Return it with the numbers of the documents in the ranges `documents`, or of
    `num_random` random ones if that is None, and the tokenizer of their text, None without `reads_text`. Raise
    UsageError if `tokenizer_path`, the value of --tokenizer, has no effect, or if a range ends beyond the dataset.
    """
    import numpy as np

    from lmtrain.data.sample_dataset_interface import permute
    from lmtrain.data.store.document_boundaries import use_recorded_checksums
    from lmtrain.data.store.joined_dataset import open_dataset

    if not reads_text and tokenizer_path is not None:
        raise UsageError(
            f"--tokenizer={tokenizer_path} has no effect with --ids, which shows the numbers that the dataset holds. "
            f"{leave_out('--tokenizer', shown='Leave --tokenizer out')}, or {leave_out('--ids', shown='--ids')}."
        )
    dataset = open_dataset(prefix)
    use_recorded_checksums(dataset)
    if documents is None:
        count = min(num_random, dataset.num_documents)
        numbers = permute(np.arange(count), dataset.num_documents, seed).tolist() if count else []
    else:
        numbers = [*chain.from_iterable(_within(each, dataset) for each in documents)]
    return dataset, numbers, _tokenizer_of(dataset, tokenizer_path) if reads_text else None


def _other_range(option: str, typed: str, meant: str) -> str:
    """Return `meant`, marked as what to give in place of one value of an option that is repeatable."""
    return way(option, meant, instead_of=(f"{option}={typed}", f"{option} {typed}"), shown=meant)


def _within(documents: range, dataset: IndexedDataset) -> range:
    """Return a range of document numbers. Raise UsageError if it is of several, and ends beyond the last document."""
    if len(documents) > 1 and documents[-1] >= dataset.num_documents > documents[0]:
        typed, fitting = f"{documents[0]}-{documents[-1]}", f"{documents[0]}-{dataset.num_documents - 1}"
        meant = _other_range("--document", typed, fitting)
        raise UsageError(
            f"--document={typed} ends beyond the last document of {dataset.prefix}. Use {meant}."
        )
    return documents if documents[0] < dataset.num_documents else documents[:1]  # the first is refused by its number


def _tokenizer_of(dataset: IndexedDataset, given: Path | None) -> Tokenizer:
    from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

    path = given or dataset.tokenizer_path
    if given is None and not path.exists():
        raise UsageError(
            f"The dataset {dataset.prefix} was stored without a tokenizer. Give --tokenizer PATH, or {way('--ids')} "
            "to show token ids."
        )
    tokenizer = Tokenizer.load(path)
    if dataset.info is not None and dataset.info.tokenizer_fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"The tokenizer {path} has the fingerprint {tokenizer.fingerprint[:12]}, but the dataset {dataset.prefix} "
            f"was written with a tokenizer of fingerprint {dataset.info.tokenizer_fingerprint[:12]}. Give that "
            f"tokenizer, or use {way('--ids')} to show token ids."
        )
    return tokenizer


def open_samples(
    prefixes: Sequence[str], settings: Sequence[str], run: Path | None, config_dir: Path | None, stage: str | None
) -> tuple[TrainingData, Tokenizer]:
    """Return the training data of a run, or of a dataset with these settings, and its tokenizer; if the run has stages,
    those of the stage that is named.
    """
    from lmtrain.checkpoint.find_and_prune import latest_checkpoint
    from lmtrain.config.build_typed_settings import build_settings
    from lmtrain.runfolder.file_names import CHECKPOINTS
    from lmtrain.runfolder.folder_reader import read_settings
    from lmtrain.train.run_config import RunConfig, with_resolved_paths
    from lmtrain.train.startup_checks.preflight import load_data, load_stages
    from lmtrain.train.startup_checks.resume_checks import open_resume_checkpoint, split_rule_of

    if run is not None and (prefixes or settings):
        words = [*prefixes, *settings]
        way_out = f"{leave_out(*words, shown='Give --run alone')}, or a dataset with settings and no --run."
        raise UsageError(f"--run={run} already names the data and the settings, so {words[0]} cannot be given too. "
                         f"{way_out}")  # fmt: skip
    paths = [f"data.path={path}" for path in prefixes]
    config = compose_settings([*paths, *settings], config_dir=config_dir) if run is None else build_settings(
        RunConfig, with_resolved_paths(read_settings(run), run)
    )  # fmt: skip
    # because: what data.split keeps from training is as the run began with it
    newest = None if run is None else latest_checkpoint(run / CHECKPOINTS)
    split_rule = split_rule_of(open_resume_checkpoint(config, newest))
    names = [each.stage_name for each in config.stage_configs]
    if config.stages or stage is not None:
        inputs = load_stages(config, None, None)[_stage_index(stage, names if config.stages else [])]
        return inputs.data, inputs.tokenizer
    tokenizer, _, data = load_data(config, with_validation=run is not None, split_rule=split_rule)
    return data, tokenizer


def _stage_index(stage: str | None, names: Sequence[str]) -> int:
    """Return the index of the stage `stage` in `names`, the names of a run's stages. Raise UsageError if it is not
    among them, or if it is None, because samples are numbered separately in each stage.
    """
    if stage in names:
        return names.index(stage)
    if not names:
        raise UsageError(f"--stage={stage} names a stage, but the run has none. {leave_out()}.")
    if stage is None:
        place = fill_in("--stage", "NAME")
        raise UsageError(f"The run has stages, each with samples of its own. Add {place}: {join_few(names)}.")
    raise UsageError(f"--stage={stage} is not a stage of the run. {spelling_hint(stage, names, own)}")
