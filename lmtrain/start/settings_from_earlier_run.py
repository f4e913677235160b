"""`--from-run`: the recorded settings of a run in place of conf/pretrain.yaml, to continue the run or to branch off.

Used by pretrain and its sweeps; torch-free. A run's config.json is composed as a root config with a file for each
group, so that overrides and group choices (`optim=lamb`) have their usual meaning.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.checkpoint.find_and_prune import (
    checkpoints_beside,
    is_run_or_checkpoint,
    latest_checkpoint,
    load_manifest,
    resolve_checkpoint,
)
from lmtrain.checkpoint.read_merge_record import merge_record
from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.compose_run_settings import Composed, Rewrite, Sources, compose, group_choices
from lmtrain.config.parse_and_apply_overrides import hydra_quoted
from lmtrain.config.setting_references import iter_values
from lmtrain.config.settings_base import facts_of, show
from lmtrain.config.strict_yaml import MAX_BYTES, MAX_VALUES
from lmtrain.config.typed_words import is_typed, typed_words
from lmtrain.data.store.indexed_dataset import dataset_file
from lmtrain.errors import (
    DataError,
    LmtrainError,
    MissingInputError,
    SettingsError,
    UsageError,
    fill_in,
    leave_out,
    way,
)
from lmtrain.exchange.detect_model_folder_format import identify_source, lmtrain_kind
from lmtrain.runfolder.file_names import CHECKPOINTS, CONFIG, METRICS
from lmtrain.runfolder.lineage import RESUMED, read_lineage
from lmtrain.runfolder.metrics_rows import read_metrics
from lmtrain.runfolder.settings_differences import compare_settings, first_start, flatten
from lmtrain.runtime.files.atomic_files import parse_json, read_bytes
from lmtrain.runtime.files.similar_path import missing_path
from lmtrain.start.init_from_settings_and_import import compose_settings
from lmtrain.start.training_stages_of_branch import BranchPoint, put_before_stages
from lmtrain.train.rules_between_settings import text_dataset_prefix
from lmtrain.train.run_config import RunConfig, with_resolved_paths
from lmtrain.units import parse_count

if TYPE_CHECKING:
    from lmtrain.config.strict_yaml import YamlFile

_CHOICE_NAME, _ROOT_NAME = "as_in_that_run", "from_run"  # of the run's settings as config files


@dataclass(frozen=True)
class SourceRun:
    """A run whose settings are used, given by its folder, by one of its checkpoints, or by a merged checkpoint whose
    newest parent is one of its checkpoints.
    """

    path: Path  # as the user gave it
    run: Path
    settings: dict[str, Any]

    @classmethod
    def find(cls, path: Path, branch: Path | None = None) -> SourceRun:
        """Find the run that `path` names, which is its folder, one of its checkpoints, or a checkpoint merged from its;
        read the settings from its config.json. Raise MissingInputError if there is no such run, DataError if the file
        is damaged. A deleted checkpoint is accepted if the run in the folder `branch` began from it and has saved its
        own.
        """
        is_left_behind = branch is not None and not path.is_dir() and _began_from(branch, path)
        if not path.is_dir() and not is_left_behind:
            hint = checkpoints_beside(path) or "Give the folder of a run, or a checkpoint in it."
            raise MissingInputError(missing_path(path, hint, is_run_or_checkpoint, option="--from-run="))
        run = next((folder for folder in (path, path.parent, path.parent.parent) if (folder / CONFIG).is_file()), None)
        run = run or _run_of_merge(path)
        if run is None and is_left_behind:
            raise MissingInputError(
                f"--from-run={path} is a checkpoint of a run that is not there any more. The run in {branch} began "
                f"from it and goes on with: lmtrain pretrain --from-run {branch}"
            )
        if run is None or (run != path and not (path / MANIFEST).is_file() and not is_left_behind):
            raise MissingInputError(
                f"--from-run={path} is neither a run folder, which has a {CONFIG}, nor a checkpoint in a run folder. "
                "Give the run.dir of a run, or a checkpoint in it."
            )
        settings = parse_json(read_bytes(run / CONFIG, MAX_BYTES), run / CONFIG)
        return cls(path, run, _checked_settings(settings, run / CONFIG, run))

    @property
    def is_merge(self) -> bool:
        """True if the path is a merged checkpoint, which lies outside of the folder of its newest parent's run."""
        return not self.path.resolve().is_relative_to(self.run.resolve())

    def base_settings(self, overrides: Sequence[str], *, is_branch: bool) -> dict[str, Any]:
        """Return this run's settings as nested dicts, in which the checkpoint to start from and the data path are set
        for the new start. `is_branch` is True if the new start gets a run folder of its own.

        A branch starts from the checkpoint that the user gave, or the run's newest; with another data.text, only its
        weights are used. A run that is continued resumes from its own newest checkpoint unless the user gave one.
        `checkpoint.init_from` among the overrides wins.
        """
        saved = self.settings.get("checkpoint")
        checkpoint = dict(saved) if isinstance(saved, dict) else {}
        begins_elsewhere = is_typed(overrides, "checkpoint.init_from")
        if is_branch or self.path != self.run:  # because: it says which weights of the earlier init_from were read
            checkpoint["init_weights"] = "model"
        if is_branch and is_typed(overrides, "data.text") and not is_typed(overrides, "checkpoint.resume"):
            checkpoint |= {"resume": "auto", "init_from": None if begins_elsewhere else str(self.path)}
        elif (is_branch and not begins_elsewhere) or (not is_branch and self.path != self.run):
            checkpoint |= {"resume": str(self.path), "init_from": None}
        # because: a run started with `none` had no checkpoint then, and has some now
        elif is_branch or checkpoint.get("resume") == "none":
            checkpoint |= {"resume": "auto"}
        data = self._data_settings(self.settings, drops_text=is_branch or is_typed(overrides, "data.path"))
        return self.settings | {"run": {"dir": str(self.run)}, "checkpoint": checkpoint, "data": data}

    def branch_checkpoint(self, settings: Mapping[str, Any]) -> tuple[int, Path] | None:
        """Return (step, path) of the checkpoint from which a branch with these `settings` (nested dicts) starts, or has
        started already. Return None if it resumes from no checkpoint of this run, as when it takes only the weights.
        """
        run_dir, checkpoint = (settings.get(group) for group in ("run", "checkpoint"))
        chosen = checkpoint.get("resume") if isinstance(checkpoint, dict) else None
        places = self.run.resolve(), self.path.resolve()  # because: a merged checkpoint lies outside of the run
        if not isinstance(chosen, str) or not any(map(Path(chosen).resolve().is_relative_to, places)):
            return None
        folder = Path(str(run_dir.get("dir"))) if isinstance(run_dir, dict) else Path()
        for parent in read_lineage(folder)[-1:]:
            # because: this run may have saved newer checkpoints since the branch began
            if parent.kind == RESUMED and parent.folder in places:
                return parent.step, latest_checkpoint(folder / CHECKPOINTS) or Path(parent.checkpoint)
        try:
            checkpoint = resolve_checkpoint(Path(chosen))
            return load_manifest(checkpoint).step, checkpoint
        except LmtrainError:  # because: the check of the checkpoint says better what is missing
            return None

    def first_settings(self) -> dict[str, Any]:
        """Return the settings, as nested dicts, of the start from which this run's first step is. A checkpoint or model
        that it began from is among them.
        """
        metrics = read_metrics(self.run / METRICS) if (self.run / METRICS).is_file() else []
        first = first_start(row for row in metrics if row["event"] == "start")
        return self.settings if first is None else _checked_settings(first, self.run / METRICS, self.run)

    def settings_to_begin_again(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the settings, as nested dicts, to which the overrides are applied for a run that begins as this one
        did. Text of which this run has not made its dataset is given again.
        """
        settings = self.first_settings()
        checkpoint = settings.get("checkpoint")
        if isinstance(checkpoint, dict) and checkpoint.get("resume") == "none":
            # because: the same command, typed again, has to go on from what the new run has saved
            settings = settings | {"checkpoint": checkpoint | {"resume": "auto"}}
        data = self._data_settings(settings, drops_text=True)
        of_text = isinstance(data, dict) and data != settings["data"] and not is_typed(overrides, "data.path")
        if of_text and not dataset_file(Path(data["path"]), ".idx").is_file():
            data = settings["data"] | {"path": None}
        return settings | {"run": {"dir": str(self.run)}, "data": data}

    def _data_settings(self, settings: Mapping[str, Any], *, drops_text: bool) -> Any:
        """Return the `data` of this run's `settings` for a new start. If the run has made its dataset from data.text,
        set data.path to that dataset; with `drops_text`, also drop data.text so that no new dataset is made.
        """
        data = settings.get("data")
        if not isinstance(data, dict) or not data.get("text"):
            return data
        prefix = text_dataset_prefix(str(self.run), data.get("text_dir"))
        if not drops_text:
            return data | {"path": prefix}
        return {key: value for key, value in data.items() if not key.startswith("text")} | {"path": prefix}


def recorded_config(checkpoint: Path) -> RunConfig | None:
    """Return the settings with which the checkpoint was saved; None if it is not there, or records none that this
    version of lmtrain accepts.
    """
    with suppress(LmtrainError):
        return build_settings(RunConfig, load_manifest(checkpoint).state.get("settings"))
    return None


def _began_from(branch: Path, checkpoint: Path) -> bool:
    """Return True if the run in the folder `branch` was started from the checkpoint `checkpoint` and has since saved a
    checkpoint of its own.
    """
    parents = read_lineage(branch)
    return (
        bool(parents) and parents[-1].checkpoint == str(checkpoint.resolve())
        and latest_checkpoint(branch / CHECKPOINTS) is not None
    )  # fmt: skip


def _run_of_merge(path: Path) -> Path | None:
    """Return the folder of the run that a branch of the merged checkpoint at `path` takes its settings from: the run
    that saved the newest of the checkpoints it was merged from. Return None if `path` is no merged checkpoint. Raise
    MissingInputError if the run's folder is gone.
    """
    record = merge_record(load_manifest(path).state, path / MANIFEST) if (path / MANIFEST).is_file() else None
    if record is None:
        return None
    run = Path(record.parents[-1].run)
    if not (run / CONFIG).is_file():
        raise MissingInputError(
            f"--from-run={path} is a merged checkpoint, and the run of its newest parent, whose settings a branch "
            f"takes, is not there any more: {run} has no {CONFIG}. Type the settings, with checkpoint.resume={path} to "
            f"go on from there or checkpoint.init_from={path} to begin with its weights."
        )
    return run


def _checked_settings(settings: Any, file: Path, run: Path) -> dict[str, Any]:
    """Return the settings of the run in the folder `run`, read from `file`, with paths that can be opened from the
    current folder. Raise DataError if no run can have written them.
    """
    if not isinstance(settings, dict) or not isinstance(settings.get("model"), dict):
        raise DataError(f"{file} does not hold the settings of a run. Give another run to --from-run.")
    if settings_problem := next(_settings_problems(settings), None):
        raise DataError(f"{file} is damaged: {settings_problem}. Give another run to --from-run.")
    return with_resolved_paths(settings, run)


def _settings_problems(tree: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each sign that the content of a config.json was not written by a run: the keys "defaults" or
    "hydra", far too many values, or lone surrogate characters. Yield nothing if it is sound.
    """
    for group in (tree, *(inner for inner in tree.values() if isinstance(inner, dict))):
        yield from (f"it has the key {key}, which no run writes" for key in ("defaults", "hydra") if key in group)
    if any(islice(iter_values(tree), MAX_VALUES, None)):
        yield f"it holds more than {MAX_VALUES} values, which no run does"
    if surrogate := re.search("[\ud800-\udfff]", json.dumps(tree, ensure_ascii=False)):
        yield f"it holds half a character (U+{ord(surrogate[0]):04X}), which no run writes"


def imported_checkpoint(path: Path) -> Path | None:
    """Return `path` if it is a checkpoint made by `lmtrain import`, or a folder of such checkpoints, outside of any
    run's folder; else None. Raise UsageError if it is a model folder of another program, such as Hugging Face's.
    """
    kind = lmtrain_kind(path)
    if kind in ("checkpoint", "folder of checkpoints"):
        is_import = "imported" in load_manifest(resolve_checkpoint(path)).state
        return path if is_import and not any((folder / CONFIG).is_file() for folder in (path, path.parent)) else None
    if not kind and path.is_dir():
        found = None
        with suppress(LmtrainError):  # because: the search for a run says better what is missing
            found = identify_source(path)
        if found is not None:
            init_from = way(f"checkpoint.init_from={hydra_quoted(str(path))}", instead_of="--from-run")
            raise UsageError(
                f"--from-run={path} is {found}, and not a run. Begin a run from its weights with {init_from} in place "
                "of it."
            )
    return None


_launcher_config: RunConfig | None = None


def prepare_ranks(tokenizer: str, settings: dict[str, Any] | None) -> None:
    """Fill this process's caches with what every rank needs, before the ranks are forked from it: the tokenizer at the
    path `tokenizer`, and digests of the code.

    If `settings` is given (the launcher has composed them), `compose_run` returns these in every rank.
    """
    from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
    from lmtrain.train.ranks.facts_equal_on_all_ranks import PACKAGE, code_digests

    global _launcher_config
    if settings is not None:
        _launcher_config = build_settings(RunConfig, settings)
    code_digests(PACKAGE)
    assert Tokenizer.load(Path(tokenizer)).fingerprint


@contextmanager
def _naming_run_in_folder(overrides: Sequence[str]) -> Iterator[None]:
    """Let an error that no data is given name the run that the typed run.dir holds, which may go on with its own."""
    try:
        yield
    except SettingsError as error:
        folder = typed_words(overrides).get("run.dir", "").strip("'\"")
        if not folder or not os.path.isfile(os.path.join(folder, CONFIG)):  # because: it takes a name of any length
            raise
        way_out = f"{folder} holds a run: add {way('--from-run', folder)} to go on with its settings, or give"
        raise SettingsError([
            problem.replace("data.path is not set. Give", f"data.path is not set. {way_out}")
            for problem in error.marked_problems
        ]) from error  # fmt: skip


@dataclass(frozen=True)
class RunRequest:
    """The run that a user asks for: settings as the words of a command line, and what these words change."""

    words: Sequence[str]
    config_dir: Path | None = None  # the user's own config folder
    name: str = "pretrain"  # the root config NAME.yaml
    # an earlier run or its checkpoint, whose complete settings take the place of the root config; or an imported model,
    # with which the run begins
    from_run: Path | None = None
    from_beginning: bool = False  # the earlier run again, from its first step


def compose_run(
    request: RunRequest, report: Callable[[str], None] | None = None,
    on_composed: Callable[[Composed], None] | None = None,
) -> RunConfig:  # fmt: skip
    """Return the settings of the run that is asked for. If its words lead to a run.dir other than that of the earlier
    run, the new run is a branch of it, unless it begins that run again. `report` receives messages about settings that
    were changed to fit others. `on_composed` receives what is composed before it is checked; the last one counts.
    """
    overrides, config_dir, name = request.words, request.config_dir, request.name
    from_run, from_beginning = request.from_run, request.from_beginning
    if from_beginning and from_run is None:
        raise UsageError(
            f"--from-beginning begins an earlier run again, and no run was given. Give {fill_in('--from-run', 'RUN')}, "
            f"or {leave_out('--from-beginning', shown='leave it out')}: a run without either begins in a new run.dir."
        )
    if from_run is None:
        with _naming_run_in_folder(overrides):
            return _launcher_config or compose_settings(
                overrides, config_dir=config_dir, name=name, report=report, on_composed=on_composed
            )
    if name != "pretrain":
        raise UsageError(
            f"--from-run={from_run} takes the settings of a run in place of a root config, so --config-name={name} "
            f"cannot choose one. {leave_out('--config-name', shown='Leave --config-name out')}, or "
            f"{leave_out('--from-run', shown='--from-run')}."
        )
    if from_beginning:
        return _begin_again(SourceRun.find(from_run), overrides, config_dir, report, on_composed)
    if (path := imported_checkpoint(from_run)) is not None:
        if is_typed(overrides, "checkpoint.init_from") or is_typed(overrides, "checkpoint.resume"):
            raise UsageError(
                f"--from-run={from_run} is an imported model, whose weights the run begins with, and the overrides "
                f"name another checkpoint. {leave_out('--from-run', shown='Leave --from-run out')}, or "
                f"{leave_out('checkpoint.init_from', 'checkpoint.resume', shown='the other checkpoint')}."
            )
        init_from = f"checkpoint.init_from={hydra_quoted(str(path))}"
        return compose_settings(
            [*overrides, init_from], config_dir=config_dir, report=report, on_composed=on_composed
        )
    branch = typed_words(overrides).get("run.dir", "").strip("'\"")
    source = SourceRun.find(from_run, Path(branch) if branch else None)
    names_folder = is_typed(overrides, "run.dir")
    messages = list[str]()
    config = _compose_over(source, overrides, config_dir, messages.append, on_composed, is_branch=names_folder)
    is_branch = Path(config.run.dir).resolve() != source.run.resolve()
    if is_branch != names_folder:  # because: configs can set run.dir too, and an override can repeat it
        messages = []
        config = _compose_over(source, overrides, config_dir, messages.append, on_composed, is_branch=is_branch)
    if is_branch and config.stages and [*config.stages] != [*source.settings.get("stages", {})]:
        ends = ", ".join(f"{stage.stage_name} to step {stage.end_step}" for stage in config.stage_configs)
        messages.append(f"run.dir={config.run.dir} has the stages {ends}")
    if source.is_merge and not is_branch:
        raise UsageError(
            f"--from-run={from_run} is a merged checkpoint, and a run that begins from it needs a folder of its own, "
            f"but run.dir={config.run.dir} is that of its newest parent. Give run.dir=DIR."
        )
    begins_from = config.checkpoint.init_from or config.checkpoint.resume
    has_none = all(latest_checkpoint(run / CHECKPOINTS) is None for run in (source.run, Path(config.run.dir)))
    if is_branch and begins_from == str(source.run) and has_none:
        raise MissingInputError(
            f"--from-run={from_run} has saved no checkpoint from which run.dir={config.run.dir} could start. "
            f"Add {way('--from-beginning')} to begin it again there."
        )
    if report is not None:
        for line in messages:
            report(line)
    return config


def _compose_over(
    source: SourceRun, overrides: Sequence[str], config_dir: Path | None, report: Callable[[str], None],
    on_composed: Callable[[Composed], None] | None, *, is_branch: bool,
) -> RunConfig:  # fmt: skip
    """Return the settings of the run `source`, changed by the overrides, to continue it or, with `is_branch`, to begin
    a branch in a new folder. `report` receives messages about adjusted settings; `on_composed` is that of `compose`.
    """
    settings = source.base_settings(overrides, is_branch=is_branch)

    def rewrite(tree: dict[str, Any], typed: Mapping[str, str]) -> dict[str, str]:
        """Add the stages of `source` to `tree`, the settings to compose, before the newly typed stages. Return the
        typed settings, key -> text, under the keys where they now stand.
        """
        if not is_branch:
            put_before_stages(settings, tree)
            return dict(typed)
        place = source.branch_checkpoint(tree)
        if place is None:
            return dict(typed)
        step, checkpoint = place
        return BranchPoint(settings, step, recorded_config(checkpoint)).rewrite(tree, typed)

    return _compose_over_settings(settings, overrides, config_dir, report, on_composed, rewrite)


def _compose_over_settings(
    settings: dict[str, Any], overrides: Sequence[str], config_dir: Path | None,
    report: Callable[[str], None] | None, on_composed: Callable[[Composed], None] | None,
    rewrite: Rewrite | None = None,
) -> RunConfig:  # fmt: skip
    """Return the `settings` of a run, nested dicts, changed by the overrides; `report`, `on_composed` and `rewrite` are
    those of `compose`. Raise SettingsError, which names the run's config.json, if they are wrong.
    """
    _refuse_added_length(settings, overrides)
    kind = settings["data"].get("kind") if isinstance(settings.get("data"), dict) else None
    # because: the file of that kind names no data, and would take away what the run has
    overrides = [word for word in overrides if word.lstrip("+") != f"data={kind}"]
    sources = Sources(config_dir, _ROOT_NAME, _as_files(settings))
    return compose(RunConfig, overrides, sources, report=report, rewrite=rewrite, on_composed=on_composed)


def _refuse_added_length(settings: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raise SettingsError if an override such as train.steps=+200 seems to mean more than a run has, whose `settings`
    these are, and name the sum.
    """
    train = settings.get("train")
    for word in overrides:
        match = re.fullmatch(r"train\.(steps|tokens)=\+([0-9.]+[kmbtKMBT]?)", word)
        length = train.get(match[1]) if match and isinstance(train, dict) else None
        if match and isinstance(length, int):
            with suppress(ValueError):  # because: the check of all words says what is wrong with the number
                total = f"train.{match[1]}={length + parse_count(match[2])}"
                raise SettingsError([
                    f"{word} is not {match[2]} more, since train.{match[1]} is the length of the whole run. Write "
                    f"{way(total, instead_of=word)} for {match[2]} more than the {length} that it has."
                ])  # fmt: skip


def _begin_again(
    source: SourceRun, overrides: Sequence[str], config_dir: Path | None, report: Callable[[str], None] | None,
    on_composed: Callable[[Composed], None] | None,
) -> RunConfig:  # fmt: skip
    """Return the settings with which the run `source` began, changed by the overrides, for a run in another folder that
    begins as it did. Raise UsageError if no folder is given, or one that holds a run that began with other settings.
    """
    if source.path != source.run:
        raise UsageError(
            f"--from-run={source.path} is a checkpoint, and --from-beginning begins a run again without one. Give the "
            f"run's folder, {way('--from-run', str(source.run), shown=str(source.run))}, or "
            f"{leave_out('--from-beginning', shown='leave --from-beginning out')}."
        )
    resume = typed_words(overrides).get("checkpoint.resume", "auto")
    if resume not in ("auto", "none"):
        raise UsageError(
            f"checkpoint.resume={resume} goes on from a checkpoint, and --from-beginning begins at the run's first "
            f"step. {leave_out('checkpoint.resume', shown='Leave checkpoint.resume out')}, or "
            f"{leave_out('--from-beginning', shown='--from-beginning')}."
        )
    settings = source.settings_to_begin_again(overrides)
    config = _compose_over_settings(settings, overrides, config_dir, report, on_composed)
    folder = Path(config.run.dir)
    if folder.resolve() == source.run.resolve():
        raise UsageError(
            f"--from-beginning begins the run of --from-run={source.path} again, and run.dir={folder} is that run's "
            "own folder, which is kept. Add run.dir=DIR, a new folder."
        )
    if (folder / CONFIG).is_file():
        _refuse_other_run(config, SourceRun.find(folder))
    return config


def _refuse_other_run(config: RunConfig, there: SourceRun) -> None:
    """Raise UsageError if the run `there`, in the folder of a run that is to begin with the settings `config`, began
    with other settings. Those that a start may choose itself do not count.
    """
    wanted, began = (dict(flatten(tree)) for tree in (config.to_dict(), there.first_settings()))
    differing = {
        key: values for key, values in compare_settings(began, wanted).items()
        if "chosen_at_start" not in facts_of(RunConfig, key)
    }  # fmt: skip
    for key, (before, after) in differing.items():
        raise UsageError(
            f"run.dir={there.path} holds a run that began with {key}={show(before)}, and this one begins with "
            f"{key}={show(after)}. Choose another run.dir, or go on with that run: lmtrain pretrain --from-run "
            f"{there.path}"
        )


def _as_files(settings: dict[str, Any]) -> dict[str, YamlFile]:
    """Return the settings of a run as the config files from which exactly these are composed: a root config, and a file
    for each group that the root config chooses. Errors name them as the run's config.json.
    """
    # because: yaml is slow to import
    from lmtrain.config.strict_yaml import YamlFile

    # because: `${` in a value is no reference to another setting
    tree = json.loads(json.dumps(settings, ensure_ascii=False).replace("${", "\\\\${"))
    groups = [group for group in group_choices() if "/" not in group]
    chosen = [group for group in groups if isinstance(tree.get(group), dict)]
    picks = {group: _CHOICE_NAME if group in chosen else None for group in groups if group != "experiment"}
    defaults = [*({group: choice} for group, choice in picks.items()), "_self_", {"experiment": None}]
    rest = {key: value for key, value in tree.items() if key not in groups}
    files = {f"{group}/{_CHOICE_NAME}": tree[group] for group in chosen} | {_ROOT_NAME: {"defaults": defaults} | rest}
    path = Path(settings["run"]["dir"]) / CONFIG
    return {name: YamlFile(path, data, "", {}) for name, data in files.items()}
