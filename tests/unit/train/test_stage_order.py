"""The samples of a run in stages are those that a twin computes, which was written from docs/explanation/stages.md."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmtrain.config.compose_run_settings import compose
from lmtrain.data.data_settings import BlendPart, BlendSettings
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.tokenizer.train import train_wordpiece
from lmtrain.train.run_config import RunConfig, StageConfig
from lmtrain.train.run_stage_settings import StageSettings
from lmtrain.train.startup_checks.preflight import Inputs, load_stages
from tests.unit.data.writing import add_document
from tests.unit.train.stage_order_twin import Part, Source, Stage, Twin

SEED = 11
HIGHEST_ID = 700  # in a dataset that has ids beyond its tokenizer's
SIZES = ((10, 7), (20, 5), (30, 9), (10, 16))  # documents, tokens in each
Sources = list[tuple[str, Source]]  # the prefix of a dataset, and what is in it


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Four contents; the third has no sidecar, and the first is there twice."""
    folder, tokenizer = tmp_path_factory.mktemp("sources"), train_wordpiece(["a cat sat on a mat"], 40, lowercase=True)
    found = []
    for i, (num_documents, tokens_each) in enumerate([*SIZES, SIZES[0]]):
        chance = np.random.default_rng(i % len(SIZES))
        with DatasetWriter(folder / f"d{i}", np.uint16) as writer:
            for _ in range(num_documents):
                add_document(writer, [chance.integers(0, tokenizer.vocab_size, tokens_each)])
            if i != 2:
                writer.describe(
                    tokenizer=tokenizer.to_bytes(), fingerprint=tokenizer.fingerprint, num_bytes=42, eod_id=None,
                    vocab_size=tokenizer.vocab_size,
                )  # fmt: skip
        opened = IndexedDataset.open(folder / f"d{i}")
        found.append((str(opened.prefix), Source(opened.content_digest[:16], num_documents, tokens_each)))
    (folder / "tokenizer.json").write_bytes(tokenizer.to_bytes())
    with DatasetWriter(folder / "high", np.uint16) as writer:
        add_document(writer, [np.full(90, HIGHEST_ID)])
        writer.describe(
            tokenizer=tokenizer.to_bytes(), fingerprint=tokenizer.fingerprint, num_bytes=42, eod_id=None,
            vocab_size=HIGHEST_ID + 1,
        )  # fmt: skip
    return found


@pytest.fixture(scope="module")
def base(sources: Sources) -> RunConfig:
    tokenizer = Path(sources[0][0]).parent / "tokenizer.json"
    return compose(RunConfig, [
        "model.num_layers=1", "model.width=8", "model.num_heads=2", "model.positions=rotary", "data=blend",
        f"data.datasets=[{{path: {sources[0][0]}, weight: 1}}]", "schedule=constant", "schedule.warmup_steps=0",
        f"train.seed={SEED}", "train.global_batch=2", "train.micro_batch=1", "train.valid_interval_steps=0",
        f"data.tokenizer={tokenizer}", "train.steps=1", "run.dir=x", "model.seq_len=8",
    ])  # fmt: skip


def configured(base: RunConfig, sources: Sources, stages: Sequence[Stage], *, last_path: bool = False) -> RunConfig:
    """The twin's stages as settings. A content that a stage lists twice has another path the second time, or, with
    `last_path`, wherever it can.
    """
    given: dict[str, StageSettings] = {}
    for number, stage in enumerate(stages):
        datasets: list[dict[str, Any]] = []
        for part in stage.parts:
            known = [path for path, source in sources if source == part.source]
            path = known[-1 if last_path or known[0] in [entry["path"] for entry in datasets] else 0]
            datasets.append({"path": path, "weight": part.share, "restart": part.restart})
        train: dict[str, Any] = {"global_batch": stage.batch}
        if stage.rampup is not None:
            train["rampup"] = dict(zip(("start", "increment", "samples"), stage.rampup, strict=True))
        given[f"s{number}"] = StageSettings(
            **dict[str, Any]({stage.unit: stage.length}), model={"seq_len": stage.seq_len}, train=train,
            data=(
                {"kind": "blend", "datasets": datasets} if stage.is_blend
                else {"kind": "dataset", "path": datasets[0]["path"], "restart": datasets[0]["restart"]}
            ) | {"split": [1 - stage.held_out, stage.held_out], "train_on_held_out": stage.train_on_held_out},
        )  # fmt: skip
    return replace(base, stages=given)


def read(inputs: Inputs, first_step: int | None = None) -> list[tuple[int, int]]:
    """The stream and the sample at each position of a stage, or from one of its steps on."""
    stage, data = inputs.config, inputs.data
    assert isinstance(stage, StageConfig)
    steps = (stage.first_step if first_step is None else first_step, stage.end_step)
    start, end = (stage.batch_plan.range_of(step)[0] for step in steps)
    offsets = np.cumsum([0, *(part.dataset.num_samples for part in data.parts)])
    ids = data.order.ids(start, end - start)
    streams = np.searchsorted(offsets, ids, side="right") - 1
    return list(zip(streams.tolist(), (ids - offsets[streams]).tolist(), strict=True))


