"""What a run has read of each source, and where its next stage goes on. Torch-free; nothing here opens a file.

A stream is a source of samples: the content of a dataset, the length and packing of its samples, and the range of
documents. A mixture is the streams that a stage reads, with their shares. Each stream has an order of its own, epoch by
epoch, and goes on where the run last left it, in whatever stage that was.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lmtrain.data.sample_dataset_interface import Int64s, OffsetOrder, SampleOrder, mix
from lmtrain.data.samples.blend import BlendOrder, Schedule

KEY_DIGITS = 16  # hex digits of a content hash in a stream's key


@dataclass(frozen=True)
class StreamState:
    """The seed of a stream's order, and the number of its samples that the run had read when a mixture began."""

    seed: int
    samples: int = 0


@dataclass(frozen=True)
class HeldOut:
    """The data that stages of a run keep for validation, by the digests of datasets' contents."""

    documents: Mapping[str, int] = field(default_factory=dict)  # content -> its first held-out document
    tokens: Mapping[str, int] = field(default_factory=dict)  # the same for a dataset cut within a document
    validated: frozenset[str] = frozenset()  # contents of datasets that were only validated on

    def joined(self, other: HeldOut) -> HeldOut:
        """Return what both keep; the smaller number wins where both have one of a dataset."""
        return HeldOut(
            _earliest(self.documents, other.documents), _earliest(self.tokens, other.tokens),
            self.validated | other.validated,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return this as JSON data."""
        validated = sorted(self.validated)
        return {"held_out": dict(self.documents), "held_out_tokens": dict(self.tokens), "validated": validated}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HeldOut:
        """Return what `to_dict` described. Raise ValueError, TypeError or KeyError if `data` is damaged."""
        documents, tokens = (
            {str(content): _count(number) for content, number in data[name].items()}
            for name in ("held_out", "held_out_tokens")
        )
        return cls(documents, tokens, frozenset(map(str, data["validated"])))


@dataclass(frozen=True)
class DataHistory:
    """The mixture that a run reads from the position `origin` on, and what it had read before. Positions count samples
    over the whole run.
    """

    origin: int = 0
    streams: tuple[str, ...] = ()  # keys of the mixture's streams; empty: the run has not begun
    shares: tuple[int, ...] = ()
    skipped: int = 0  # positions of the first mixture that another program's run has read (data.first_sample)
    states: Mapping[str, StreamState] = field(default_factory=dict)  # of every stream that the run has read
    held_out: HeldOut = HeldOut()  # by any stage
    held_out_before: HeldOut = HeldOut()  # by the stages before the current mixture
    # earlier mixtures, in order: the position at which each began, and the contents of its sources; of a run that
    # began with an older version, those since then
    past: tuple[tuple[int, tuple[str, ...]], ...] = ()

    def begin(
        self, position: int, streams: Sequence[str], shares: Sequence[int], first_seeds: Sequence[int],
        restarts: Sequence[bool], *, run_seed: int, skipped: int = 0,
    ) -> DataHistory:  # fmt: skip
        """Return the history for a stage that begins at sample `position` of the run and mixes these streams, which are
        keys of datasets' samples, by `shares`. A stream goes on after the samples that the run has read of it, or
        begins at its first sample if it is new or its entry in `restarts` is True. The history is unchanged if streams
        and shares are and none restarts, or if the run resumes within this stage. `first_seeds` are the streams' seeds
        if the run has read nothing yet; a stream added later gets a seed computed from `run_seed` and its key.
        """
        is_same = (tuple(streams), tuple(shares)) == (self.streams, self.shares)
        has_begun = self.origin >= position and bool(self.streams)  # True in the middle of the stage
        if is_same and (has_begun or not any(restarts)):
            return self
        states = dict(self.states_at(position))
        for key, first_seed, restart in zip(streams, first_seeds, restarts, strict=True):
            if key not in states:
                states[key] = StreamState(_later_seed(run_seed, key) if self.streams else first_seed)
            elif restart:
                states[key] = replace(states[key], samples=0)
        past = (*self.past, (self.origin, self._contents)) if self.streams else ()
        return replace(
            self, origin=position, streams=tuple(streams), shares=tuple(shares), skipped=skipped, states=states,
            past=past, held_out_before=self.held_out_before_stage(position),
        )  # fmt: skip

    @property
    def _contents(self) -> tuple[str, ...]:
        """The contents of the sources of the current mixture."""
        return tuple(key.partition(" ")[0] for key in self.streams)

    def contents_at(self, position: int) -> tuple[str, ...] | None:
        """Return the contents of the sources, in their order, that the stage which began at sample `position` of the
        run has read; None if they are not known, because an older version trained it.
        """
        mixtures = [*self.past, (self.origin, self._contents)]
        return next((contents for origin, contents in reversed(mixtures) if origin <= position), None)

    def states_at(self, position: int) -> Mapping[str, StreamState]:
        """Return stream key -> (seed, number of samples read) of every stream that the run has read, when it has read
        `position` samples in total. `position` must be at least `origin`, where the current mixture begins.
        """
        if not self.streams:
            return self.states
        read = self.samples_of_streams(position - self.origin)
        return {**self.states, **{
            key: replace(self.states[key], samples=self.states[key].samples + count)
            for key, count in zip(self.streams, read, strict=True)
        }}  # fmt: skip

    def end_of_trained_documents(self, content: str) -> int:
        """Return the end of the documents of a source that the run has trained on, in any stage; 0 for none."""
        ends = (re.match(rf"{content} .* documents \d+-(\d+)", key) for key in self.states)
        return max((int(match[1]) for match in ends if match), default=0)

    def held_out_before_stage(self, position: int) -> HeldOut:
        """Return what the stages before the one that begins at sample `position` of the run have held out; what that
        stage itself held out when it was trained before does not count.
        """
        return self.held_out_before if self.streams and self.origin >= position else self.held_out

    def samples_of_streams(self, num_samples: int) -> list[int]:
        """Return, in the order of `streams`, how many samples each stream gives to the first `skipped` + `num_samples`
        samples of the current mixture.
        """
        if len(self.streams) == 1:
            return [self.skipped + num_samples]
        return Schedule(self.shares).samples_before(self.skipped + num_samples)

    def to_dict(self) -> dict[str, Any]:
        """Return the history as JSON data, for a checkpoint's state."""
        return {
            "origin": self.origin, "streams": list(self.streams), "shares": list(self.shares), "skipped": self.skipped,
            "states": {key: [str(state.seed), state.samples] for key, state in self.states.items()},
            **self.held_out.to_dict(), "held_out_before": self.held_out_before.to_dict(),
            "past": [[origin, list(contents)] for origin, contents in self.past],
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DataHistory:
        """Return the history that `to_dict` described. Raise ValueError, TypeError or KeyError if `data` is damaged."""
        states = {str(key): StreamState(int(seed), _count(samples)) for key, (seed, samples) in data["states"].items()}
        past = tuple((_count(origin), tuple(map(str, contents))) for origin, contents in data.get("past", ()))
        history = cls(
            _count(data["origin"]), tuple(map(str, data["streams"])), tuple(map(_count, data["shares"])),
            _count(data["skipped"]), states, HeldOut.from_dict(data),
            # because: older versions did not write it
            HeldOut.from_dict(data.get("held_out_before", data)), past,
        )  # fmt: skip
        if len(history.streams) != len(history.shares) or not set(history.streams) <= states.keys() or not all(
            history.shares
        ):
            raise ValueError("streams, shares and states do not belong together")
        return history


NOTHING_READ = DataHistory()


class MixtureOrder:
    """Sample order of a mixture that a stage reads: position of the run -> sample id. `orders` and `sizes` are those of
    its streams; ids number the samples of the first stream, then those of the second, and so on.
    """

    def __init__(self, history: DataHistory, orders: Sequence[SampleOrder], sizes: Sequence[int]) -> None:
        self.history = history
        self._before = [history.states[key].samples for key in history.streams]
        continued = list(map(OffsetOrder, orders, self._before))
        self._order = continued[0] if len(orders) == 1 else BlendOrder(history.shares, sizes, continued)

    def ids(self, first: int, count: int) -> Int64s:
        return self._order.ids(first - self.history.origin + self.history.skipped, count)

    def samples_before(self, position: int) -> list[int]:
        """Return how many samples of each stream the run has read, in all stages, when it stands at `position`."""
        read = self.history.samples_of_streams(position - self.history.origin)
        return [before + count for before, count in zip(self._before, read, strict=True)]


def _later_seed(seed: int, key: str) -> int:
    """Return the seed of a stream that joins a run after its first mixture, from the run's `seed` and the stream's key,
    which has its content.
    """
    return mix(mix(seed) ^ int(hashlib.sha256(key.encode()).hexdigest()[:KEY_DIGITS], 16))


def _earliest(known: Mapping[str, int], found: Mapping[str, int]) -> dict[str, int]:
    """Return both mappings as one, with the smaller number where both have a key."""
    return {**known, **{key: min(number, known.get(key, number)) for key, number in found.items()}}


def _count(value: Any) -> int:
    """Return `value` if it is a whole number of at least 0, else raise ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a whole number from 0")
    return value
