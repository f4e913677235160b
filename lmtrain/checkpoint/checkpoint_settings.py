"""When checkpoints are saved, how many stay, and from which one a run goes on or begins. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from lmtrain.checkpoint.find_and_prune import DEFAULT_MEASURE
from lmtrain.checkpoint.view_with_ema_as_weights import WeightSet
from lmtrain.checkpoint.weight_ema_settings import WeightAverageSettings
from lmtrain.config.build_typed_settings import quantity
from lmtrain.config.settings_base import Facts, Problem, Settings, problem_if, setting, show
from lmtrain.errors import leave_out, own, way

NEWEST_WORDS = ("auto", "latest", "last", "newest", "best", "true", "yes")  # for the checkpoint to resume from
RESUMES_BY_ITSELF = "A run resumes from its own run.dir by itself."
DEFAULT_INTERVAL_S = 600.0  # a run saves by time without being asked
_SAVE_AT_END = f"Use {way('.interval_steps=0')} to save at the end of the run, or {leave_out(shown='leave it out')}."


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Settings):
    field_facts: ClassVar[Facts] = Facts(affects="nothing")

    interval_steps: int | None = quantity("count", default=500)  # 0: by time and at the end; None: never
    interval_s: float | None = quantity("seconds", default=DEFAULT_INTERVAL_S)  # and whenever so much time went by
    keep_last: int | Literal["all"] = field(
        default=2, metadata={"example": "all"}
    )
    keep_every_steps: int | None = quantity("count", default=None)  # checkpoints at multiples of it are never removed
    # so many checkpoints with the best `best_by` are kept as well
    keep_best: int = field(default=0, metadata={"meant": {"true": "1", "yes": "1", "on": "1"}})
    best_by: str = DEFAULT_MEASURE  # a measure by its name in TensorBoard
    asynchronous: bool = True
    verify_after_save: bool = False  # read back from the disk before a checkpoint counts
    # auto, none, or the path of a checkpoint or run
    resume: str = setting(
        default="auto", path="checkpoint", metadata={"meant": {"true": "auto", "false": "none", "null": "auto"}}
    )
    fallback: bool = False  # if the newest cannot be read, resume from the newest readable one before it
    # the path of a checkpoint whose weights a new run starts from
    init_from: str | None = setting(default=None, path="checkpoint", affects="numbers")
    init_weights: WeightSet = "model"  # ema: the average that the checkpoint holds, in place of its weights
    ema: WeightAverageSettings = field(default_factory=WeightAverageSettings)  # an average of the weights, saved too

    @property
    def saves_every_s(self) -> float | None:
        """`interval_s`, or None for a run that never saves (interval_steps=null)."""
        return None if self.interval_steps is None else self.interval_s

    @property
    def saves_before_end(self) -> bool:
        """True if checkpoints are saved before the end of the run."""
        return bool(self.interval_steps or self.saves_every_s)

    def num_on_disk(self, total_steps: int, kept_steps: Collection[int] = ()) -> tuple[int, int]:
        """Return the least and the greatest number of checkpoints on disk at one time, including the one being written,
        in a run of `total_steps` steps that also saves and keeps the checkpoints of `kept_steps`.

        The greatest can be smaller in practice: saves by time are not known in advance.
        """
        interval, keep_every = self.interval_steps or total_steps, self.keep_every_steps
        num_saves = -(-total_steps // interval)
        num_saves += sum(step % interval != 0 and step != total_steps for step in kept_steps)
        num_permanent = total_steps // keep_every if keep_every else 0
        num_permanent += sum(not keep_every or step % keep_every != 0 for step in kept_steps)
        keep_last = num_saves if self.keep_last == "all" else self.keep_last
        num_kept = keep_last + self.keep_best + num_permanent
        return min(num_saves, keep_last + 1), min(total_steps if self.interval_s else num_saves, num_kept + 1)

    def retention_keys(self) -> list[str]:
        """Return the setting keys that decide how many checkpoints are kept in this run."""
        return ["keep_last", *(key for key in ("keep_best", "keep_every_steps", "interval_s") if getattr(self, key))]

    def problems(self) -> Iterator[Problem]:
        steps, keep_every, start = self.interval_steps, self.keep_every_steps, self.init_from
        by_step = "no step is" if steps is None else "the last step alone is"
        when_saved = "hardly one of them is" if self.saves_every_s is not None else by_step
        none_saved = f"since with interval_steps={show(steps)} {when_saved} saved"
        without = leave_out(shown="leave it out")
        either = f"{leave_out()}, or {leave_out('.resume', shown='leave out checkpoint.resume')}."
        yield from problem_if(
            self.ema.is_on and steps is None, "ema.decay", self.ema.decay,
            "keeps an average that no checkpoint would hold, since with interval_steps=null nothing is saved",
            _SAVE_AT_END,
        )  # fmt: skip
        yield from self.checked(
            (steps is not None and steps < 0, "interval_steps",
             "is negative", f"Use {own(0)} to save by time and at the end of the run, or null for never."),
            self.above_0("interval_s", f"Use {own('10min')}, or null to go by interval_steps alone."),
            (self.interval_s not in (None, DEFAULT_INTERVAL_S) and steps is None, "interval_s",
             "would save checkpoints, but with interval_steps=null nothing is saved",
             f"Use {way('.interval_steps=0')} to save by time and at the end, or {without}."),
            (self.keep_last != "all" and self.keep_last < 1, "keep_last", "would keep no checkpoint",
             f"Use {own(2)}, so that a damaged newest one has a predecessor, or {own('all')} to keep every one."),
            (keep_every is not None and self.keep_last == "all", "keep_every_steps",
             "keeps nothing more, since keep_last=all keeps every checkpoint",
             f"{leave_out()}, or {leave_out('.keep_last', shown='keep_last')}."),
            (keep_every is not None and keep_every < 1, "keep_every_steps",
             "is not a number of steps", f"Use {own('null')} for none, or give a multiple of interval_steps."),
            (bool(keep_every and steps and keep_every % steps), "keep_every_steps",
             f"is not a multiple of interval_steps={steps}, so hardly any save would stay",
             f"Use {own(_next_multiple(keep_every, steps))}."),
            (keep_every is not None and not steps, "keep_every_steps", f"has no checkpoints to keep, {none_saved}",
             f"Use {way(f'.interval_steps={keep_every}')}, or {without}."),
            self.at_least(0, "keep_best", f"Use {own(1)} to keep the best, or {own(0)} for none."),
            (self.keep_best > 0 and not steps, "keep_best", f"has no checkpoints to choose from, {none_saved}",
             f"Use {way(f'.interval_steps={keep_every or 500}')}, or {without}."),
            (self.keep_best == 0 and self.best_by != DEFAULT_MEASURE, "best_by",
             "has no effect with keep_best=0", f"Use {way('.keep_best=1')}, or {without}."),
            (self.verify_after_save and steps is None, "verify_after_save",
             "has no checkpoint to read back, since with interval_steps=null nothing is saved",
             _SAVE_AT_END),
            (not self.resume.strip(), "resume", "is empty",
             f"Use {own('auto')}, {own('none')} or the path of a checkpoint."),
            (self.resume in NEWEST_WORDS and self.resume != "auto", "resume",
             "is no checkpoint", f"{leave_out()}: {RESUMES_BY_ITSELF[0].lower()}{RESUMES_BY_ITSELF[1:]} A folder of "
             f"this name is ./{self.resume}."),
            (start is not None and not start.strip(), "init_from",
             "is empty", f"Use {own('null')} or the path of a checkpoint."),
            (self.init_weights != "model" and start is None, "init_weights",
             "has no checkpoint to read, since init_from=null begins with random weights",
             f"{leave_out()}, or add checkpoint.init_from=CHECKPOINT."),
            (self.fallback and self.resume == "none", "fallback",
             "has no effect, since with resume=none a run starts from the beginning", either),
            (start is not None and self.resume not in ("auto", "none"), "init_from",
             f"starts a new run, but checkpoint.resume={self.resume} resumes an old one",
             either),
        )  # fmt: skip


def _next_multiple(value: int | None, divisor: int | None) -> int:
    """Return the smallest multiple of `divisor` that is at least `value`."""
    return -(-(value or 0) // (divisor or 1)) * (divisor or 1)
