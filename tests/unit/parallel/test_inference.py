"""Every target is scored once and alike on any layout, in batches of any size, by a run's model and by one that only
answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmtrain.errors import RanksDifferError
from lmtrain.eval.sample_text_from_prompt import generate_tokens
from lmtrain.eval.sampling_and_precision_settings import Sampling
from lmtrain.eval.score_targets import Scorer
from lmtrain.eval.windows import Request, WindowedRequests
from lmtrain.layout import Layout
from lmtrain.models.layers import flex_attention_block_masks
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings
from lmtrain.parallel.inference_scores_and_logits import Inference
from lmtrain.parallel.mesh import build_mesh
from lmtrain.parallel.pipeline.execute_schedule import SingleStage
from lmtrain.placement.parallel_settings import ParallelSettings
from tests.flex_on_cpu import block_masks_everywhere
from tests.layouts.family_models import FAMILY_MODELS
from tests.layouts.workers import Pool
from tests.marks import slow, wide
from tests.unit.parallel.spread import CPU, PRECISIONS, SETTINGS, build, step_of
from tests.unit.parallel.test_layouts import UNTIED, num_processes

BATCH_SIZES = (1, 7, 64)
STRIDE = 3


def requests() -> list[Request]:
    """Texts of 0 to 3 windows of 8 tokens: every length once, so that batches come in every shape."""
    generator = np.random.default_rng(4)
    texts = [generator.integers(0, 13, length) for length in generator.permutation(26)]
    return list(WindowedRequests(texts, 8, STRIDE))


def scored(parallel: dict[str, Any], model: dict[str, Any], precision: str, training: bool) -> list[Any]:
    """For each size of batches, of each request its sum and its hits."""
    settings = ParallelSettings(**parallel)
    built = build_parallel(
        replace(SETTINGS, **{"num_layers": 3, "init_std": 0.4} | model), PRECISIONS[precision], ComputeSettings(), CPU,
        seed=1, training=training, mesh=build_mesh(settings.layout, CPU, 60.0), parallel=settings,
    )  # fmt: skip
    answers = [list(Scorer(built, batch_size=size).score(requests())) for size in BATCH_SIZES]
    return [[[one.nll.tolist(), one.greedy.tolist()] for one in some] for some in answers]


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 2, "sequence_parallel": False},
    {"pp": 2},
    {"dp_replicate": 2},
    {"dp_shard": 2, "zero": 3},
    {"dp_shard": 3, "zero": 3},
    {"dp_replicate": 2, "tp": 2, "pp": 2, "zero": 1},
    {"dp_shard": 2, "tp": 2, "pp": 2, "zero": 3, "sequence_parallel": False},
    {"pp": 2, "vp": 2, "schedule": "interleaved", "dp_shard": 2, "zero": 1},
]  # fmt: skip


def check(pool: Pool, parallel: dict[str, Any], precision: str, *, training: bool, tolerance: float) -> None:
    model = UNTIED if parallel.get("pp") else {}
    model = model | ({"num_layers": 4} if parallel.get("vp") else {})
    asked = {"model": model, "precision": precision, "training": training}
    ((one, *_),) = pool.run(f"{__name__}:scored", 1, asked | {"parallel": {}})
    count = num_processes(parallel)
    expected = np.concatenate([nll for nll, _ in one])
    for found in pool.run(f"{__name__}:scored", count, asked | {"parallel": parallel}):
        for answers in found:
            assert [len(nll) for nll, _ in answers] == [request.num_scored for request in requests()]
            np.testing.assert_allclose(np.concatenate([nll for nll, _ in answers]), expected, rtol=0, atol=tolerance)
            assert sum(sum(nll) for nll, _ in answers) == pytest.approx(expected.sum(), rel=1e-6 + tolerance / 10)
            if precision == "fp32":
                assert [greedy for _, greedy in answers] == [greedy for _, greedy in one]


@pytest.mark.parametrize(
    ("parallel", "training"),
    [
        ({"tp": 2, "pp": 2}, False),
        *wide(*((layout, False) for layout in LAYOUTS), *((layout, True) for layout in LAYOUTS[-3:])),
        *slow(*((layout, True) for layout in LAYOUTS[:-3])),
    ],
    ids=str,
)
def test_each_target_is_scored_once_and_as_on_one_process(pool: Pool, parallel: dict[str, Any], training: bool) -> None:
    # because: the last bits of fp32 losses of up to 8 differ by processor
    check(pool, parallel, "fp32", training=training, tolerance=5e-6)


def scored_and_generated(parallel: dict[str, Any], name: str, batch_size: int) -> dict[str, Any]:
    """-log p of each request's targets, and the tokens that a greedy generation adds to two."""
    settings = ParallelSettings(**parallel)
    built = build_parallel(
        replace(FAMILY_MODELS[name], num_layers=3, init_std=0.4), PRECISIONS["fp32"], ComputeSettings(), CPU,
        seed=1, training=False, mesh=build_mesh(settings.layout, CPU, 60.0), parallel=settings,
    )  # fmt: skip
    tokens = generate_tokens(built, [3, 5], 12, Sampling(temperature=0), 24, frozenset())
    texts = [*requests(), *(Request(np.arange(length + 1), length, 0) for length in range(1, 24))]
    answers = Scorer(built, batch_size=batch_size).score(texts)
    return {"nll": [one.nll.tolist() for one in answers], "tokens": list(tokens)}


