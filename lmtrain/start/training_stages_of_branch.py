"""The stages of a branch: the past of the run that it leaves, up to the checkpoint, and a stage with what was typed.

Used by `--from-run`. Works on settings as nested dicts, before they are checked; reads no data and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.settings_base import changes_training, facts_of
from lmtrain.errors import SettingsError, leave_out, own, way
from lmtrain.train.run_config import RunConfig
from lmtrain.train.run_stage_settings import GROUPS, stage_may_set, unused_stage_name
from lmtrain.units import parse_count

TRUNK, BRANCH = "trunk", "branch"
# groups of which a change makes stages of a run without any; the others may change in the middle of a run
_MAKE_STAGES = ("data", "model", "train")
_MAKE_A_STAGE = (*_MAKE_STAGES, "optim")  # the same, of a run that has stages
Tree = dict[str, Any]


@dataclass(frozen=True)
class BranchPoint:
    """The place at which a run is left: the settings of the run's last start as nested dicts, the checkpoint's step,
    and the settings with which it was saved, if they are known. The steps up to it were made with those.
    """

    base: Mapping[str, Any]
    step: int
    saved: RunConfig | None = None

    def rewrite(self, tree: Tree, typed: Mapping[str, str]) -> dict[str, str]:
        """Change `tree`, the composed settings of the branch as nested dicts, in place: if stages were typed, put the
        run's stages up to the checkpoint before them; else, if settings were typed that only a stage can change, add a
        stage that holds them. Return `typed`, key -> text, with the keys under which the settings now stand. Raise
        SettingsError if they do not fit the run.
        """
        parent = build_settings(RunConfig, self.base)
        past, current = self._past(parent)
        given = self._changed_stage(tree, typed, inherited_settings(current))
        types_stages = any(key.startswith("stages.") for key in typed) or [*_stages(tree)] != [*_stages(self.base)]
        groups = _MAKE_A_STAGE if parent.stages or types_stages else _MAKE_STAGES
        differing = self._differing(inherited_settings(current), given, groups)
        if types_stages:
            self._cut_before_new_stages(tree, typed, parent, past, differing)
        if types_stages or not differing:
            return dict(typed)
        if any(key.partition(".")[0] == "schedule" for key in typed):
            # because: the files suit a run that begins, and a branch goes on
            warm_up = {} if "schedule.warmup_steps" in typed else {"warmup_steps": 0}
            given["schedule"] = dict(tree["schedule"]) | warm_up
        elif current.get("schedule"):
            raise SettingsError([
                f"The checkpoint of step {self.step} was made in a stage with a schedule of its own, which would begin "
                "anew in the branch. To say how the branch's learning rate goes, add "
                f"{way('schedule=constant')} or {way('schedule=linear')}; optim.lr is where it begins."
            ])
        name = unused_stage_name(BRANCH, past)
        tree["stages"] = past | {name: given | self._length(parent, tree["train"], typed)}
        self._restore(tree)
        moved = {key: f"stages.{name}.{key}" for key in typed if stage_may_set(key)}
        return {moved.get(key, key): text for key, text in typed.items() if key not in ("train.steps", "train.tokens")}

    def _cut_before_new_stages(
        self, tree: Tree, typed: Mapping[str, str], parent: RunConfig, past: Tree, differing: Sequence[str]
    ) -> None:
        """Set the stages in `tree` to `past` (those up to the checkpoint), then the newly typed ones. Leave them as
        they are if no stage is new, or if settings of one that the run has not finished were typed too. Raise
        SettingsError if `differing`, keys of settings typed for the whole run and not for a stage, is not empty.
        """
        new_names = [name for name in _stages(tree) if name not in _stages(self.base)]
        if differing and (names := new_names or [*_stages(tree)]):
            name = names[-1]
            if (group := differing[0].partition(".")[0]) in typed and differing[0] not in typed:
                raise SettingsError([
                    f"{group}={typed[group]} changes {differing[0]} for the whole run, whose steps up to {self.step} "
                    f"are done. {leave_out()}; stages.{name}.{differing[0]}=VALUE is for the new stage alone."
                ])
            words = [f"stages.{name}.{key}={typed[key]}" for key in differing if key in typed]
            whole = way(*words, instead_of=differing) if len(words) == len(differing) else f"stages.{name}.KEY=VALUE"
            raise SettingsError([
                f"{differing[0]} is typed for the whole run, whose steps up to {self.step} are done, beside stages. "
                f"Give it to the stage that it is for: {whole}."
            ])
        ahead = [stage.stage_name for stage in parent.stage_configs if stage.end_step > self.step]
        is_cut = not any(key.startswith(f"stages.{name}.") for key in typed for name in ahead if name)
        if new_names and is_cut and not (TRUNK in new_names and not parent.stages):
            tree["stages"] = past | {name: tree["stages"][name] for name in new_names}

    def _past(self, parent: RunConfig) -> tuple[Tree, Mapping[str, Any]]:
        """Return (the run's stages up to the checkpoint by name, the last one shortened to end there; the settings of
        that last stage). If the run has no stages, return one stage with all steps so far, and {}.
        """
        if not parent.stages:
            return {TRUNK: self._as_saved(0, {}) | {"steps": self.step}}, {}
        past: Tree = {}
        current: Mapping[str, Any] = {}
        for stage in parent.stage_configs:
            if stage.first_step >= self.step:
                break
            current = parent.stages[stage.stage_name].overrides()
            length = {"steps": min(stage.end_step, self.step) - stage.first_step}
            past[stage.stage_name] = self._as_saved(stage.first_step, current) | length
        return past, current

    def _as_saved(self, first_step: int, stage: Mapping[str, Any]) -> Tree:
        """Return the settings `stage` of a stage that began at `first_step`, with the optimizer's settings and the
        schedule of its own, or none, that the checkpoint was saved with where a later start has changed them.
        """
        if self.saved is None:
            return dict(stage)
        there = self.saved.stage_at(first_step)
        given, run, optim = stage.get("optim", {}), self._group("optim"), there.optim.to_dict()
        changed = {
            key: value for key, value in optim.items()
            if stage_may_set(f"optim.{key}") and value != given.get(key, run.get(key))
        }  # fmt: skip
        schedule = {"schedule": there.schedule.to_dict()} if there.has_own_schedule else {}
        kept = {group: values for group, values in stage.items() if group != "schedule"}
        return kept | ({"optim": given | changed} if changed else {}) | schedule

    def _changed_stage(self, tree: Tree, typed: Mapping[str, str], current: Mapping[str, Any]) -> Tree:
        """Return the settings of a new stage: those of the stage `current`, changed by the values in `tree` that were
        typed or differ from the run's. No schedule is taken from `tree`.
        """
        given: Tree = {group: dict(values) for group, values in current.items()}
        for group in GROUPS:
            before, after = self._group(group), tree.get(group)
            if group == "schedule" or not isinstance(after, dict):
                continue
            changed = {
                key: value for key, value in after.items()
                if stage_may_set(f"{group}.{key}")
                and (key not in before or value != before[key] or f"{group}.{key}" in typed)
            }  # fmt: skip
            if changed:
                # because: a stage takes recompute as a whole, and data of another kind has other keys
                begins_anew = group == "recompute" or after.get("kind") != before.get("kind")
                given[group] = (dict(after) if group == "recompute" else changed) if begins_anew else (
                    given.get(group, {}) | changed
                )
        return given

    def _group(self, name: str) -> Mapping[str, Any]:
        """Return a group of the run's settings; {} if it has none, as a run of an older version may."""
        group = self.base.get(name)
        return group if isinstance(group, dict) else {}

    def _differing(
        self, current: Mapping[str, Any], given: Mapping[str, Any], groups: Sequence[str]
    ) -> list[str]:
        """Return the dotted keys, such as "optim.lr", whose values differ between the stages `current` and `given`, of
        these settings groups; what a stage does not set is taken from the run. Keys that change no sample and no number
        but by rounding are left out.
        """
        before, after = (
            {f"{group}.{key}": value for group in groups for key, value in
             {**self._group(group), **stage.get(group, {})}.items()} for stage in (current, given)
        )  # fmt: skip
        return [
            key for key in dict.fromkeys([*before, *after])
            if before.get(key) != after.get(key) and _makes_a_stage(key)
        ]  # fmt: skip

    def _length(self, parent: RunConfig, train: Mapping[str, Any], typed: Mapping[str, str]) -> Tree:
        """Return the length of the branch's stage, as {"steps": N} or {"tokens": N}: the typed train.steps or
        train.tokens, which count from the start of the run, less what is done at the checkpoint; if neither is typed,
        the run's remaining steps. Raise SettingsError if nothing is left.
        """
        for key in ("tokens", "steps"):
            if f"train.{key}" in typed and train.get(key) is not None:
                total = train[key]
                if isinstance(total, str):
                    with suppress(ValueError):  # because: the check of all settings says what is wrong with it
                        total = parse_count(total)
                if not isinstance(total, int):
                    return {key: total}
                done = self.step if key == "steps" else self._tokens(parent)
                if total <= done:
                    raise SettingsError([
                        f"train.{key}={typed[f'train.{key}']} is the length of the whole run, of which {done} {key} "
                        f"are done at the checkpoint of step {self.step}. Use {own(done + total)} for that many more, "
                        f"or stages.NAME.{key} for the branch alone."
                    ])
                return {key: total - done}
        left = parent.total_steps - self.step
        if left <= 0:
            raise SettingsError([
                f"The checkpoint is that of step {self.step}, at which the run ends, so that no step is left for the "
                f"branch. Give the length of the whole run, train.steps=N with N above {self.step}."
            ])
        return {"steps": left}

    def _tokens(self, parent: RunConfig) -> int:
        """Return the number of tokens, padding included, that the run has trained on up to the checkpoint."""
        total = 0
        for stage in parent.stage_configs:
            first, end = (
                parent.batch_plan.range_of(min(step, self.step))[0] for step in (stage.first_step, stage.end_step)
            )
            total += (end - first) * stage.seq_len
        return total

    def _restore(self, tree: Tree) -> None:
        """Put the run's own values back into `tree`, in place, for all settings that a stage can set; the new stage now
        holds the typed values.
        """
        for group in GROUPS:
            base, current = self.base.get(group), tree.get(group)
            if isinstance(base, dict) and isinstance(current, dict):
                kept = {key: value for key, value in current.items() if not stage_may_set(f"{group}.{key}")}
                own = {key: value for key, value in base.items() if stage_may_set(f"{group}.{key}")}
                if group == "data":  # because: data of another kind, which has other keys, is the stage's alone
                    kept, own = {key: value for key, value in kept.items() if key in base and value is not None}, base
                tree[group] = own | kept


