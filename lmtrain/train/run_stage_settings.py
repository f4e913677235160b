"""Settings of a stage of a run: its length, and the settings that differ from the run's while it lasts. Torch-free.

RunConfig in run_config.py turns each stage into the settings of a whole run, which are then checked as such.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain, count
from typing import Any

from lmtrain.config.build_typed_settings import quantity
from lmtrain.config.parse_and_apply_overrides import override_text
from lmtrain.config.settings_base import Problem, Settings, classes_of, facts_of, kinds, problem_if, setting
from lmtrain.data.data_settings import DataChoice
from lmtrain.errors import join_few, leave_out, spelling_hint, way
from lmtrain.models.model_settings import ModelSettings
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.optim.schedule_settings import ScheduleSettings
from lmtrain.parallel.device_and_precision_settings import RecomputeSettings
from lmtrain.train.train_settings import EvalSettings, TrainSettings

LENGTHS = ("steps", "tokens", "samples")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True, kw_only=True)
class StageSettings(Settings):
    """A part of a run with a name: exactly one of steps, tokens and samples, and settings that hold in place of the
    run's while it lasts. Stages train in the order in which they are first named.
    """

    steps: int | None = quantity("count", default=None)  # the length, in steps
    tokens: int | None = quantity("count", default=None)  # the length, in tokens; rounded up to whole steps
    samples: int | None = quantity("count", default=None)  # the length, in samples; rounded up to whole steps
    # stop at the end of the stage, with exit code 75; the same command goes on
    stop_after: bool = setting(default=False, affects="nothing")
    # keys of `data`, except `text*`; another kind keeps shared keys
    data: dict[str, Any] = setting(default_factory=dict, metadata={"group": DataChoice})
    # `seq_len`, `dropout` and rotary angles but `rotary_share`
    model: dict[str, Any] = setting(default_factory=dict, metadata={"group": ModelSettings})
    # `global_batch`, `micro_batch` and `rampup`
    train: dict[str, Any] = setting(default_factory=dict, metadata={"group": TrainSettings})
    # `lr`, `weight_decay` and `clip_norm`
    optim: dict[str, Any] = setting(default_factory=dict, metadata={"group": OptimSettings})
    # a choice of its own, as in recompute=full
    recompute: dict[str, Any] = setting(default_factory=dict, metadata={"group": RecomputeSettings})
    # one of its own, as in schedule=linear
    schedule: dict[str, Any] = setting(default_factory=dict, metadata={"group": ScheduleSettings})
    # any settings of `eval`
    eval: dict[str, Any] = setting(default_factory=dict, metadata={"group": EvalSettings})

    def problems(self) -> Iterator[Problem]:
        given = [key for key in LENGTHS if getattr(self, key) is not None]
        without_others = leave_out(*(f".{key}" for key in given[1:]), shown=f"Leave {' and '.join(given[1:])} out")
        yield from problem_if(
            len(given) != 1, "steps", self.steps,
            f"and {' and '.join(given[1:]) if len(given) > 1 else 'no other length'}: a stage has exactly one of "
            "steps, tokens and samples",
            f"{without_others}." if given else "Give one of them, as in steps=N or tokens=N.",
        )  # fmt: skip
        yield from self.checked(*(self.at_least(1, key) for key in LENGTHS))
        for group, values in self.overrides().items():
            for key in values if group != "data" else ():
                yield from () if stage_may_set(f"{group}.{key}") else _foreign_key_problem(group, key, values[key])
        for group in ("recompute", "schedule"):
            values = getattr(self, group)
            yield from problem_if(
                bool(values) and not values.get("kind"), f"{group}.kind", None,
                f"is missing, and a stage sets its whole {group} or nothing of it",
                f"Add its kind, as {way(f'.{group}.kind={_kind_with(group, values)}')}.",
            )  # fmt: skip
        for key, value in self.data.items():
            is_of_run = not stage_may_set(f"data.{key}")
            yield from problem_if(
                is_of_run, f"data.{key}", value, "belongs to the run and not to one of its stages",
                f"Set {_for_whole_run('data', key, value)} for the whole run." if key[:4] != "text"
                else "Make a dataset of the text with `lmtrain preprocess`, and give data.path=PREFIX.",
            )  # fmt: skip

    def overrides(self) -> dict[str, dict[str, Any]]:
        """Return the settings that this stage gives, by group; groups of which it gives none are left out."""
        return {group: values for group in GROUPS if (values := getattr(self, group))}

    def to_dict(self) -> dict[str, Any]:
        """Return what this stage gives, without the keys that it leaves to the run."""
        return {key: value for key, value in super().to_dict().items() if value not in (None, False, {})}

    def apply(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the run's `settings`, nested dicts, overridden by those of this stage. If the stage has another kind
        of data, the run's data settings that this kind does not have are dropped; `recompute` and `schedule` are
        replaced as a whole.
        """
        result = dict(settings)
        for group, values in self.overrides().items():
            if group in ("recompute", "schedule"):
                result[group] = dict(values)
            elif group == "data":
                result[group] = _of_same_kind(settings[group], values.get("kind")) | values
            else:
                result[group] = settings[group] | values
        return result


