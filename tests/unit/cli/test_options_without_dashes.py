"""An option of a verb that is typed like a setting is answered with its dashes, and hides nothing else."""

from __future__ import annotations

import pytest

from tests.cli.harness import outcome
from tests.cli.test_foreign_lines import final_words

RENDER = "slurm render data.path=x --gpus-per-node 1"


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("pretrain data.path=x dry_run=true", "pretrain data.path=x --dry-run"),
        ("pretrain data.path=x dry-run", "pretrain data.path=x --dry-run"),
        ("pretrain data.path=x config_dir=y learning_rate=1", "pretrain data.path=x --config-dir y optim.lr=1"),
        ("pretrain data.path=x dry_run=false", "pretrain data.path=x"),
        ("slurm render data.path=x gpus_per_node=1", RENDER),
        ("plan gpus=8 hardware=h100 layout=tp=2", "plan gpus=8 hardware=h100 --layout tp=2"),
        (f"{RENDER} --array 0-1%2 optim.lr=1,2", f"{RENDER} --array --array-tasks 0-1%2 optim.lr=1,2"),
    ],
)
def test_an_option_without_its_dashes(line: str, typed: str) -> None:
    assert final_words(outcome(*line.split())[1]) == typed.split()