@pytest.mark.wide
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_models_of_any_words_score_and_generate_as_on_one_process(pool: Pool, name: str) -> None:
    (one,) = pool.run(f"{__name__}:scored_and_generated", 1, {"parallel": {}, "name": name, "batch_size": 1})
    layout = {"parallel": {"tp": 2, "pp": 2}, "name": name, "batch_size": 7}
    for found in pool.run(f"{__name__}:scored_and_generated", 4, layout):
        # because: with weights of std 0.4 logits are in the tens
        np.testing.assert_allclose(np.concatenate(found["nll"]), np.concatenate(one["nll"]), rtol=1e-5, atol=2e-5)
        assert found["tokens"] == one["tokens"]


@pytest.mark.wide
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("parallel", [LAYOUTS[0], LAYOUTS[4], LAYOUTS[7]], ids=str)
def test_half_precision_scores_alike(pool: Pool, parallel: dict[str, Any], precision: str) -> None:
    check(pool, parallel, precision, training=False, tolerance={"bf16": 0.1, "fp16": 0.02}[precision])


def disagree(parallel: dict[str, Any]) -> str:
    """The last rank has a text more; gives what each is told."""
    settings = ParallelSettings(**parallel)
    mesh = build_mesh(settings.layout, CPU, 60.0)
    built = build_parallel(
        SETTINGS, PRECISIONS["fp32"], ComputeSettings(), CPU, seed=1, training=False, mesh=mesh, parallel=settings
    )  # fmt: skip
    asked = requests()[: 4 + (mesh.rank == mesh.world.size - 1)]
    try:
        list(Scorer(built, batch_size=2).score(asked))
    except RanksDifferError as error:
        return str(error)
    return "nothing"


@pytest.mark.wide
@pytest.mark.parametrize("parallel", [LAYOUTS[0], LAYOUTS[2]], ids=str)
def test_processes_with_other_texts_are_told_so(pool: Pool, parallel: dict[str, Any]) -> None:
    for rank, told in enumerate(pool.run(f"{__name__}:disagree", 2, {"parallel": parallel})):
        assert told.startswith(f"The texts to score on rank {rank} differ from those on another rank. Give all")


def told_apart() -> list[str]:
    """Return the errors of this rank if all ranks have one checksum, and if each has its own."""
    mesh = build_mesh(Layout(dp_replicate=3), CPU, 60.0)
    inference = Inference({}, SingleStage(), SETTINGS, CPU, mesh, sequence_parallel=False)
    found = []
    for checksum in (7, 7 + mesh.rank):
        try:
            inference.check_same_texts(checksum)
            found.append("nothing")
        except RanksDifferError as error:
            found.append(str(error))
    return found


def test_no_rank_goes_on_where_one_has_other_texts(pool: Pool) -> None:
    for rank, (alike, apart) in enumerate(pool.run(f"{__name__}:told_apart", 3)):
        assert alike == "nothing"
        assert apart.startswith(f"The texts to score on rank {rank} differ from those on another rank. Give all")


@pytest.mark.wide
def test_texts_of_any_length_are_scored_without_masks_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's own steps and validations have them: there a length is compiled for once."""
    lengths: list[int] = []

    def attend_with_block_mask(q: Tensor, *rest: Any) -> Tensor:
        lengths.append(q.shape[2])
        return right(q, *rest)

    right = flex_attention_block_masks.attend_with_block_mask
    monkeypatch.setattr(flex_attention_block_masks, "attend_with_block_mask", attend_with_block_mask)
    with block_masks_everywhere():
        uses_block_masks = build({}, window=3)
        uses_block_masks.forward_backward(step_of(0, Layout(), 1, 0))
        assert lengths == [8, 8]
        found = list(Scorer(uses_block_masks, batch_size=7).score(requests()))
        assert lengths == [8, 8]
        list(uses_block_masks.validation_sums(step_of(0, Layout(), 1, 0).microbatches))
        assert lengths == [8, 8, 8, 8]
    expected = list(Scorer(build({}, window=3), batch_size=7).score(requests()))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.nll, other.nll)


@pytest.mark.wide
def test_what_is_compiled_is_left_where_eager_is_forced() -> None:
    """Why the above is needed in an evaluation while a run trains: flex_attention would not be a kernel there."""
    ran: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def compiled(*args: Any) -> Any:
            ran.append("compiled")
            return graph(*args)

        return compiled

    twice = torch.compile(lambda x: x + x, backend=backend)
    twice(torch.ones(3))
    with torch.compiler.set_stance("force_eager"):
        twice(torch.ones(3))
    assert ran == ["compiled"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_model_that_only_answers_holds_its_weights_once(precision: str) -> None:
    built = build_parallel(SETTINGS, PRECISIONS[precision], ComputeSettings(), CPU, seed=1, training=False)
    held = dict(built.model.named_parameters())
    assert all(built.parameters[name] is parameter for name, parameter in held.items())
    assert {parameter.dtype for parameter in held.values()} == {
        torch.bfloat16 if precision == "bf16" else torch.float16
    }
