"""Which steps are traced: by the setting, or since somebody asked. Opens the file with the first of them.

Installed by train for as long as a run trains; told of each step by phases. A disk that does not take the file costs
the trace, not the run.
"""

from __future__ import annotations

from collections.abc import Callable

from lmtrain.errors import LmtrainError
from lmtrain.observe.measure import phases
from lmtrain.observe.spans.recorder import Recorder

NONE, SAMPLED, ALL = "none", "sampled", "all"
_SOON = range(10, 16)  # of each start: caches and buffers are made by then
_EVERY = 1000
# because: none is a multiple of 5 or of 8, at which runs save and validate: a step that does so is not like the others
_OFF_BEAT = (333, 334)
ASKED_STEPS = 6


class Tracer:
    def __init__(self, which: str, open_recorder: Callable[[], Recorder], say: Callable[[str], None]) -> None:
        self.which, self._open, self._say = which, open_recorder, say
        self.recorder: Recorder | None = None  # once there is a file
        self._records = self._failed = False
        self._before, self._until = phases.main.steps, 0

    @property
    def _count(self) -> int:
        """Of the steps of this start that have begun."""
        return phases.main.steps - self._before

    def ask(self) -> None:
        """Trace the next few steps, whatever the setting. All ranks ask after the same step."""
        self._until, self._failed = self._count + ASKED_STEPS, False

    def begin_step(self, step: int) -> None:
        wanted = not self._failed and self._wants(step)
        if wanted and self.recorder is None:
            self._open_file()
        recorder = self.recorder
        if recorder is None:
            return
        if recorder.file.problem is not None:
            self._fail(recorder.file.problem)
            self._end_file()
        elif wanted:
            recorder.begin_step(step)
            self._record(recorder)
        elif self._records:
            recorder.end_step()
            self._record(None)
        if self.which == ALL or not self._records:
            recorder.read_device()

    def close(self) -> None:
        phases.tell_steps(None)
        if self.recorder is not None:
            self._end_file()

    def _wants(self, step: int) -> bool:
        if self.which == ALL or self._count <= self._until:
            return True
        return self.which == SAMPLED and (self._count in _SOON or step % _EVERY in _OFF_BEAT)

    def _open_file(self) -> None:
        try:
            self.recorder = self._open()
        except LmtrainError as error:
            self._fail(str(error))

    def _end_file(self) -> None:
        self._record(None)
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.close()

    def _record(self, recorder: Recorder | None) -> None:
        self._records = recorder is not None
        phases.record(recorder)

    def _fail(self, why: str) -> None:
        self._failed = True
        self._say(f"{why} No step is traced from here on; training goes on.")
