"""What each process of an evaluation holds and takes: its share of the model, and little besides."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmtrain.checkpoint.save.background_writer import CheckpointWriter
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from lmtrain.runtime.processes.local_rank_launcher import launch
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.runtime.processes.start_rank_processes import Program
from lmtrain.tokenizer.train import train_bpe

TEXT = "A process holds its share of the model, and a text is scored by all of them. " * 4
SETTINGS = GPTSettings(num_layers=6, width=1024, num_heads=8, vocab_size=300, seq_len=64, tied=False, init_std=0.02)
MODEL_BYTES = 4 * sum(map(math.prod, SETTINGS.weights().values()))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    blocks = 4 * sum(math.prod(shape) for name, shape in SETTINGS.weights().items() if name.startswith("blocks."))
    assert MODEL_BYTES >= 300e6
    assert blocks >= 0.8 * MODEL_BYTES
    folder, tokenizer = tmp_path_factory.mktemp("large"), train_bpe([TEXT], 300)
    model = build_parallel(SETTINGS, Fp32Settings(), ComputeSettings(), torch.device("cpu"), seed=1, training=False)
    with CheckpointWriter(folder, keep_last=1, asynchronous=False) as writer:
        state = {"step": 1, "seq_len": SETTINGS.seq_len, "model": SETTINGS.to_dict()}
        writer.save(1, model.pieces(), state, {"tokenizer.json": tokenizer.to_bytes()})
    return folder


def measured(folder: Path, checkpoint: Path, num_processes: int, *words: str) -> list[dict[str, float]]:
    folder.mkdir()
    arguments = [str(checkpoint), TEXT, str(folder), *words]
    if num_processes == 1:
        subprocess.run([sys.executable, "-m", "tests.cli.measured_eval", *arguments], check=True)
    else:
        program = Program(arguments, module="tests.cli.measured_eval")
        assert launch(program, ProcessEnv().as_launcher(num_processes)).exit_code == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]


@pytest.mark.slow
def test_two_stages_take_little_more_than_half_each(tmp_path: Path, checkpoint: Path) -> None:
    (one,) = measured(tmp_path / "one", checkpoint, 1)
    assert one["weights"] == pytest.approx(MODEL_BYTES, rel=0.01)  # and no second copy of them
    assert MODEL_BYTES < one["peak"] < 1.5 * MODEL_BYTES
    for rank, found in enumerate(measured(tmp_path / "two", checkpoint, 2, "parallel.pp=2")):
        assert found["weights"] <= 0.6 * one["weights"], rank
        assert found["peak"] <= 0.6 * one["peak"], rank
        assert found["nats"] == pytest.approx(one["nats"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "words"), [(2, ["parallel.tp=2"]), (2, ["parallel.dp_shard=2"]), (4, ["parallel.tp=2", "parallel.pp=2"])]
)
def test_every_way_of_sharing_weights_shares_them(
    tmp_path: Path, checkpoint: Path, count: int, words: list[str]
) -> None:
    for found in measured(tmp_path / "some", checkpoint, count, *words):
        assert found["weights"] <= 1.2 / count * MODEL_BYTES
