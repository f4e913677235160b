"""What tests of masked tasks share: a small vocabulary of pieces, a small BERT, texts, and requests of either kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lmtrain.eval.read_texts import TextInput
from lmtrain.eval.run_task import Outcome, run
from lmtrain.eval.score_targets import Subject
from lmtrain.eval.task import find_task
from lmtrain.models.bert_settings import BertSettings
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

SEQ_LEN = 16
WORDS = [
    "the",
    "old",
    "mill",
    "##er",
    "##s",
    "wheel",
    "stood",
    "still",
    "and",
    "nobody",
    "spoke",
    "night",
    "river",
    ".",
]
TEXTS = [
    "the old miller and the old mills stood still . nobody spoke . the wheels and the river stood still . nobodys",
    "night",
    "",
    "the millers spoke . and still the miller spoke and spoke and spoke and spoke and spoke . the river . the wheels .",
]


def tokenizer_of(folder: Path) -> Tokenizer:
    path = folder / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    return Tokenizer.load(path)


def build(vocab_size: int, **changes: Any) -> ParallelModel:
    settings = BertSettings(
        num_layers=2, width=16, num_heads=2, vocab_size=vocab_size, seq_len=SEQ_LEN, init_std=0.5, **changes
    )
    return build_parallel(settings, Fp32Settings(), ComputeSettings(), torch.device("cpu"), seed=1, training=False)


def constant(model: ParallelModel, token: int | None = None) -> None:
    """Every token alike, or always this one."""
    with torch.no_grad():
        for name, parameter in model.parameters.items():
            parameter.zero_()
            if token is not None and name.endswith("decoder.bias"):
                parameter[token] = 1000.0


def texts_of(texts: list[str]) -> TextInput:
    return TextInput("texts", texts, "0" * 64, "nothing")


def measured(
    model: Any, tokenizer: Tokenizer, name: str, source: TextInput | Path, *, batch_size: int = 8, **more: Any
) -> Outcome:
    subject = Subject(
        model=model, tokenizer=tokenizer, seq_len=SEQ_LEN, vocab_size=tokenizer.vocab_size, dtype="fp32",
        causal=False, pairs=True,
    )  # fmt: skip
    return run(find_task(name), subject, source, batch_size=batch_size, **more)
