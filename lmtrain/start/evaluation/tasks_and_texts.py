"""What an evaluation scores: its tasks, each with a function that reads its data, as `lmtrain preprocess` reads texts.

Called by evaluations of a checkpoint and by those during training. Torch-free.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from data_tools.read.find_input_files import Source, find_sources, resolve_text_inputs
from lmtrain.errors import MissingInputError, UsageError, fill_in, leave_out, way
from lmtrain.runtime.files.similar_path import missing_path, paths_in_one_word
from lmtrain.units import plural

if TYPE_CHECKING:
    from lmtrain.checkpoint.unopened_model_on_disk import ModelSource
    from lmtrain.eval.read_texts import TextInput
    from lmtrain.start.evaluation.run_tasks import Job


def build_jobs(
    task_ids: list[str] | None, data_options: list[str] | None, baseline: Path | None, format_: str | None, key: str,
    suffixes: list[str] | None = None, *, report: Callable[[str], None],
) -> list[Job]:  # fmt: skip
    """Return a pair (task, function that reads its data) for each --task ID (`task_ids`) and the --data PATH at the
    same position (`data_options`). `report` receives a message on files that are left out. Raise UsageError or
    MissingInputError if they do not fit or do not exist.
    """
    from lmtrain.eval.task import TextTask, all_tasks, find_task
    from lmtrain.eval.task_recipes.hash_and_count_texts import dataset_prefix

    task_ids, data_options = task_ids or [], data_options or []
    tasks = [find_task(name) for name in task_ids]
    if not task_ids:
        measured = way(*["--task", "perplexity"] * max(1, len(data_options)))
        raise UsageError(
            f"No --task was given. Use {measured} for the loss on any text; `lmtrain eval --list` shows the others."
        )
    if len(task_ids) != len(data_options):
        way_out = "Give as many of one as of the other"
        if missing := ["--data", "PATH"] * (len(task_ids) - len(data_options)):
            way_out = f"Add {fill_in(*missing)}"
        raise UsageError(
            f"Each --task needs its own --data, but {plural(len(task_ids), 'task')} and "
            f"{plural(len(data_options), '--data option')} were given. {way_out}; `lmtrain eval --list` shows which "
            "data each task reads."
        )
    if baseline is not None and not any(task.compares for task in tasks):
        usable_tasks = ", ".join(name for name, task in all_tasks().items() if task.compares)
        raise UsageError(
            f"--baseline={baseline} needs a task that scores whole documents. {leave_out()}, or choose one of these "
            f"tasks: {usable_tasks}."
        )

    def is_data(path: Path) -> bool:
        return path.exists() or dataset_prefix(path) is not None

    jobs: list[Job] = []
    reads_text = False
    for task, source in zip(tasks, data_options, strict=True):
        prefix = dataset_prefix(Path(source))
        if prefix is not None or not isinstance(task, TextTask):
            if prefix is None and not Path(source).exists():
                hint = "Give a file or a .bin/.idx prefix."
                raise MissingInputError(missing_path(source, hint, is_data, option="--data="))
            jobs.append((task, partial(lambda path, report: path, Path(source))))
        elif source != "-" and not Path(source).exists() and not any(mark in source for mark in "*?["):
            if paths_in_one_word(source):
                raise UsageError(
                    f"--data={source} is several paths in one word, and a task reads one: a file, a folder or a glob. "
                    "Repeat --task and --data for each."
                )
            hint = "Give a file, a folder or a .bin/.idx prefix."
            raise MissingInputError(missing_path(source, hint, is_data, option="--data="))
        else:
            found = find_sources(resolve_text_inputs([source], format_, suffixes, report))
            jobs.append((task, partial(read_texts, found, key)))
            reads_text = True
    suffix = suffixes[0] if suffixes else None
    for option, value in (("--format", format_), ("--suffix", suffix), ("--key", key if key != "text" else None)):
        if value is not None and not reads_text:
            raise UsageError(
                f"{option}={value} is about text files, and none of the given tasks reads text files. {leave_out()}."
            )
    return jobs


def refuse_loose_files(layout: Sequence[str]) -> None:
    """Raise UsageError if one of the words after the checkpoint, which are settings, is a file or folder."""
    files = [word for word in layout if "=" not in word and Path(word).exists()]
    if files:
        data = way(*(part for file in files for part in ("--data", file)), instead_of=files)
        raise UsageError(f"{', '.join(files)} stands where settings do. Did you mean {data}?")


def refuse_standard_input(texts: Sequence[str], num_processes: int) -> None:
    """Raise UsageError if one of the texts is standard input and an evaluation has several processes."""
    if num_processes > 1 and "-" in texts:
        raise UsageError(
            f"--data=- is standard input, which only one process can read, and the evaluation has {num_processes} "
            "processes. Give a file with the text."
        )


def check_tasks_fit(
    jobs: list[Job], sources: list[ModelSource], seq_len: int | None, stride: int | None = None
) -> None:
    """Raise UsageError if any task cannot score any of the models, because of the model's kind or because its context
    is shorter than the window of `seq_len` tokens (None: the task's own). `stride` is the distance of windows typed.
    """
    from lmtrain.eval.task import check_kind, choose_window

    for task, _ in jobs:
        for source in sources:
            check_kind(task, causal=source.settings.shape.causal, pairs="pair" in source.settings.terms)
            choose_window(task, source.settings.shape.seq_len, seq_len, stride)


def read_texts(sources: list[Source], key: str, report: Callable[[int], None]) -> TextInput:
    """Read all documents of the input files `sources` into memory and return them with a SHA-256, which is that of the
    file if there is only one, else of all documents.

    `key` is the key or column of the text; `report` receives the number of bytes read.
    """
    from data_tools.read.parse_chunks_and_bad_lines import ALL_READ, SourceTexts
    from lmtrain.eval.read_texts import TextInput

    texts = SourceTexts(sources, key, report=lambda done: None if done == ALL_READ else report(done))
    texts_with_paths = list(texts.iterate_with_paths())
    documents = [text for _, text in texts_with_paths]
    files = {str(path): count for path, count in Counter(path for path, _ in texts_with_paths).items()}
    if len(sources) == 1 and sources[0].num_bytes:
        with open(sources[0].path, "rb") as file:
            return TextInput(
                str(sources[0].path), documents, hashlib.file_digest(file, "sha256").hexdigest(), "the file", files
            )
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.encode() + b"\0")
    name = str(sources[0].path) if len(sources) == 1 else f"{len(sources)} files, the first {sources[0].path}"
    return TextInput(name, documents, digest.hexdigest(), "the documents, each with a zero byte behind it", files)
