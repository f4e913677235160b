"""lm-evaluation-harness 0.4.13 itself: `lmtrain eval` and `--model lmtrain` say of a checkpoint what its `hf` says of
the export.

Three models of different size and tokenizer, GPT-2's vocabulary among them; real pages and lines, the harness's own
tasks. It runs where `pip install lmtrain[harness]` was typed; tests/benchmarks/harness_agreement.py prints the figures.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lmtrain.errors import UsageError
from tests.unit.eval.harness_cases import MODELS, TWINS, Compared, Found, compare, save

pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")

MOST_NATS = 2e-5  # per 1,000 tokens, and of one example


@pytest.fixture(scope="module")
def found(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    made: dict[str, Found] = {}

    def found(name: str) -> Found:
        if name not in made:
            made[name] = compare(name, shared_data, tmp_path_factory.mktemp(name))
        return made[name]

    return found


def agree(one: Compared, figures: float) -> None:
    """Sums, every example and accuracies; other figures to this share."""
    assert max(one.apart, one.worst) <= MOST_NATS
    assert one.greedy[0] == one.greedy[1]
    assert [ours for ours, _ in one.accuracies] == [theirs for _, theirs in one.accuracies]
    assert all(ours == pytest.approx(theirs, rel=figures) for ours, theirs in one.figures.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_harness_says_of_a_checkpoint_what_it_says_of_the_export(found: Callable[[str], Found], name: str) -> None:
    through = found(name).through
    assert len(through["wikitext"].ours) >= 60
    assert min(len(through[f"lambada_{one}"].ours) for one in ("openai", "standard")) >= 500
    for one in through.values():
        agree(one, 1e-5)
    ours, theirs = found(name).written
    assert ours == theirs
    assert any(text for (text,) in ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("task", [twin.ours for twin in TWINS])
def test_a_task_of_lmtrain_eval_gives_the_harnesss_numbers(found: Callable[[str], Found], name: str, task: str) -> None:
    agree(found(name).own[task], 1e-6)


@pytest.fixture
def known(shared_data: Path, tmp_path: Path) -> Callable[..., Any]:
    from lmtrain.eval.harness import LmtrainModel

    return lambda **given: LmtrainModel(str(save("small", shared_data, tmp_path)), **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"precison": "bf16"}, "--model_args precison=bf16 is not known to lmtrain. Did you mean precision?"),
        ({"batch_size": "auto"}, "--batch_size=auto must be a whole number"),
        ({"batch_size": "0"}, "--batch_size=0 must be a whole number"),
        ({"max_batch_size": 64}, "must be a whole number"),
    ],
)
def test_what_it_cannot_do_is_refused(known: Callable[..., Any], given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        known(**given)
