"""docs/how_to/train_on.sh: a random Qwen 3 and Gemma 3 are imported, trained in four processes and given back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.harness import ROOT

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
def test_a_model_is_trained_on_and_given_back(model_type: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = ["bash", str(ROOT / "docs/how_to/train_on.sh"), model_type, str(tmp_path / "out")]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert "was ended by SIGKILL: it was in backward of step 7" in done.stdout
    assert "run/checkpoints/step_00000004 at step 4" in done.stdout
    assert done.stdout.count("compared with   transformers") == 2  # the import and the export
    assert "ForCausalLM continues: 'def main():" in done.stdout
    scores = [json.loads((tmp_path / "out" / name).read_text()) for name in ("score.json", "score_resharded.json")]
    sums = [score["results"][0]["nll_sum_nats"] for score in scores]
    assert sums[0] == pytest.approx(sums[1], rel=1e-6)
    exported = json.loads((tmp_path / "out/trained/config.json").read_text())
    assert exported["model_type"] == model_type
    assert (exported["max_position_embeddings"], exported["vocab_size"]) == (128, 510)