def _makes_a_stage(key: str) -> bool:
    """Return whether a change of the setting `key` in the middle of a run makes a stage: whether it decides which
    samples are read or how they are learned from.
    """
    if key == "data.train_on_held_out":
        return False  # because: it is for stages that are there already
    return changes_training(RunConfig, key) and stage_may_set(key) and "chosen_at_start" not in facts_of(RunConfig, key)


def inherited_settings(stage: Mapping[str, Any]) -> Tree:
    """Return a copy of a stage's settings (nested dicts, as under stages.NAME) for a stage that follows it. Left out
    are the settings that act at the first step of a stage: its schedule, its batch ramp-up and the `restart` of its
    data.
    """
    given: Tree = {group: dict(values) for group, values in stage.items() if group != "schedule"}
    given.get("train", {}).pop("rampup", None)
    data = given.get("data", {})
    data.pop("restart", None)
    if isinstance(data.get("datasets"), list):
        data["datasets"] = [
            {key: value for key, value in part.items() if key != "restart"} if isinstance(part, dict) else part
            for part in data["datasets"]
        ]
    return {group: values for group, values in given.items() if values}


def put_before_stages(base: Mapping[str, Any], tree: Tree) -> None:
    """Put the run as it was planned, whose settings are `base`, before the stages in `tree` that follow it, if it had
    none itself.
    """
    if not _stages(base) and _stages(tree) and TRUNK not in _stages(tree):
        tree["stages"] = {TRUNK: {"steps": build_settings(RunConfig, base).total_steps}} | tree["stages"]


def _stages(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the stages of settings as nested dicts; {} if there are none."""
    stages = tree.get("stages")
    return stages if isinstance(stages, dict) else {}
