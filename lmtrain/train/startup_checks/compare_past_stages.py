"""Compares the stages that a run has finished, as its settings describe them, with those that its checkpoint records.

Called by resume_checks.py for the checkpoint that a run resumes from. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.settings_base import changes_training, facts_of
from lmtrain.data.data_settings import DataChoice
from lmtrain.data.resume_position_by_source import KEY_DIGITS, DataHistory
from lmtrain.data.store.joined_dataset import dataset_exists, open_dataset
from lmtrain.train.run_config import RunConfig
from lmtrain.train.run_stage_settings import stage_may_set


def past_pairs(config: RunConfig, state: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, the run's value, the checkpoint's value) for each setting of the stages before that of `config`,
    which are finished, so that a resumed run must not change them. `state` is the checkpoint's saved state.

    Datasets are compared by their contents, as far as their files are still there, and not by their paths.
    """
    past = [stage for stage in config.stage_configs if stage.end_step <= config.first_step]
    if not past and not state.get("settings", {}).get("stages"):
        return []
    saved, pairs = build_settings(RunConfig, state["settings"]), list[tuple[str, Any, Any]]()
    for saved_stage in saved.stage_configs:
        end = saved_stage.end_step
        if end < state["step"]:  # because: a run may make the stage that has just ended longer
            name = f"the last step of the stage {saved_stage.stage_name}"
            pairs.append((name, config.stage_at(end - 1).end_step, end))
    history = DataHistory.from_dict(state["history"]) if state.get("history") else None
    for stage in past:
        saved_stage, of = saved.stage_at(stage.first_step), f"of the stage {stage.stage_name}"
        pairs.append((f"the last step {of}", stage.end_step, min(saved_stage.end_step, state["step"])))
        facts, saved_facts = _stage_facts(stage), _stage_facts(saved_stage)
        pairs += [(f"{key} {of}", value, saved_facts.get(key)) for key, value in facts.items()]
        position = saved.batch_plan.range_of(stage.first_step)[0]
        differing = _differing_contents(stage.data, saved_stage.data, position, history)
        pairs += [(f"{key} {of}", path, saved_path) for key, path, saved_path in differing]
    return [*{repr(pair): pair for pair in pairs}.values()]  # because: an end can differ from both sides


def _stage_facts(stage: RunConfig) -> dict[str, Any]:
    """Return dotted key -> value for the settings that decide what a training stage learns: of model, train, optim,
    data and schedule. Paths are left out.
    """
    groups = {group: getattr(stage, group).to_dict() for group in ("model", "train", "optim", "data")}
    settings = {f"{group}.{key}": value for group, values in groups.items() for key, value in values.items()}
    facts = {
        key: value for key, value in settings.items()
        if _decides_learning(key) and (stage_may_set(key) or (key.startswith("data.") and key[:9] != "data.text"))
    }  # fmt: skip
    for name in ("data.datasets", "data.valid_datasets"):
        facts[name] = [
            {key: value for key, value in part.items() if value and _decides_learning(f"data.datasets.{key}")}
            for part in settings.get(name, ())
        ]
    return facts | {"schedule": stage.schedule.to_dict() if stage.has_own_schedule else "that of the run"}


def _decides_learning(key: str) -> bool:
    """Return whether the setting `key` decides what a stage has learned. The content of a path does, and not the path;
    what a start may choose changes the rounding alone.
    """
    facts = facts_of(RunConfig, key)
    return changes_training(RunConfig, key) and "path" not in facts and "chosen_at_start" not in facts


def _differing_contents(
    data: DataChoice, saved_data: DataChoice, position: int, history: DataHistory | None
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, the run's dataset, the checkpoint's dataset) for each dataset of a past stage, which began at sample
    `position` of the run, whose content differs in the settings `data` and `saved_data`. A dataset whose files are not
    there any more counts as equal.

    because: an older version has not recorded the contents of each stage, and none those of validation data. They are
    then those of the saved path, if it is another, or any that the run has read
    """
    if history is None:
        return
    recorded = history.contents_at(position) or ()
    training, saved_training = (_paths(each, validation=False) for each in (data, saved_data))
    known = dict(zip(saved_training, recorded, strict=False))
    read = {key.partition(" ")[0] for key in history.states}
    paths, saved_paths = (_paths(each, validation=True) for each in (data, saved_data))
    for key in dict.fromkeys([*saved_paths, *paths]):
        path, saved_path = paths.get(key), saved_paths.get(key)
        if path is None or saved_path is None:
            yield key, path, saved_path
            continue
        content = _content(path)
        saved_content = known.get(key) or (_content(saved_path) if path != saved_path else None)
        if saved_content is None and key in training and content not in read:
            saved_content = "another"
        if None not in (content, saved_content) and content != saved_content:
            yield key, f"{path} with content {content}", f"{saved_path} with content {saved_content}"


def _content(path: str) -> str | None:
    """Return the digits that name the content of the dataset at the prefix `path`; None if it is not there."""
    return open_dataset(path).content_digest[:KEY_DIGITS] if dataset_exists(Path(path)) else None


def _paths(choice: DataChoice, *, validation: bool) -> dict[str, str]:
    """Return dotted key -> prefix of the datasets that a stage trains on, in order, and with `validation` of those that
    it only validates on.
    """
    data = choice.to_dict()
    kinds = ("", "valid_") if validation else ("",)
    paths = {f"data.{kind}path": data[f"{kind}path"] for kind in kinds if data.get(f"{kind}path")}
    for kind in kinds:
        parts = data.get(f"{kind}datasets", ())
        paths |= {f"data.{kind}datasets[{number}].path": part["path"] for number, part in enumerate(parts)}
    domains = data["valid_paths"].items() if validation else ()
    return paths | {f"data.valid_paths.{name}": path for name, path in domains}
