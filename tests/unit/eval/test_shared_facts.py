"""What ranks compare before they score, so that none waits for a batch that another does not have."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from lmtrain.checkpoint.unopened_model_on_disk import CheckpointWeights, ModelSource
from lmtrain.eval.task import find_task
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.start.evaluation.run_tasks import Job, Options, _model_facts, _shared_facts
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

OPTIONS = Options(
    baseline=None, batch_size=4, stride=None, seq_len=None, limit=None, device="cpu", precision="fp32", output=None,
    samples=None,
)  # fmt: skip
OF_TEXTS = {"stride", "seq_len", "limit"}  # because: they change the requests, whose checksums are compared
OF_RANK_0 = {"baseline", "output", "samples", "origin", "replaces"}  # because: it alone reads and writes these files
LAYOUT = ParallelSettings()
JOBS: list[Job] = [(find_task(name), lambda reporter: Path()) for name in ("masked/tokens", "lambada/megatron-strict")]
ALIKE = _shared_facts([LAYOUT], OPTIONS, JOBS)


@pytest.mark.parametrize("name", [field.name for field in fields(Options)])
def test_every_option_that_no_checksum_and_no_single_rank_has_is_compared(name: str) -> None:
    value: Any = getattr(OPTIONS, name)
    changed: dict[str, Any] = {name: f"{value}x" if type(value) is str else 7}
    other = replace(OPTIONS, **changed)
    assert (_shared_facts([LAYOUT], other, JOBS) != ALIKE) is (name not in OF_TEXTS | OF_RANK_0)


def test_layouts_models_tasks_and_their_order_are_compared() -> None:
    changes: list[dict[str, Any]] = [{key: 7} for key in ("tp", "pp", "dp_shard", "dp_replicate", "timeout_s")]
    others = [replace(LAYOUT, **change) for change in changes]
    facts = [_shared_facts([layout], OPTIONS, JOBS) for layout in others]
    facts += [_shared_facts([LAYOUT] * 2, OPTIONS, JOBS)]
    facts += [_shared_facts([LAYOUT], OPTIONS, jobs) for jobs in (JOBS[:1], JOBS[1:], JOBS[::-1])]
    assert all(each != ALIKE for each in facts)


def test_the_files_of_a_model_and_which_of_its_weights_are_compared(tmp_path: Path, tokenizer: Tokenizer) -> None:
    settings = GPTSettings(num_layers=1, width=8, num_heads=1, seq_len=8)
    source = ModelSource(
        path=tmp_path, settings=settings, facts={}, open=lambda: CheckpointWeights(tmp_path, settings, "model"),
        tokenizer=lambda: tokenizer,
    )  # fmt: skip
    found = []
    for file, text in (("model.safetensors", "a"), ("model.safetensors", "ab"), ("b.json", ""), ("manifest.json", "")):
        (tmp_path / file).write_text(text)
        found.append(_model_facts(source))
    found.append(_model_facts(replace(source, facts={"weights": "ema"})))
    (tmp_path / "manifest.json").write_text(" ")
    found.append(_model_facts(source))
    assert all(one != other for number, one in enumerate(found) for other in found[:number])
