"""What the training benchmarks run: models with their batches, and random data for them.

Called by train_speed.py, one_run.py and the day on a GPU (tests/gpu/day).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lmtrain.config.compose_run_settings import compose
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.tokenizer.train import train_bpe, train_wordpiece
from lmtrain.train.run_config import RunConfig
from tests.unit.data.writing import add_document

TOKENS = 30_000  # ids are below every model's vocabulary
WORDS = ("a few words are enough for a tokenizer that nobody uses",)
VOCAB = 300
TOY = (
    "model.num_layers=2", "model.width=64", "model.num_heads=4", "model.seq_len=64", "model.vocab_multiple=8",
    "compute.device=cpu", "compute.compile=false", "compute.threads=1", "observe.tensorboard=false",
)  # fmt: skip
FEW = 4  # steps of a toy


@dataclass(frozen=True)
class Workload:
    model: str
    micro_batch: int
    global_batch: int
    steps: int
    data: str = "long"  # one of those that `make_data` writes
    changed: tuple[str, ...] = ()  # settings
    is_toy: bool = False

    def toy(self) -> Workload:
        """The same kind of model and data, so small that a CPU does it in a second."""
        changed = [one for one in self.changed if not one.startswith(("model.num_layers", "model.seq_len"))]
        changed = ["model.window=16" if one.startswith("model.window") else one for one in changed]
        return replace(
            self, micro_batch=2, global_batch=4, steps=FEW, changed=(*TOY, *self._narrow(), *changed), is_toy=True
        )

    def _narrow(self) -> tuple[str, ...]:
        return ("model.num_kv_heads=2", "model.ffn_width=128") if self.model.startswith("llama") else ()

    def settings(self, data: Path, run: Path, more: tuple[str, ...] = ()) -> list[str]:
        """For `lmtrain pretrain`, each key once: `more` in the place of what this workload has."""
        vocab = ["model.vocab_size=32000"] if self.model.startswith("llama") else []
        kind, tokenizer = ("masked", "words") if self.data == "sentences" else ("dataset", "text")
        words = [
            f"model={self.model}", *vocab, f"data={kind}", f"data.path={data / self.data}",
            f"data.tokenizer={data / tokenizer}.json", f"run.dir={run}", f"train.steps={self.steps}",
            f"train.global_batch={self.global_batch}", f"train.micro_batch={self.micro_batch}",
            "train.valid_interval_steps=0", "schedule.warmup_steps=1", "precision=bf16",
            *([] if self.is_toy else ["compute.compile=true"]),
            "checkpoint.interval_steps=null", "observe.log_interval_steps=1", *self.changed, *more,
        ]  # fmt: skip
        return [*{word.partition("=")[0]: word for word in words}.values()]

    def config(self, data: Path, run: Path, more: tuple[str, ...] = ()) -> RunConfig:
        return compose(RunConfig, self.settings(data, run, more))


LLAMA_8K = Workload("llama_1b", 2, 16, 8, changed=("model.seq_len=8192",))
WORKLOADS = {
    "high_flyer_16": Workload("high_flyer_3_8b", 16, 32, 7),
    "high_flyer_8": Workload("high_flyer_3_8b", 8, 32, 7),
    # what fits into 80 GB, and starts soon: the same blocks
    "high_flyer_8_layers": Workload("high_flyer_3_8b", 16, 64, 8, changed=("model.num_layers=8",)),
    "gpt2_small": Workload("gpt2_small", 32, 512, 8),
    "gpt2_small_64": Workload("gpt2_small", 64, 512, 8),
    "gpt_tiny": Workload("gpt_tiny", 4, 8, 5, changed=("model.vocab_size=50257",)),  # to see that it runs
    "gpt2_xl": Workload("gpt2_xl", 8, 64, 8),
    "bert_large": Workload("bert_large", 32, 256, 8, data="sentences"),
    "llama_2k": Workload("llama_1b", 8, 64, 8),
    "llama_8k": LLAMA_8K,
    "llama_8k_window": replace(LLAMA_8K, changed=(*LLAMA_8K.changed, "model.window=1024")),
    "llama_2k_short_texts": Workload("llama_1b", 8, 64, 8, data="short"),
    "llama_2k_documents": Workload("llama_1b", 8, 64, 8, data="short", changed=("data.document_mask=true",)),
}


def make_data(folder: Path) -> None:
    """Random tokens: `long`, a few endless documents; `short`, of some 500 tokens; `sentences`, BERT's."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    text, words = train_bpe(WORDS, VOCAB), train_wordpiece(WORDS, VOCAB, lowercase=True)
    with DatasetWriter(folder / "long", np.dtype(np.uint16)) as writer:
        for _ in range(64):
            add_document(writer, [rng.integers(0, TOKENS, 32768).astype(np.uint16)])
    with DatasetWriter(folder / "short", np.dtype(np.uint16)) as writer:
        for size in rng.integers(50, 950, 4096):
            add_document(writer, [rng.integers(0, TOKENS, size).astype(np.uint16)])
    with DatasetWriter(folder / "sentences", np.dtype(np.uint16)) as writer:
        for _ in range(1024):
            sizes = rng.integers(8, 40, rng.integers(10, 50))
            add_document(writer, [rng.integers(5, words.vocab_size, size).astype(np.uint16) for size in sizes])
    text.save(folder / "text.json")
    words.save(folder / "words.json")
