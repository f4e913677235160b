"""The inputs of a run, and the evaluations during it: read and check eval.tasks before the run begins, then pass them
to the training loop.

Called by everything that starts a run or checks whether it could. The training code knows no tasks and the evaluation
code no runs; this module joins them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lmtrain.errors import LmtrainError, MissingInputError, SettingsError, UsageError, own, spelling_hint
from lmtrain.runfolder.tensorboard_metric_names import AVERAGE_PREFIX
from lmtrain.runtime.files.similar_path import missing_path
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.start.init_from_settings_and_import import import_first_weights, read_foreign_weights
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.preflight import EvaluationTask, Inputs, preflight

if TYPE_CHECKING:
    from lmtrain.eval.evaluate_during_training import PlannedEvaluation
    from lmtrain.eval.read_texts import TextInput
    from lmtrain.eval.task import Task
    from lmtrain.observe.screen.command_progress import ShowProgress
    from lmtrain.train.in_loop.validate_and_evaluate import Evaluation


def prepare_inputs(
    config: RunConfig, env: ProcessEnv, show_progress: ShowProgress, *, starts_run: bool = True
) -> tuple[Inputs, list[list[PlannedEvaluation]]]:
    """Check that a run can start on this machine with its data and checkpoints, and read the data of `eval.tasks`.
    Return the run's inputs (data, tokenizer, start checkpoint), and for each stage still to be trained its list of
    evaluations.

    If checkpoint.init_from names a folder of Hugging Face or Megatron-LM, import it last of all, unless nothing is to
    be trained (`starts_run=False`); `show_progress` shows how far it is.
    """
    checked = preflight(config, env, starts_run=starts_run, read_foreign=read_foreign_weights)
    prepared = [prepare_eval_tasks(stage, inputs) for stage, inputs in checked.stages(config)]
    first, *later = [inputs for inputs, _ in prepared]
    inputs = replace(first, later_stages=tuple(later))
    evaluations = [planned for _, planned in prepared]
    return import_first_weights(config, inputs, show_progress) if starts_run else inputs, evaluations


def prepare_eval_tasks(config: RunConfig, inputs: Inputs) -> tuple[Inputs, list[PlannedEvaluation]]:
    """Read the data of each entry of `eval.tasks` and tokenize it into the sequences that the model will score during
    training. Without entries, return `inputs` unchanged and an empty list.

    Return the run's inputs, extended by the facts and warnings about these data, and the prepared evaluations.
    """
    if not config.eval.tasks:
        return inputs, []
    tasks = _find_tasks(config)  # because: a wrong name is refused before the next imports, which take torch with them
    from data_tools.corpora.corpus_definition import published_hashes
    from lmtrain.eval.evaluate_during_training import PlannedEvaluation
    from lmtrain.eval.run_task import prepare
    from lmtrain.eval.task import NOT_PUBLISHED, TaskOptions

    evaluations = []
    for number, (entry, task) in enumerate(zip(config.eval.tasks, tasks, strict=True)):
        window = task.seq_len or config.seq_len
        request = TaskOptions(
            tokenizer=inputs.tokenizer, seq_len=window, shortened=window < config.seq_len,
            hashes=published_hashes() if task.published else {},
        )  # fmt: skip
        try:
            prepared, data = prepare(task, _open_task_data(task, entry.data), request)
        except LmtrainError as error:
            error.add_note(f"The data was read for eval.tasks[{number}], {entry.task}.")
            raise
        evaluations.append(PlannedEvaluation(name=entry.measure_name, task=task, data=data, prepared=prepared))
    _check_best_by(config, evaluations)
    evaluated = tuple(
        EvaluationTask(each.name, each.data, each.prepared.num_targets, each.prepared.facts.text_sha256)
        for each in evaluations
    )
    warnings = tuple(
        f"{each.data} is not {each.task.published} as it was published, so its figures cannot be compared with the "
        f"published ones of {each.task.id}."
        for each in evaluations
        if NOT_PUBLISHED in each.prepared.facts.notes
    )
    return replace(inputs, evaluations=evaluated, warnings=(*inputs.warnings, *warnings)), evaluations


def build_evaluation(config: RunConfig, inputs: Inputs, evaluations: list[PlannedEvaluation]) -> Evaluation | None:
    """Return the evaluator that the training loop calls to score the model on these evaluations; None if the list is
    empty.
    """
    if not evaluations:
        return None
    from lmtrain.eval.evaluate_during_training import TrainingEvaluator

    return TrainingEvaluator(
        planned=evaluations, tokenizer=inputs.tokenizer, dtype=config.precision.kind, batch_size=config.eval.batch_size
    )


def _find_tasks(config: RunConfig) -> list[Task]:
    """Return the evaluation task that each entry of `eval.tasks` names, in their order.

    Raise one error for all unknown or unfit tasks, else one for all data files that do not exist.
    """
    from lmtrain.eval.task import check_kind, find_task

    tasks, wrong, terms = [], [], config.model.terms
    for number, entry in enumerate(config.eval.tasks):
        key = f"eval.tasks[{number}].task="
        try:
            task = find_task(entry.task)
            check_kind(task, causal="lm" in terms, pairs="pair" in terms)
        except UsageError as error:
            wrong.append(error.marked.replace("--task=", key))
            continue
        if task.seq_len is not None and task.seq_len > config.seq_len:
            names = [task.id] * (task.id != entry.task) + [f"{task.id}-s{config.seq_len}"]
            wrong.append(
                f"{key}{entry.task} needs a window of {task.seq_len} tokens, more than model.seq_len={config.seq_len}. "
                f"Use {' or '.join(map(own, names))}."
            )
        tasks.append(task)
    if wrong:
        raise SettingsError(wrong)
    missing = [
        missing_path(entry.data, f"Give {task.data}.", partial(_is_data, task), option=f"eval.tasks[{number}].data=")
        for number, (entry, task) in enumerate(zip(config.eval.tasks, tasks, strict=True))
        if not _is_data(task, Path(entry.data))
    ]
    if missing:
        raise MissingInputError("\n".join(missing))
    return tasks


def _is_data(task: Task, path: Path) -> bool:
    """Return True if the path is a file, or is something else that the task accepts: a dataset prefix (of
    PREFIX.bin and PREFIX.idx) or a folder of text files.
    """
    from lmtrain.eval.task import TextTask
    from lmtrain.eval.task_recipes.hash_and_count_texts import dataset_prefix

    is_text = isinstance(task, TextTask)
    is_dataset = (is_text or task.pairs) and dataset_prefix(path) is not None
    return path.is_file() or is_dataset or (is_text and path.is_dir())


def _open_task_data(task: Task, data: str) -> Path | TextInput:
    """Return the input of a task: the path `data` itself if it is a dataset prefix or if the task reads its own file
    format, else all documents of the text file or folder `data`, read into memory.
    """
    from data_tools.read.find_input_files import find_sources
    from lmtrain.eval.task import TextTask
    from lmtrain.eval.task_recipes.hash_and_count_texts import dataset_prefix
    from lmtrain.start.evaluation.tasks_and_texts import read_texts

    if dataset_prefix(Path(data)) is not None or not isinstance(task, TextTask):
        return Path(data)
    return read_texts(find_sources([Path(data)]), "text", lambda done: None)


def _check_best_by(config: RunConfig, evaluations: list[PlannedEvaluation]) -> None:
    """Raise a SettingsError if `checkpoint.best_by` names an evaluation measure (eval/NAME/MEASURE) that none of
    `evaluations` computes; do nothing if best checkpoints are not kept.
    """
    name = config.checkpoint.best_by
    prefixes = ["", AVERAGE_PREFIX] if config.checkpoint.ema.is_on else [""]
    known = [
        f"eval/{evaluation.name}/{prefix}{measure}"
        for evaluation in evaluations for prefix in prefixes for measure in evaluation.measures
    ]  # fmt: skip
    if config.checkpoint.keep_best and name.startswith("eval/") and name not in known:
        raise SettingsError(
            [f"checkpoint.best_by={name} is not a measure of this run's evaluations. {spelling_hint(name, known, own)}"]
        )
