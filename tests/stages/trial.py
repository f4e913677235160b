"""A drawn run beside its model: what each start trains on, at which rates, what it refuses, and its weights."""

from __future__ import annotations

import json
import random
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.config.compose_run_settings import compose
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.observe.metrics import read_metrics
from lmtrain.train.record.metrics_writer import samples_hash
from lmtrain.train.run_config import RunConfig
from tests.cli.harness import outcome, start
from tests.stages.draw import draw_settings, shown
from tests.stages.events import EVENTS
from tests.stages.loop import Step, Weights, first_weights
from tests.stages.page import REFUSED_SETTINGS, Planned, Settings, answer, plan, rates
from tests.stages.world import World, make_world, words

TOLERANCE = 1e-3  # of the highest rate, by which weights move in a step, or of 0.01


@dataclass(frozen=True)
class Saved:
    """A checkpoint that a run should have, and what it was made with."""

    step: int
    settings: Settings
    world: World
    weights: Weights
    samples: int
    tokens: int


@dataclass
class Run:
    """A run's folder, and its checkpoints by step."""

    folder: Path
    interval: int
    parent: Saved | None = None  # the checkpoint of another run that it began from
    last: Settings | None = None  # of the last start that trained
    saved: dict[int, Saved] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)  # steps of folders that hold no checkpoint any more

    @property
    def newest(self) -> Saved | None:
        """The checkpoint that the next start resumes from."""
        return self.saved[max(self.saved)] if self.saved else self.parent

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step:08d}"


