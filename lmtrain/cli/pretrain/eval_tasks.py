"""What a run measures while it trains: eval.tasks read and judged before it begins, then handed to the loop.

Called by pretrain. Training knows no task and evaluation no run; they are joined here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmtrain.errors import LmtrainError, MissingInputError, SettingsError, UsageError, spelling_hint

if TYPE_CHECKING:
    from lmtrain.eval.in_training import Planned
    from lmtrain.eval.task import Task
    from lmtrain.eval.texts import TextInput
    from lmtrain.train.before.preflight import Inputs
    from lmtrain.train.config import RunConfig
    from lmtrain.train.in_loop.measure import Evaluation


def plan(config: RunConfig, inputs: Inputs) -> tuple[Inputs, list[Planned]]:
    """Return the entries of eval.tasks, cut as this model will see them, and the run's inputs with their facts."""
    if not config.eval.tasks:
        return inputs, []
    from data_tools.corpora.recipe import published_hashes
    from lmtrain.eval.in_training import Planned
    from lmtrain.eval.runner import prepare
    from lmtrain.eval.task import NOT_PUBLISHED, Asked
    from lmtrain.train.before.preflight import Evaluated

    planned = []
    for number, (entry, task) in enumerate(zip(config.eval.tasks, _tasks(config), strict=True)):
        window = task.seq_len or config.seq_len
        hashes = published_hashes() if task.published else {}
        asked = Asked(
            tokenizer=inputs.tokenizer, seq_len=window, shortened=window < config.seq_len, hashes=hashes
        )
        try:
            prepared, data = prepare(task, _source(task, entry.data), asked)
        except LmtrainError as error:
            error.add_note(f"It was read for eval.tasks[{number}], {entry.task}.")
            raise
        planned.append(Planned(name=entry.called, task=task, data=data, prepared=prepared))
    _check_best_by(config, planned)
    told = tuple(
        Evaluated(one.name, one.data, one.prepared.num_targets, one.prepared.facts.text_sha256) for one in planned
    )
    others = tuple(
        f"{one.data} is not {one.task.published} as it was published, whose figures {one.task.id} stands for."
        for one in planned
        if NOT_PUBLISHED in one.prepared.facts.notes
    )
    return replace(inputs, evaluations=told, warnings=(*inputs.warnings, *others)), planned


def evaluation(config: RunConfig, inputs: Inputs, planned: list[Planned]) -> Evaluation | None:
    if not planned:
        return None
    from lmtrain.eval.in_training import DuringTraining

    return DuringTraining(
        planned=planned, tokenizer=inputs.tokenizer, dtype=config.precision.kind, batch_size=config.eval.batch_size
    )


def _tasks(config: RunConfig) -> list[Task]:
    """Refuses all tasks that are not known at once, and then all files that are not there."""
    from lmtrain.eval.source import check_kind
    from lmtrain.eval.task import find_task

    found, wrong, terms = [], [], config.model.terms
    for number, one in enumerate(config.eval.tasks):
        key = f"eval.tasks[{number}].task="
        try:
            task = find_task(one.task)
            check_kind(task, causal="lm" in terms, pairs="pair" in terms)
        except UsageError as error:
            wrong.append(str(error).replace("--task=", key))
            continue
        if task.seq_len is not None and task.seq_len > config.seq_len:
            few = f"is a window of more tokens than model.seq_len={config.seq_len}"
            wrong.append(f"{key}{one.task} {few}. Use {task.id}, or a -s{config.seq_len} behind it.")
        found.append(task)
    if wrong:
        raise SettingsError(wrong)
    missing = [
        f"eval.tasks[{number}].data={one.data} does not exist. Give {task.data}."
        for number, (one, task) in enumerate(zip(config.eval.tasks, found, strict=True))
        if not _is_there(task, one.data)
    ]
    if missing:
        raise MissingInputError("\n".join(missing))
    return found


def _is_there(task: Task, data: str) -> bool:
    from lmtrain.eval.recipes.documents import dataset_prefix
    from lmtrain.eval.task import TextTask

    path, is_text = Path(data), isinstance(task, TextTask)
    is_dataset = (is_text or task.pairs) and dataset_prefix(path) is not None
    return path.is_file() or is_dataset or (is_text and path.is_dir())


def _source(task: Task, data: str) -> Path | TextInput:
    from data_tools.read.sources import find_sources
    from lmtrain.cli.eval.evaluate import read_texts
    from lmtrain.eval.recipes.documents import dataset_prefix
    from lmtrain.eval.task import TextTask

    if dataset_prefix(Path(data)) is not None or not isinstance(task, TextTask):
        return Path(data)
    return read_texts(find_sources([Path(data)]), "text", lambda done: None)


def _check_best_by(config: RunConfig, planned: list[Planned]) -> None:
    """Raise if checkpoint.best_by names no measure of a task; measures are known once the task's file is read."""
    name = config.checkpoint.best_by
    known = [f"eval/{one.name}/{measure}" for one in planned for measure in one.measures]
    if config.checkpoint.keep_best and name.startswith("eval/") and name not in known:
        raise SettingsError(
            [f"checkpoint.best_by={name} is nothing that this run measures. {spelling_hint(name, known)}"]
        )
