"""Models whose figures are known without a model: uniform over the true vocabulary, a copy of the text, a unigram."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmtrain.eval.run_task import Outcome, run
from lmtrain.eval.score_targets import Subject
from lmtrain.eval.task import find_task
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from tests.unit.eval.conftest import given_texts
from tests.unit.eval.protocols import LAMBADA_TASKS, WIKI_TASKS, write

SEQ_LEN = 40
STREAMS = ["wikitext103/megatron-o32", "wikitext/hf-stride13", "wikitext2/lmeval-2.0"]


def measured(model: Any, tokenizer: Tokenizer, name: str, source: Path) -> Outcome:
    size = tokenizer.vocab_size
    subject = Subject(model=model, tokenizer=tokenizer, seq_len=SEQ_LEN, vocab_size=size, dtype="fp32")
    return run(find_task(name), subject, given_texts(source) if name == "perplexity" else source)


@pytest.mark.parametrize("name", [*WIKI_TASKS, *LAMBADA_TASKS, "perplexity"])
def test_a_uniform_model_gives_the_true_vocabulary(
    name: str, tmp_path: Path, tokenizer: Tokenizer, build_gpt: Callable[..., Any]
) -> None:
    uniform = build_gpt(tokenizer.vocab_size, SEQ_LEN)  # 300 tokens in 320 columns
    with torch.no_grad():
        for parameter in uniform.model.parameters():
            parameter.zero_()
    source = write(tmp_path, name)
    if name == "perplexity":
        source = tmp_path / "text.jsonl"
        source.write_text('{"text": "the old mill"}\n{"text": "was cold"}\n')
    result = measured(uniform, tokenizer, name, source).result
    assert math.exp(result.nll_sum_nats / result.num_targets) == pytest.approx(tokenizer.vocab_size, rel=1e-12)
    for measure in {"token_perplexity", "target_token_perplexity", "last_token_perplexity"} & set(result.measures):
        assert result.measures[measure] == pytest.approx(tokenizer.vocab_size, rel=1e-12)


@pytest.mark.parametrize("name", [*LAMBADA_TASKS, "perplexity"])
def test_a_copy_model_is_always_right(
    name: str, tmp_path: Path, tokenizer: Tokenizer, build_table: Callable[..., Any]
) -> None:
    copy = build_table(1000 * np.eye(tokenizer.vocab_size))  # whatever stands there follows itself
    lines = [" the the the the", " the the the", " the the mill"]
    source = tmp_path / ("lines.txt" if "standard" in name else "lines.jsonl")
    as_json = [json.dumps({"text": line}) for line in lines]
    source.write_text("".join(line + "\n" for line in (lines if "standard" in name else as_json)))
    outcome = measured(copy, tokenizer, name, source)
    if name == "perplexity":  # of 10 tokens the first of each line, and the odd word, do not follow themselves
        odd = len(tokenizer.encode(" mill"))
        assert outcome.result.num_targets == 9 + odd
        assert outcome.result.measures["token_accuracy"] == (6 / (9 + odd))
        return
    assert outcome.columns["items_greedy"].tolist() == [1, 1, 0]
    assert outcome.columns["nll"][:2].tolist() == [0.0, 0.0]
    assert outcome.result.measures[outcome.result.headline] == pytest.approx(2 / 3)
    source.write_text("".join(source.read_text().splitlines(keepends=True)[:2]))
    assert measured(copy, tokenizer, name, source).result.measures[outcome.result.headline] == 1.0


@pytest.mark.parametrize("name", STREAMS)
def test_a_unigram_of_the_targets_gives_their_entropy(
    name: str, tmp_path: Path, tokenizer: Tokenizer, build_table: Callable[..., Any]
) -> None:
    source, size = write(tmp_path, name), tokenizer.vocab_size
    flat = measured(build_table(np.zeros((size, size))), tokenizer, name, source)
    counts: Counter[int] = Counter()
    for request in flat.prepared.requests:
        counts.update(request.tokens[-request.num_scored :].tolist())
    total = counts.total()
    assert total == flat.result.num_targets
    log_p = np.full(size, -50.0)
    log_p[list(counts)] = np.log(np.array(list(counts.values())) / total)
    entropy = -sum(count / total * math.log(count / total) for count in counts.values())
    unigram = measured(build_table(np.tile(log_p, (size, 1))), tokenizer, name, source).result
    assert unigram.nll_sum_nats / total == pytest.approx(entropy, rel=1e-12)