class Trial:
    """A drawn run. `faults` has what the program and the model do not agree on, `log` what was done."""

    def __init__(self, world: World, folder: Path, seed: str) -> None:
        self.world, self.folder, self.seed, self.rng = world, folder, seed, random.Random(seed)
        self.log: list[str] = []
        self.faults: list[str] = []
        self.num_starts = 0

    def __str__(self) -> str:
        lines = [*(f"  {line}" for line in self.log), *(f"! {text}" for text in self.faults)]
        return "\n".join([f"draw {self.seed}", *lines])

    def run(self) -> Trial:
        settings = draw_settings(self.rng, self.world.sources)
        run = Run(self.folder / "run", self.rng.choice([2, 3, 5]))
        self.log.append(f"first {shown(settings)}")
        self.train(run, settings, kills=True)
        for _ in range(self.rng.choice([3, 4, 5, 6])):
            event = self.rng.choice(EVENTS)
            if not self.faults and run.newest:
                event(self, run)
        if not self.faults and run.newest:
            self.train(run, run.newest.settings, kills=False)
        return self

    def expect(self, name: str, found: object, expected: object) -> None:
        if found != expected:
            self.faults.append(f"{name} is {found}, and should be {expected}")

    def train(
        self, run: Run, settings: Settings, typed: Sequence[str] = (), *, kills: bool, tolerance: float = 1e-9
    ) -> bool:
        """Start the run with these settings, or with the words `typed` that should give them, and return whether it
        went on. Rates may differ by a share of `tolerance`.
        """
        typed = [*(typed or ["pretrain", *words(self.world, settings, run.folder, run.interval)])]
        if run.saved and max(run.damaged, default=0) > max(run.saved) and "checkpoint.fallback=true" not in typed:
            typed.append("checkpoint.fallback=true")  # because: a damaged manifest stays until its step comes again
        before, planned, newest = config_of(run.folder), plan(settings, self.world.sources), run.newest
        first, end = newest.step if newest else 0, stop_of(planned, newest.step if newest else 0)
        code = 0
        if newest:
            code = answer(settings, newest.settings, first, self.world.sources, newest.world.sources)
        if not code and run.parent and not run.saved and planned[-1].end == first:
            code = REFUSED_SETTINGS  # because: no step is left for the new run
        self.num_starts += 1
        if not code and kills and end - first > 1:
            end = self.rng.randrange(first + 1, end)
            fault = {"LMTRAIN_FAULT": f"kill:point=step:step={end}", "LMTRAIN_ALLOW_FAULTS": "1"}
            process = start(*typed, env=fault)
            output = process.communicate(timeout=100)[0]
            found, expected = process.returncode, -9
        else:
            found, output = outcome(*typed)
            expected = code or (75 if end < planned[-1].end else 0)
        self.log.append(f"  from {first} to {end} of {planned[-1].end}: exit code {found}, expected {expected}")
        if found != expected:
            self.faults.append(f"exit code {found}, and not {expected}, of: {' '.join(typed)}\n{output[-3000:]}")
            return False
        if code:
            self.expect("config.json of a refused start", config_of(run.folder), before)
            return False
        run.last = settings if first < end else run.last
        self.compare(run, settings, planned, newest, end, tolerance, is_killed=expected == -9)
        return True

    def compare(
        self, run: Run, settings: Settings, planned: Sequence[Planned], newest: Saved | None, end: int,
        tolerance: float, *, is_killed: bool,
    ) -> None:  # fmt: skip
        """Compare the rows and the newest checkpoint of a start with the model's, and keep its checkpoints."""
        first = newest.step if newest else 0
        rows = {row["step"]: row for row in read_metrics(run.folder / "metrics.jsonl") if row["event"] == "step"}
        weights = newest.weights if newest else first_weights(model_settings(self.world.vocab_size), settings.seed)
        weights = weights.begin(settings.average, first)
        samples, tokens = (newest.samples, newest.tokens) if newest else (0, 0)
        borders, learning_rates = {stage.end for stage in planned}, rates(settings, planned)
        for step in range(first, end):
            stage = next(stage for stage in planned if step < stage.end)
            ids, offsets = stage.ids[step - stage.first], np.cumsum([0, *stage.sizes])
            sources = [self.world.sources[part.path] for part in stage.data.parts]
            trained = Step(
                tuple((sources[d], k) for d, k in ids), stage.seq_len, stage.data.packing, learning_rates[step],
                stage.weight_decay, stage.clip,
            )  # fmt: skip
            samples, tokens, row = samples + len(ids), tokens + trained.num_tokens, rows.get(step + 1)
            if row is None:
                if not is_killed or step + 1 < end:
                    self.faults.append(f"step {step + 1} has no row")
                    return
            else:
                numbers = np.array([offsets[d] + k for d, k in ids])
                at = f"of step {step + 1}"
                self.expect(f"stage {at}", row.get("stage", ""), stage.stage.name)
                self.expect(f"samples {at}", (row["samples"], row["tokens"]), (samples, tokens))
                self.expect(f"the hash of samples {at}", row["samples_hash"], samples_hash(numbers))
                if abs(row["lr"] - learning_rates[step]) > tolerance * learning_rates[step]:
                    self.faults.append(f"the rate {at} is {row['lr']}, and should be {learning_rates[step]}")
            if self.faults:
                return
            weights = weights.train(trained, settings.average, step + 1)
            if (step + 1) % run.interval == 0 or step + 1 in borders or (step + 1 == end and not is_killed):
                run.saved[step + 1] = Saved(step + 1, settings, self.world, weights, samples, tokens)
        folders = {int(path.name[5:]) for path in (run.folder / "checkpoints").glob("step_????????")}
        self.expect("the checkpoints", folders - (run.damaged - {*run.saved}), {*run.saved})
        if run.saved and not self.faults:
            self.compare_weights(run.checkpoint(max(run.saved)), run.saved[max(run.saved)])

    def compare_weights(self, path: Path, saved: Saved) -> None:
        reader, expected = CheckpointReader(path), saved.weights
        rates_typed = (saved.settings.lr, *(stage.lr or 0.0 for stage in saved.settings.stages))
        self.expect("the average", "ema" in reader.state, bool(expected.average))
        self.expect("updates", reader.state["optimizer"]["num_updates"], expected.updates)
        for prefix, tensors in (("model.", expected.weights), ("ema.", expected.average)):
            for name, tensor in tensors.items():
                difference = float((reader.read(f"{prefix}{name}").double() - tensor).abs().max())
                if difference > TOLERANCE * max(0.01, *rates_typed):
                    self.faults.append(f"{prefix}{name} in {path.name} is off by {difference:.2g}")
                    return


def draw_runs(seed: str, numbers: list[int]) -> list[Trial]:
    """Draw runs in this process, each in a folder of its own."""
    trials = []
    for number in numbers:
        with tempfile.TemporaryDirectory() as name:
            (data := Path(name) / "data").mkdir()
            trials.append(trial := Trial(make_world(data), Path(name), f"{seed}/{number}"))
            try:
                trial.run()
            except Exception:
                trial.faults.append(traceback.format_exc())
    return trials


@cache
def model_settings(vocab_size: int) -> GPTSettings:
    base = ["model.positions=rotary", "model.num_layers=1", "model.width=8", "model.num_heads=2",
            "model.vocab_multiple=8", "data.path=x", "run.dir=x"]  # fmt: skip
    model = compose(RunConfig, base).model.with_vocab(vocab_size)
    assert isinstance(model, GPTSettings)
    return model


def stop_of(planned: Sequence[Planned], first: int) -> int:
    """Return the step at which a start from step `first` ends by itself."""
    return next(
        (stage.end for stage in planned if stage.stage.stop_after and stage.end > first), planned[-1].end
    )  # fmt: skip


def config_of(folder: Path) -> object:
    file = folder / "config.json"
    return json.loads(file.read_text()) if file.exists() else None
