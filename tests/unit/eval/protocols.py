"""What tests of the protocols share: small files with every oddity, a model in float64, and a task beside its twin."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lmtrain.batch import Batch
from lmtrain.eval.run_task import Outcome, run
from lmtrain.eval.score_targets import Subject
from lmtrain.eval.task import find_task
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from tests.unit.eval import protocol_twins as twins
from tests.unit.eval.protocol_twins import Twin

WIKI = (
    " \n = The Old Mill = \n \n The old mill was a well @-@ known house by the river , cold in winter ( 3 ° C ) . \n "
    "Its \" miller 's boy \" sold 1 @,@ 200 sacks [ some say 3 @.@ 5 times more ] : flour ; bran . Who 's there ? \n"
    " \n = = History = = \n \n The lights went out , and nobody in the N old houses ' yards dared to speak ! An odd \" "
    "quote opens . \n = = = Wheel = = = \n \n = 5 x 3 = \n It stood still . \n \n = Second Mill = \n \n"
    ' = = Quoted = = \n " It closes here , and opens ( once \n \n = Third Mill = \n \n ) more , said the mill . \n '
    "<unk> was cold . \n \n"
)
LAMBADA = [
    "the old mill was cold and nobody in the old house dared to speak",
    "the  cold   night was  still",  # single spaces cut elsewhere than blanks do
    'he said " no "',
    "nobody in the old house dared to speak of the mill , the lights went out and the wheel stood still ; flour ?",
    "mill",
    "what was the house by the river called? mill.",
    "tab\tand the\nold newline",
]
WIKI_TASKS = {
    "wikitext103/megatron-o32": "megatron", "wikitext103/megatron-o13": "megatron",
    "wikitext103/megatron-o40": "megatron",
    "wikitext103/lmeval-2.0": "lmeval", "wikitext2/lmeval-2.0": "lmeval",
    "wikitext/hf-stride13": "hf", "wikitext/hf-stride40": "hf",
}  # fmt: skip
LAMBADA_TASKS = {
    "lambada/megatron-strict": "megatron-strict", "lambada/megatron-token": "megatron-token",
    "lambada/lmeval-openai-1.0": "lmeval", "lambada/lmeval-standard-1.0": "lmeval",
}  # fmt: skip


@dataclass
class Pair:
    """A model by which a task and its twin can score the same text."""

    model: Any  # a PlainModel
    tokenizer: Tokenizer
    seq_len: int

    @property
    def subject(self) -> Subject:
        size = self.tokenizer.vocab_size
        return Subject(
            model=self.model, tokenizer=self.tokenizer, seq_len=self.seq_len, vocab_size=size, dtype="float64"
        )

    @torch.no_grad()
    def log_probs(self, fed: list[int]) -> NDArray[np.float64]:
        hidden = self.model.model(Batch(tokens_BT=torch.tensor([fed]), labels_BT=torch.tensor([fed])))
        scores = self.model.model.logits(hidden)[0, :, : self.tokenizer.vocab_size]
        return scores.double().log_softmax(-1).numpy()  # type: ignore[no-any-return]

    def measured(self, name: str, source: Path, batch_size: int = 8) -> Outcome:
        return run(find_task(name), self.subject, source, batch_size=batch_size)

    def twin(self, name: str, source: Path) -> Twin:
        text, encode, eod = source.read_bytes().decode(), self.tokenizer.encode, self.tokenizer.eod_id
        assert eod is not None
        stride = int(found[0]) if (found := re.findall(r"(?:-o|stride)(\d+)$", name)) else 0
        calls: dict[str, Callable[[], Twin]] = {
            "megatron": lambda: twins.megatron_wikitext(text, encode, self.log_probs, self.seq_len, stride, eod),
            "lmeval": lambda: twins.harness_wikitext(text, encode, self.log_probs, self.seq_len, eod),
            "hf": lambda: twins.hf_strided(text, encode, self.log_probs, self.seq_len, stride),
        }
        if name in LAMBADA_TASKS:
            return twins.lambada(text, LAMBADA_TASKS[name], encode, self.log_probs, self.seq_len, eod)
        return calls[WIKI_TASKS[name]]()


def agree(pair: Pair, name: str, source: Path, batch_size: int = 8) -> Outcome:
    """Sums, counts and published figures of a task are its twin's."""
    ours, twin = pair.measured(name, source, batch_size), pair.twin(name, source)
    assert ours.result.num_targets == twin.targets
    assert ours.result.nll_sum_nats == pytest.approx(twin.nll, rel=1e-10)
    for measure, value in twin.figures.items():
        assert ours.result.measures[measure] == pytest.approx(value, rel=1e-9), measure
    if twin.greedy:
        assert ours.columns["items_greedy"].tolist() == twin.greedy
        assert ours.columns["nll"] == pytest.approx(twin.line_nll, rel=1e-9)
    return ours


def write(folder: Path, name: str) -> Path:
    """The small file that a task reads."""
    if name in WIKI_TASKS:
        return _written(folder / "wiki.test", WIKI)
    if "standard" in name:
        return _written(folder / "lambada.txt", "".join(line.replace("\n", " ") + "\n" for line in LAMBADA))
    return _written(folder / "lambada.jsonl", "".join(json.dumps({"text": line}) + "\n" for line in LAMBADA))


def _written(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path
