"""The result of training, for the summary that the command line shows. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Summary:
    """The result of `train`, for the summary that the command line shows."""
    step: int
    loss: float | None  # loss of the last step of this attempt
    valid_loss: float | None
    seconds: float  # duration of this attempt, all its stages together
    tokens: int
    stopped_by: str | None  # the cause if the run ended early
    epochs: float  # passes over the training data
    was_resumed: bool  # True if earlier attempts did some of the steps

    def joined_to(self, before: Summary | None) -> Summary:
        """Return this summary of a stage as that of the whole start; `before` is that of the stages before it."""
        if before is None:
            return self
        return replace(self, epochs=before.epochs + self.epochs, was_resumed=before.was_resumed)
