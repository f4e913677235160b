"""What the commands are tried on: texts, tokenizers, datasets, runs and their exports, all small, made once.

Called by look.py, which copies what a command line names. Paths are relative, so that a copy is as good as the first.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import zipfile
from pathlib import Path

from lmtrain.config.compose_run_settings import conf_dir
from tests.cli.harness import lmtrain

PLUGIN = "noticed_plugin"
SMALL = (
    "model=gpt_tiny data.path=data/a model.num_layers=2 model.width=16 model.num_heads=2 model.seq_len=16 "
    "model.vocab_multiple=8 model.init_std=0.3 train.steps=4 train.global_batch=4 train.micro_batch=2 "
    "train.valid_interval_steps=0 schedule.warmup_steps=1 optim.lr=0.01 compute.device=cpu compute.threads=1 "
    "observe.log_interval_steps=1 observe.tensorboard=false checkpoint.interval_steps=2 checkpoint.asynchronous=false"
)
_NAMED_BY = {"runs": "data", "recipe.yaml": "corpus.jsonl"}
RECIPE = "inputs: [corpus.jsonl]\noutput: built\ndedupe: {}\n"
_SYLLABLES = ("ba", "do", "ki", "lu", "me", "no", "ra", "shi", "ten", "vor")
# configs of a user's own: a file of lmtrain's with another text in place of one
_CONF = (
    ("model/gpt_tiny.yaml", "num_layers: 4", "num_layers: 6"),
    ("optim/adamw.yaml", "lr: 3.0e-4", "lr: 4.0e-4"),
    ("schedule/cosine.yaml", "min_ratio: 0.1", "min_ratio: 0.2"),
    ("pretrain.yaml", "seed: 1234", "seed: 1235"),
)


class World:
    NAMES = (
        "bad.jsonl", "bpe310", "conf", "corpus.jsonl", "corpus.unknown", "data", "digits.jsonl", "eval.jsonl", "hf",
        "megatron", "noticed_plugin", "notes.txt", "recipe.yaml", "runs", "tokenizer", "wiki.zip", "with_bos",
        "wordpiece",
    )  # fmt: skip

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def bring(self, line: str, place: Path) -> None:
        """Copy the files and folders that a command line names, with those that they name themselves."""
        line = " ".join([line, *(more for name, more in _NAMED_BY.items() if name in line)])
        for name in self.NAMES:
            if re.search(rf"\b{re.escape(name)}\b", line):
                self.make()
                source, target = self.folder / name, place / name
                shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)

    def make(self) -> None:
        if self.folder.exists():
            return
        before = Path.cwd()
        self.folder.mkdir()
        os.chdir(self.folder)
        try:
            write_texts()
            _make_data()
            _make_runs()
        finally:
            os.chdir(before)


def _documents(seed: int) -> list[str]:
    rng = random.Random(seed)
    words = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(60)]
    return [
        " ".join(" ".join(rng.choices(words, k=rng.randint(4, 9))).capitalize() + "." for _ in range(rng.randint(3, 9)))
        for _ in range(40)
    ]  # fmt: skip


def write_texts() -> None:
    first, second = _documents(1), _documents(2)
    long = sorted(first, key=len)
    words = long[-1].split()
    words[len(words) // 2] = "otherwise"
    more = [
        first[3], f"{long[-2]} And more.", " ".join(words), " ".join(first[:6]), f"Café ÉTÉ {second[0]}",
        f"Это русский текст, и не латинский. {' '.join(second[1].split()[:4])}",
    ]  # an exact copy, two near ones, a long text, one with accents, one in two scripts
    rows = [
        {"text": text, "other": other, "id": number // 2}
        for number, (text, other) in enumerate(zip([*first, *more], [*second, *second[: len(more)]], strict=True))
    ]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    Path("corpus.jsonl").write_text("".join(lines))
    Path("corpus.unknown").write_text("".join(lines))
    numbers = [" ".join(str(n * n * 7919) for n in range(start, start + 30)) for start in range(9)]
    Path("digits.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in numbers))
    Path("bad.jsonl").write_text("".join([*lines[:10], "{no json\n", *lines[10:]]))
    Path("notes.txt").write_text("\n\n\n".join("\n".join(["A heading", *first[at : at + 4]]) for at in range(0, 40, 4)))
    passages = [" ".join(text.split()[:20]) for text in first[3:6]]
    Path("eval.jsonl").write_text("".join(json.dumps({"text": text, "other": text[::-1]}) + "\n" for text in passages))
    Path("recipe.yaml").write_text(RECIPE)
    with zipfile.ZipFile("wiki.zip", "w") as archive:
        for split in ("train", "valid", "test"):
            archive.writestr(f"wikitext-103-raw/wiki.{split}.raw", f" \n = Part = \n \n {first[0]} \n")
    Path(PLUGIN).mkdir()
    Path(PLUGIN, "__init__.py").write_text("from pathlib import Path\n\nPath('plugin_was_imported').touch()\n")
    for name, old, new in _CONF:
        path = Path("conf", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (conf_dir() / name).read_text("utf-8")
        assert old in text
        path.write_text(text.replace(old, new).replace("  - model: gpt_tiny ", "  - model: gpt2_small "))
    os.rename("conf/pretrain.yaml", "conf/other.yaml")


def _make_data() -> None:
    for folder, kind, size in (("tokenizer", "bpe", 300), ("wordpiece", "wordpiece", 100), ("bpe310", "bpe", 310)):
        lmtrain("tokenizer", "train", "corpus.jsonl", "--output", folder, "--kind", kind, "--vocab-size", size)
    shutil.copytree("tokenizer", "with_bos")
    path = Path("with_bos/tokenizer.json")
    path.write_text(path.read_text("utf-8").replace("<|endoftext|>", "<|begin_of_text|>"), "utf-8")
    made = "--tokenizer", "tokenizer", "--workers", 1
    for name, key in (("a", "text"), ("b", "other")):
        lmtrain("preprocess", "corpus.jsonl", *made, "--key", key, "--output", f"data/{name}")
    for suffix in (".bin", ".idx"):
        shutil.copyfile(f"data/a{suffix}", f"data/foreign{suffix}")


def _make_runs() -> None:
    lmtrain("pretrain", *SMALL.split(), "run.dir=runs/a", "observe.trace=all", "checkpoint.ema.decay=0.5",
            "checkpoint.keep_last=9")
    lmtrain("pretrain", "--from-run", "runs/a/checkpoints/step_00000002", "run.dir=runs/b", "optim.lr=0.02")
    lmtrain("pretrain", *SMALL.split(), "run.dir=runs/alone", "train.seed=7")
    for name, width in (("long", 16), ("longer", 32)):
        words = SMALL.replace("steps=4", "steps=12").replace("width=16", f"width={width}")
        lmtrain("pretrain", *words.split(), f"run.dir=runs/{name}")
    stages = "stages.first.steps=2", "stages.last.steps=2", "stages.last.data.path=data/b"
    lmtrain("pretrain", *SMALL.replace("train.steps=4 ", "").split(), "run.dir=runs/staged", *stages)
    lmtrain("export", "runs/a", "--to", "hf", "--output", "hf")
    lmtrain("export", "runs/a", "--to", "megatron", "--output", "megatron")
