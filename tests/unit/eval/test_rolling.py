"""The rolling log-likelihood of an export, by the harness's recipe in transformers, is that of `lmtrain eval`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmtrain.eval.load_model import load_for_eval
from lmtrain.eval.run_task import run
from lmtrain.eval.task import find_task
from lmtrain.exchange.huggingface.import_and_export import export_hf
from lmtrain.models.gpt_settings import GPTSettings
from tests.unit.eval.conftest import given_texts
from tests.unit.exchange.models import TEXT, gpt2, llama, save


@torch.no_grad()
def rolling(folder: Path, text: str, seq_len: int) -> tuple[float, int]:
    """Nats of every token: the first behind the beginning's token, each window's first behind one token of the last."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    nats = 0.0
    for start in range(0, len(ids) - 1, seq_len):
        window = torch.tensor(ids[start : start + seq_len + 1])
        scores = model(window[None, :-1]).logits[0].log_softmax(-1)
        nats -= scores.gather(-1, window[1:, None]).sum().item()
    return nats, len(ids) - 1


@pytest.mark.wide
@pytest.mark.parametrize("settings", [gpt2(), llama()], ids=["gpt2", "llama"])
def test_an_export_scores_a_text_as_its_source_does(settings: GPTSettings, tmp_path: Path) -> None:
    source = save(tmp_path / "run", settings)
    export_hf(source, tmp_path / "hf", check=False)
    text = tmp_path / "text.txt"
    text.write_text(" and ".join(TEXT * 10))
    subject = load_for_eval(source, torch.device("cpu"), "fp32").subject
    ours = run(find_task("perplexity"), subject, given_texts(text), stride=settings.seq_len).result
    nats, num_tokens = rolling(tmp_path / "hf", text.read_text(), settings.seq_len)
    assert ours.num_targets == num_tokens >= 1000
    assert ours.nll_sum_nats == pytest.approx(nats, abs=1e-4 * num_tokens / 1000)