# group of a run's settings of which a stage may give some -> its class
GROUPS: dict[str, type[Settings]] = {
    entry.name: entry.metadata["group"] for entry in fields(StageSettings) if "group" in entry.metadata
}


def stage_may_set(key: str) -> bool:
    """Return True if a stage may set the run's dotted `key`, such as optim.lr, for itself."""
    return facts_of(StageSettings, key).get("per_stage", False)


def _foreign_key_problem(group: str, key: str, value: Any) -> Iterator[Problem]:
    """Yield the problem with a stage's setting `key` of `group`, which a stage may not set, or which is none."""
    names = dict.fromkeys(entry.name for cls in classes_of(GROUPS[group]) for entry in fields(cls))
    keys, name = [each for each in names if stage_may_set(f"{group}.{each}")], f"{group}.{key}"
    if key in names or key == "kind":
        allowed = join_few([f"{group}.{each}" for each in keys])
        way_out = f"Set {_for_whole_run(group, key, value)} for the whole run; a stage may set {allowed}."
        yield Problem(name, value, "cannot differ between the stages of a run", way_out)
        return

    def renamed(near: str) -> str:
        return way(f".{group}.{near}={override_text(value)}", instead_of=f".{name}")

    yield Problem(name, value, "is not a setting", spelling_hint(key, keys, renamed))


def _for_whole_run(group: str, key: str, value: Any) -> str:
    """Return as a way out a stage's setting as one of the run."""
    return way(f"{group}.{key}={override_text(value)}", instead_of=f".{group}.{key}")


def _kind_with(group: str, values: Collection[str]) -> str:
    """Return the usual kind of the settings group `group`, or else another one that has all keys of `values`."""
    usual = "full" if group == "recompute" else "cosine"
    classes = kinds(GROUPS[group])  # type: ignore[arg-type]
    fitting = [kind for kind, cls in classes.items() if {*values} <= {"kind", *(field.name for field in fields(cls))}]
    return usual if usual in fitting or not fitting else fitting[0]


def _of_same_kind(data: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return the data settings `data` without those that data settings of `kind` do not have. Return a copy of them all
    if `kind` is None, unknown, no text or that of `data`.
    """
    if kind == data["kind"] or not isinstance(kind, str) or kind not in kinds(DataChoice):
        return dict(data)
    return {key: data[key] for key in ({f.name for f in fields(kinds(DataChoice)[kind])} & data.keys())}


def name_problems(names: Mapping[str, StageSettings]) -> Iterator[Problem]:
    """Yield a problem for each stage whose name cannot be typed in a dotted key."""
    for name in names:
        yield from problem_if(
            not _NAME.fullmatch(name), "stages", name, "is not a stage's name: a letter, then letters, digits, - and _",
            "Give a name such as decay.",
        )  # fmt: skip


def unused_stage_name(name: str, taken: Collection[str]) -> str:
    """Return `name` if no stage in `taken` has it, else the first of NAME-2, NAME-3 and so on that none has."""
    candidates = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)