def checkpoint_of(step: int, inputs: Inputs) -> Any:
    """Return the contents of a checkpoint that was saved at this step of a stage."""
    state = {
        "history": inputs.data.history.to_dict(), "data": inputs.data.sample_identity, "model": inputs.model.to_dict(),
    }  # fmt: skip
    return SimpleNamespace(manifest=SimpleNamespace(step=step, state=state), path=Path("x"))


def check_against_twin(
    base: RunConfig, sources: Sources, stages: Sequence[Stage], *, last_path: bool = False
) -> Twin:  # fmt: skip
    config, twin = configured(base, sources, stages, last_path=last_path), Twin(SEED).run(stages)
    loaded = load_stages(config, None, None)
    assert [stage.end_step for stage in config.stage_configs] == [step for step, _ in twin.ends]
    plan = config.batch_plan
    assert [plan.range_of(step)[1] for step in range(config.total_steps)] == twin.batches
    for inputs, ids, keys in zip(loaded, twin.ids, twin.keys, strict=True):
        assert list(inputs.data.history.streams) == keys
        assert read(inputs) == ids
    for samples, size in ((twin.reads[key], size_of(inputs, key)) for inputs in loaded for key in stream_keys(inputs)):
        for epoch in range(0, len(samples), size):  # without loss or repeat
            assert len(set(samples[epoch : epoch + size])) == len(samples[epoch : epoch + size])
    return twin


def stream_keys(inputs: Inputs) -> tuple[str, ...]:
    return inputs.data.history.streams


def size_of(inputs: Inputs, key: str) -> int:
    return inputs.data.parts[inputs.data.history.streams.index(key)].dataset.num_samples


def check_resumed(base: RunConfig, sources: Sources, stages: Sequence[Stage], steps: Sequence[int]) -> None:
    """Starts from checkpoints of these steps read what the unbroken run reads from there on."""
    config = configured(base, sources, stages)
    loaded = load_stages(config, None, None)
    for step in steps:
        saved_in = next(inputs for inputs in loaded if step <= inputs.config.end_step)  # type: ignore[union-attr]
        resumed = load_stages(config, checkpoint_of(step, saved_in), None)
        later = [inputs for inputs in loaded if inputs.config.end_step > step]  # type: ignore[union-attr]
        if not later:
            continue
        assert [inputs.config for inputs in resumed] == [inputs.config for inputs in later]
        assert read(resumed[0], max(step, later[0].config.first_step)) == read(  # type: ignore[union-attr]
            later[0], max(step, later[0].config.first_step)  # type: ignore[union-attr]
        )
        for ours, theirs in zip(resumed[1:], later[1:], strict=True):
            assert read(ours) == read(theirs)
            assert ours.data.history == theirs.data.history


def a_run(sources: Sources) -> list[Stage]:
    a, b, c, d = (source for _, source in sources[: len(SIZES)])
    return [
        Stage((Part(a, 2), Part(b, 1)), "steps", 9, 8, 4, (2, 2, 24)),
        Stage((Part(a, 2), Part(b, 1)), "samples", 7, 8, 4),  # the ramp-up and the mixture go on
        Stage((Part(c), Part(a, 3)), "tokens", 130, 8, 6, held_out=0.2),
        Stage((Part(c), Part(a, 2), Part(a)), "samples", 50, 8, 2),  # held out: the streams of the stage before go on
        Stage((Part(b, restart=True),), "steps", 3, 8, 2, (1, 1, 2), is_blend=False),
        Stage((Part(a, 2), Part(b, 1)), "steps", 5, 4, 4),  # another length
        Stage((Part(a, 2), Part(b, 1)), "steps", 20, 8, 4, train_on_held_out=True),  # the first mixture again
        Stage((Part(d),), "samples", 1, 8, 4),
    ]


def test_a_run_reads_what_its_page_says(base: RunConfig, sources: Sources) -> None:
    stages = a_run(sources)
    twin = check_against_twin(base, sources, stages)
    assert twin.keys[6] == twin.keys[0]
    assert twin.ids[6][:3] != twin.ids[0][:3]
    check_resumed(base, sources, stages, [twin.ends[0][0], twin.ends[3][0] + 1])


def test_a_source_is_its_content_under_any_path(base: RunConfig, sources: Sources) -> None:
    stages = a_run(sources)[:3]  # none of which lists a content twice
    check_against_twin(base, sources, stages, last_path=True)


@pytest.mark.parametrize("position", [0, 1])
def test_the_vocabulary_is_that_of_all_stages(base: RunConfig, sources: Sources, position: int) -> None:
    """Also for a start that resumes when the stage with the highest ids is behind."""
    stages = [StageSettings(steps=4), StageSettings(steps=4, data={"datasets": [{"path": sources[1][0], "weight": 1}]})]
    high = {"datasets": [{"path": str(Path(sources[0][0]).with_name("high")), "weight": 1}]}
    stages[position] = replace(stages[position], data=high)
    config = replace(base, stages={f"s{number}": stage for number, stage in enumerate(stages)})
    loaded = load_stages(config, None, None)
    assert [inputs.model.shape.vocab_size for inputs in loaded] == [HIGHEST_ID + 1] * 2
    [resumed] = load_stages(config, checkpoint_of(4, loaded[0]), None)
    assert resumed.model.shape.vocab_size == HIGHEST_ID + 1


