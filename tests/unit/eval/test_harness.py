"""lm-evaluation-harness 0.4.13 itself: `--model lmtrain` says of a checkpoint what its `hf` says of the export.

Three models of different size and tokenizer, GPT-2's vocabulary among them; real pages and lines, the harness's own
tasks. It runs where `pip install lmtrain[harness]` was typed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmtrain.errors import UsageError
from lmtrain.eval.articles import pages
from lmtrain.eval.load import load_for_eval
from lmtrain.eval.runner import run
from lmtrain.eval.scoring import Scorer
from lmtrain.eval.task import find_task
from lmtrain.exchange.huggingface.exporter import export_hf
from lmtrain.exchange.imported import save_foreign
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.tokenizer.base import Tokenizer
from lmtrain.tokenizer.train import train_bpe
from tests.unit.eval.harness_run import Answers, run_harness
from tests.unit.exchange.models import gpt2, llama, random_weights

pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")

MOST_NATS = 2e-5  # per 1,000 tokens, and of one example
NUM_LINES = 500
MODELS = ["gpt2-vocabulary", "llama", "small"]


def rows(path: Path, values: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


@pytest.fixture(scope="module")
def tasks(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The rows of each task: real texts, and questions made of neighbouring sentences."""
    folder = tmp_path_factory.mktemp("tasks")
    articles = pages((shared_data / "wiki.test.raw").read_text(encoding="utf-8"))
    lines = (shared_data / "lambada_test.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_LINES]
    plain = (shared_data / "lambada_test_plain_text.txt").read_text(encoding="utf-8").splitlines()[:NUM_LINES]
    said = [sentence.strip()[:60] for sentence in articles[0].split(" . ") if len(sentence) > 30][:42]
    asked = [(said[i], said[i + 1], said[(7 * i + 3) % len(said)], i % 2) for i in range(len(said) - 2)]
    hella = [
        {"activity_label": "Reading", "ctx_a": a, "ctx_b": "then", "endings": [b, c, "[title] he left"], "label": g}
        for a, b, c, g in asked
    ]
    arc = [
        {"question": a, "choices": {"text": [b, c, "five"], "label": ["A", "B", "C"]}, "answerKey": "AB"[g]}
        for a, b, c, g in asked
    ]
    assert len(articles) >= 60
    return {
        "wikitext": rows(folder / "wikitext.jsonl", [{"page": page} for page in articles]),
        "lambada_openai": rows(folder / "openai.jsonl", [json.loads(line) for line in lines]),
        "lambada_standard": rows(folder / "standard.jsonl", [{"text": line} for line in plain]),
        "hellaswag": rows(folder / "hellaswag.jsonl", hella),
        "piqa": rows(folder / "piqa.jsonl", [{"goal": a, "sol1": b, "sol2": c, "label": g} for a, b, c, g in asked]),
        "arc_easy": rows(folder / "arc.jsonl", arc),
        "writes": rows(folder / "writes.jsonl", [{"text": sentence} for sentence in said[:10]]),
    }


def _build(name: str, shared_data: Path) -> tuple[GPTSettings, Tokenizer]:
    if name == "gpt2-vocabulary":
        return gpt2(vocab_size=50257, seq_len=256), Tokenizer.load(shared_data / "gpt2-vocab.json")
    text = (shared_data / "wt2.valid.txt").read_text(encoding="utf-8")[:200_000]
    if name == "llama":
        return llama(vocab_size=2111, seq_len=128, num_layers=3, width=64), train_bpe([text], 2048)
    return gpt2(vocab_size=600, seq_len=64, width=32, num_layers=4), train_bpe([text], 600)


@pytest.fixture(scope="module")
def checkpoint(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def checkpoint(name: str) -> Path:
        if name not in made:
            settings, tokenizer = _build(name, shared_data)
            weights = {key: value * 0.5 for key, value in random_weights(settings).items()}
            folder = tmp_path_factory.mktemp(name) / "run"
            facts = save_foreign(folder, settings, lambda key: [weights[key]], tokenizer, {"format": "test"}, step=7)
            made[name] = Path(facts["checkpoint"])
        return made[name]

    return checkpoint


@pytest.fixture(scope="module")
def both(
    checkpoint: Callable[[str], Path], tasks: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Answers, Answers]]:
    """What the harness says of a checkpoint, and of its export."""
    made: dict[str, tuple[Answers, Answers]] = {}

    def both(name: str) -> tuple[Answers, Answers]:
        if name not in made:
            folder = tmp_path_factory.mktemp("harness")
            export_hf(checkpoint(name), folder / "hf", check=False)
            exact = {"pretrained": str(folder / "hf"), "dtype": "float32", "softmax_dtype": "float64"}
            models = {"ours": ("lmtrain", {"pretrained": str(checkpoint(name))}), "theirs": ("hf", exact)}
            found = run_harness(folder, models, tasks)
            made[name] = found["ours"], found["theirs"]
        return made[name]

    return both


def nats(responses: list[list[Any]]) -> list[list[float]]:
    """Of each document its log-likelihoods; a rolling one comes as a bare number."""
    return [[one if isinstance(one, float) else one[0] for one in some] for some in responses]


def same_nats(mine: list[list[float]], other: list[list[float]], num_tokens: list[float]) -> None:
    """Of each example and together, to a share of the tokens: of a thousand at least, as fp32 has no more digits."""
    for one, another, count in zip(mine, other, num_tokens, strict=True):
        assert one == pytest.approx(another, rel=0, abs=MOST_NATS * max(count, 1000) / 1000)
    apart = abs(math.fsum(np.concatenate(mine)) - math.fsum(np.concatenate(other)))
    assert apart <= MOST_NATS * max(math.fsum(num_tokens), 1000) / 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_harness_says_of_a_checkpoint_what_it_says_of_the_export(
    both: Callable[[str], tuple[Answers, Answers]], tasks: dict[str, Path], name: str
) -> None:
    ours, theirs = both(name)
    assert ours.keys() == theirs.keys() == tasks.keys()
    assert ours["writes"] == theirs["writes"]
    assert any(text for (text,) in ours["writes"]["responses"])
    for task in tasks.keys() - {"writes"}:
        left, right = ours[task], theirs[task]
        count = {"wikitext": 3000.0, "lambada_openai": 1.0, "lambada_standard": 1.0}.get(task, 5.0)  # at least
        same_nats(nats(left["responses"]), nats(right["responses"]), [count] * len(left["responses"]))
        accuracies = [key for key in right["results"] if key.startswith("acc")]
        assert {key: left["results"][key] for key in accuracies} == {key: right["results"][key] for key in accuracies}
        assert left["results"] == pytest.approx(right["results"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("protocol", "task", "measures"),
    [
        ("wikitext2/lmeval-2.0", "wikitext", ["word_perplexity", "byte_perplexity", "bits_per_byte"]),
        ("wikitext103/lmeval-2.0", "wikitext", ["word_perplexity", "byte_perplexity", "bits_per_byte"]),
        ("lambada/lmeval-openai-1.0", "lambada_openai", ["acc", "perplexity"]),
        ("lambada/lmeval-standard-1.0", "lambada_standard", ["acc", "perplexity"]),
    ],
)
def test_a_protocol_of_its_name_gives_the_harnesss_numbers(
    both: Callable[[str], tuple[Answers, Answers]],
    checkpoint: Callable[[str], Path],
    tasks: dict[str, Path],
    name: str,
    protocol: str,
    task: str,
    measures: list[str],
) -> None:
    theirs = both(name)[1][task]
    subject = load_for_eval(checkpoint(name), torch.device("cpu"), "fp32").subject
    found = run(find_task(protocol), subject, tasks[task])
    columns = found.columns
    assert len(columns["nll"]) >= (60 if task == "wikitext" else 500)
    same_nats([[-one] for one in columns["nll"]], nats(theirs["responses"]), columns["targets"].tolist())
    said = {"acc": "whole_word_accuracy", "perplexity": "last_word_perplexity"}
    mine = {key: found.result.measures[said.get(key, key)] for key in measures}
    assert mine == pytest.approx({key: theirs["results"][f"{key},none"] for key in measures}, rel=1e-6)
    if "acc" in mine:
        right = [all(flag for _, flag in document) for document in theirs["responses"]]
        assert columns["items_greedy"].astype(bool).tolist() == right


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("protocol", "task"), [("choice/hellaswag", "hellaswag"), ("choice/piqa", "piqa"), ("choice/arc", "arc_easy")]
)
def test_choices_are_the_harnesss(
    both: Callable[[str], tuple[Answers, Answers]],
    checkpoint: Callable[[str], Path],
    tasks: dict[str, Path],
    name: str,
    protocol: str,
    task: str,
) -> None:
    theirs = both(name)[1][task]
    subject = load_for_eval(checkpoint(name), torch.device("cpu"), "fp32").subject
    found = run(find_task(protocol), subject, tasks[task])
    said = {"acc": "accuracy", "acc_norm": "per_character_accuracy"}
    mine = {key: found.result.measures[measure] for key, measure in said.items()}
    assert mine == {key: theirs["results"][f"{key},none"] for key in said}
    answers = [-float(one.nll.sum()) for one in Scorer(subject.model, batch_size=7).score(found.prepared.requests)]
    expected = [[nll] for document in nats(theirs["responses"]) for nll in document]
    same_nats([[nll] for nll in answers], expected, [float(one.num_scored) for one in found.prepared.requests])


@pytest.fixture
def known(checkpoint: Callable[[str], Path]) -> Callable[..., Any]:
    from lmtrain.eval.harness import LmtrainModel

    return lambda **given: LmtrainModel(str(checkpoint("small")), **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"precison": "bf16"}, "--model_args precison=bf16 is not known to lmtrain. Did you mean precision?"),
        ({"batch_size": "auto"}, "--batch_size=auto must be a number"),
        ({"batch_size": "0"}, "--batch_size=0 must be a number"),
        ({"max_batch_size": 64}, "must be a number"),
    ],
)
def test_what_it_cannot_do_is_refused(known: Callable[..., Any], given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        known(**given)
