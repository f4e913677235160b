"""The place where settings are looked at: a small corpus, a folder of its own for each look, and what was seen, kept.

Called by the observers. Settings are the pairs that a user types, groups among them: {"optim": "muon", "optim.lr": 1}.
What has been seen of some settings is not looked at again, so that proofs share the runs that they have in common.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.compose_run_settings import compose_plain
from lmtrain.train.run_config import RunConfig
from tests.cli.harness import lmtrain
from tests.layouts.workers import Pool

Settings = Mapping[str, Any]
Observer = Callable[["Bench", Settings], Any]

# as seen from a look's own folder: two datasets of running text, two of sentences, each also without its tokenizer
A, B, SENTENCES, OTHER_SENTENCES = "../../a", "../../b", "../../s", "../../t"
FOREIGN_A, FOREIGN_B, FOREIGN_SENTENCES = "../../fa", "../../fb", "../../fs"
BYTES, MORE_BYTES, WORDS, MORE_WORDS = "../../bpe", "../../bpe2", "../../wordpiece", "../../wordpiece2"
TEXT, OTHER_TEXT = "../../one.jsonl", "../../two.jsonl"
NOTES, KEYED = "../../notes.txt", "../../keyed.jsonl"  # paragraphs of lines; lines with two texts each
ALL_NOTES = "../../notes.*"  # the notes, and some of another suffix
DONE = "../../done"  # a run of BASE to its end that keeps an average, made when it is first named
_SYLLABLES = ("ba", "do", "ki", "lu", "me", "no", "ra", "shi", "ten", "vor")

BASE: dict[str, Any] = {
    "model": "gpt_tiny", "data": "dataset", "data.path": A, "data.split": [0.8, 0.2, 0.0], "run.dir": "run",
    "model.num_layers": 1, "model.width": 16, "model.num_heads": 2, "model.seq_len": 16, "model.vocab_multiple": 8,
    "model.init_std": 0.3, "train.steps": 4, "train.global_batch": 4, "train.micro_batch": 2,
    "train.valid_interval_steps": 0, "schedule.warmup_steps": 1, "optim.lr": 0.01, "compute.device": "cpu",
    "compute.threads": 1, "observe.log_interval_steps": 1, "observe.tensorboard": False,
    "checkpoint.interval_steps": 0,
}  # fmt: skip


class Bench:
    """What the observers ask for. `folder` holds the corpus, and below `looks` a folder for each look."""

    def __init__(self, folder: Path, pool: Pool) -> None:
        self.folder, self.pool = folder, pool
        self.kept: dict[tuple[str, str], Any] = {}
        self._looks = 0
        _write_corpus(folder)

    def see(self, observer: Observer, settings: Settings) -> Any:
        key = (observer.__name__, json.dumps(settings, sort_keys=True))
        if key not in self.kept:
            self.kept[key] = self.look(observer, settings)
        return self.kept[key]

    def look(self, observer: Observer, settings: Settings) -> Any:
        """Anew, in an empty folder."""
        if DONE in settings.values() and not (self.folder / "done").exists():
            places = {"data.path": self.folder / "a", "run.dir": self.folder / "done"}
            lmtrain("pretrain", *typed(BASE | places | {"checkpoint.ema.decay": 0.5}))
        with self._empty_folder():
            return observer(self, settings)

    @contextmanager
    def _empty_folder(self) -> Iterator[None]:
        self._looks += 1
        place, before = self.folder / "looks" / str(self._looks), Path.cwd()
        place.mkdir(parents=True)
        os.chdir(place)
        try:
            yield
        finally:
            os.chdir(before)


def typed(settings: Settings) -> list[str]:
    """As one would type them. The key of a list is its first item's."""
    whole = copy.deepcopy(dict(settings))
    for key, value in settings.items():
        above, _, last = key.rpartition(".")
        if isinstance(whole.get(above), list):
            whole[above][0][last] = value
            del whole[key]
    return [f"{_place(key)}={_text(value)}" for key, value in whole.items()]


def _place(key: str) -> str:
    """The key of a stage is that of the last one."""
    return key.replace("stages.", "stages.last.", 1)


def tree_of(settings: Settings) -> dict[str, Any]:
    """As a run composes them: the chosen groups from conf/, the rest over it. The key of a list is its first item's."""
    groups = {key: value for key, value in settings.items() if "." not in key}
    tree = copy.deepcopy(_composed(tuple(typed(groups))))
    for key, value in settings.items():
        if "." in key:
            *path, last = _place(key).split(".")
            node: Any = tree
            for word in path:
                node = node[word]
                node = node[0] if isinstance(node, list) else node
            node[last] = copy.deepcopy(value)
    return tree


def config_of(settings: Settings) -> RunConfig:
    return build_settings(RunConfig, tree_of(settings))


@cache
def _composed(groups: tuple[str, ...]) -> dict[str, Any]:
    return compose_plain(groups)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _write_corpus(folder: Path) -> None:
    """Documents of one to eight sentences of made-up words."""
    for name, seed in (("one", 1), ("two", 2)):
        rng = random.Random(seed)
        words = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(60)]
        lines = []
        for _ in range(80):
            sentences = [" ".join(rng.choices(words, k=rng.randint(2, 7))) for _ in range(rng.randint(1, 8))]
            lines.append(json.dumps({"text": " ".join(f"{sentence.capitalize()}." for sentence in sentences)}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    texts = folder / "one.jsonl", folder / "two.jsonl"
    pages = [[json.loads(line)["text"] for line in text.read_text().splitlines()] for text in texts]
    (folder / "notes.md").write_text("\n".join(pages[1][:40]))
    (folder / "notes.txt").write_text("\n\n".join("\n".join(pages[0][at : at + 4]) for at in range(0, 80, 4)))
    lines = [json.dumps({"text": first, "other": second}) + "\n" for first, second in zip(*pages, strict=True)]
    (folder / "keyed.jsonl").write_text("".join(lines))
    for name, kind, size in (("bpe", "bpe", 300), ("bpe2", "bpe", 310), ("wordpiece", "wordpiece", 90),
                             ("wordpiece2", "wordpiece", 100)):  # fmt: skip
        lmtrain("tokenizer", "train", *texts, "--output", folder / name, "--kind", kind, "--vocab-size", size)
    for name, text, tokenizer in (("a", texts[0], "bpe"), ("b", texts[1], "bpe"), ("s", texts[0], "wordpiece"),
                                  ("t", texts[1], "wordpiece")):  # fmt: skip
        split = ["--split-sentences"] * (tokenizer == "wordpiece")
        made = "--tokenizer", folder / tokenizer, "--output", folder / name, "--workers", 1
        lmtrain("preprocess", text, *made, *split)
    for name in ("a", "b", "s"):
        for suffix in (".bin", ".idx"):
            (folder / f"f{name}{suffix}").write_bytes((folder / f"{name}{suffix}").read_bytes())