def test_a_run_without_borders_knows_its_data_when_it_gets_a_sidecar(
    base: RunConfig, sources: Sources, tmp_path: Path
) -> None:
    for suffix in (".bin", ".idx", ".json", ".blocks"):
        shutil.copy(f"{sources[1][0]}{suffix}", tmp_path / f"d{suffix}")
    data = BlendSettings(
        datasets=(BlendPart(path=str(tmp_path / "d"), weight=1.0),), tokenizer=base.data.tokenizer, split=(1.0,)
    )  # fmt: skip
    config = replace(base, data=data, train=replace(base.train, steps=30))
    (tmp_path / "d.json").rename(tmp_path / "later.json")
    [begun] = load_stages(config, None, None)
    (tmp_path / "later.json").rename(tmp_path / "d.json")
    [resumed] = load_stages(config, checkpoint_of(10, begun), None)
    assert resumed.data.history != begun.data.history
    assert resumed.data.order.ids(20, 40).tolist() == begun.data.order.ids(20, 40).tolist()


@st.composite
def stage_lists(draw: st.DrawFn) -> list[Callable[[Sources], Stage]]:
    """A list of stages, each as a function of the sources that are on disk."""

    def stage(number: int) -> Callable[[Sources], Stage]:
        chosen = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
        chosen += [0] if 0 in chosen and draw(st.integers(0, 3)) == 0 else []
        distinct = len(set(chosen)) == len(chosen)
        shares = [draw(st.integers(1, 7)) for _ in chosen]
        shares = [share // gcd(*shares) for share in shares]
        restarts = [number > 0 and distinct and draw(st.integers(0, 5)) == 0 for _ in chosen]
        unit = draw(st.sampled_from(["steps", "tokens", "samples"]))
        length = draw(st.integers(1, 12 if unit == "steps" else 60 if unit == "samples" else 400))
        batch = draw(st.sampled_from([1, 2, 4, 6]))
        starts = [start for start in (1, 2) if (batch - start) % 2 == 0 and start < batch]
        rampup = None
        if starts and draw(st.integers(0, 2)) == 0:
            rampup = (draw(st.sampled_from(starts)), 2, draw(st.integers(1, 40)))
        seq_len = draw(st.sampled_from([4, 8, 8, 8]))
        is_blend = len(chosen) > 1 or draw(st.booleans())
        held_out, flag = draw(st.sampled_from([0.0, 0.0, 0.1, 0.3])), draw(st.integers(0, 5)) == 0
        return lambda sources: Stage(
            tuple(
                Part(sources[d][1], share, restart)
                for d, share, restart in zip(chosen, shares, restarts, strict=True)
            ),
            unit, length, seq_len, batch, rampup, held_out, flag, is_blend,
        )  # fmt: skip

    return [stage(number) for number in range(draw(st.integers(1, 6)))]


@pytest.mark.wide
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(made=stage_lists(), parts=st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_any_run_reads_what_its_page_says(
    base: RunConfig, sources: Sources, made: list[Callable[[Sources], Stage]], parts: list[float]
) -> None:
    stages = [make(sources) for make in made]
    twin = check_against_twin(base, sources, stages)
    steps = [int(part * twin.ends[-1][0]) for part in parts]
    check_resumed(base, sources, stages, [step for step in steps if step])


@pytest.mark.wide
def test_layout_and_batch_do_not_change_what_a_stage_reads(base: RunConfig, sources: Sources) -> None:
    from lmtrain.data.loader import Loader

    a, b, c, _ = (source for _, source in sources[: len(SIZES)])
    found = set()
    for dp, batches in ((1, (4, 8)), (2, (8, 4)), (4, (12, 24))):
        stages = [
            Stage((Part(a), Part(b, 3)), "samples", 48, 8, batches[0]),
            Stage((Part(b), Part(c)), "samples", 72, 8, batches[1]),
        ]
        config = configured(base, sources, stages)
        counts = []
        for inputs in load_stages(config, None, None):
            stage, data = inputs.config, inputs.data
            assert stage is not None
            rows: Counter[bytes] = Counter()
            for rank in range(dp):
                loader = Loader(
                    data.train, data.order, stage.batch_plan, 1, rank, dp, prefetch_steps=0,
                    first_step=stage.first_step,
                )  # fmt: skip
                for step in loader.steps(stage.first_step, stage.end_step):
                    rows.update(row.numpy().tobytes() for part in step.microbatches for row in part.tokens_BT)
            counts.append(frozenset(rows.items()))
        found.add(tuple(counts))
    assert len(found) == 1
