"""What pages take for granted: texts, tokenizers, datasets, runs and checkpoints, all small, made by lmtrain itself.

Called by tests/docs/typist.py with each path that a page names and has not made. Each thing is made once for all pages,
in a folder of its own, when the first page names it; a page works on a copy.
"""

from __future__ import annotations

import bz2
import gzip
import json
import re
import shutil
import zipfile
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path

from tests.cli.harness import lmtrain
from tests.docs.pages import ROOT

# what makes a run of any model a matter of a second
SMALL = {
    "train.steps": "2", "train.global_batch": "4", "train.micro_batch": "2", "train.valid_samples": "4",
    "schedule.warmup_steps": "0", "model.num_layers": "4", "model.width": "32", "model.num_heads": "2",
    "model.vocab_size": "null", "model.seq_len": "128", "compute.device": "cpu", "compute.threads": "1",
    "observe.tensorboard": "false",
}  # fmt: skip
ARTICLE = " \n = {title} = \n \n {text} \n"
DUMP = """<mediawiki><siteinfo><dbname>dewiki</dbname></siteinfo>
<page><title>{title}</title><ns>0</ns><id>1</id><revision><text>{text}</text></revision></page></mediawiki>
"""


def settings(**values: str) -> list[str]:
    return [f"{key}={value}" for key, value in (SMALL | values).items()]


@cache
def sections() -> list[str]:
    """The documentation's own sections, as documents: English prose, some hundred of them."""
    text = "\n\n".join(page.read_text("utf-8") for page in sorted((ROOT / "docs").rglob("*.md")))
    return [section.strip() for section in re.split(r"^#+ ", text, flags=re.MULTILINE) if len(section) > 200]


def rows(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def words(text: str) -> str:
    """A text as WikiText has it: words and nothing that a page's markup would add."""
    return " ".join(re.findall(r"[A-Za-z]+|[.,]", text))


class World:
    """`bring("data/train", folder)` puts a thing and what belongs to it where a page expects it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def bring(self, name: str, page: Path) -> None:
        if name not in MAKERS or (page / name).exists() or (page / f"{name}.idx").exists():
            return
        for path in self._files(name):
            target = page / path.relative_to(self.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target)
            else:
                shutil.copyfile(path, target)

    def path(self, name: str) -> Path:
        """Where the thing lies that all copies are made from."""
        self._files(name)
        return self.folder / name

    def _files(self, name: str) -> list[Path]:
        found = self._there(name)
        if not found:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            MAKERS[name](self, self.folder / name)
            found = self._there(name)
        return found

    def _there(self, name: str) -> list[Path]:
        """The file or folder of this name; of a dataset, which is a prefix, all of its files."""
        path = self.folder / name
        return [path] if path.exists() else sorted(path.parent.glob(f"{path.name}.*"))


def _texts(world: World, path: Path) -> None:
    path.mkdir()
    (path / "sections.jsonl").write_text(rows(sections()[1:]))
    (path / "some_file.txt").write_text(sections()[0])


def _text(world: World, path: Path) -> None:
    path.write_text("\n\n".join(sections()[:3]))


def _notes(world: World, path: Path) -> None:
    path.write_text("a text of ten thousand characters. " * 286, encoding="utf-8")


def _compressed(world: World, path: Path) -> None:
    path.mkdir()
    for number, section in enumerate(sections()[:40]):
        (path / f"{number}.txt.gz").write_bytes(gzip.compress(section.encode()))


def _other_key(world: World, path: Path) -> None:
    path.write_text("".join(json.dumps({"content": text, "id": 1}) + "\n" for text in sections()[:40]))


def _rows(world: World, path: Path) -> None:
    path.write_text(rows(sections()[:100]))


def _passages(world: World, path: Path) -> None:
    path.write_text(rows([" ".join(words(section).split()[:12]) for section in sections()[:5]]))


def _archive(world: World, path: Path) -> None:
    path.write_bytes(gzip.compress(rows(sections()).encode()))


def _articles(world: World, path: Path) -> None:
    path.write_text("".join(ARTICLE.format(title=f"Part {n}", text=words(s)) for n, s in enumerate(sections()[:3])))


def _zipped_articles(world: World, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for split in ("train", "valid", "test"):
            archive.write(world.path("wiki.test.raw"), f"wikitext-103-raw/wiki.{split}.raw")


def _wikipedia(world: World, path: Path) -> None:
    path.write_bytes(bz2.compress(DUMP.format(title="Text", text=words(" ".join(sections()[:9]))).encode()))


def _tokenizer(world: World, path: Path) -> None:
    lmtrain("tokenizer", "train", world.path("corpus"), "--output", path, "--vocab-size", 400)


def _gpt2(world: World, path: Path) -> None:
    """The same vocabulary in the two files that GPT-2's came in."""
    model = json.loads((world.path("tokenizer") / "tokenizer.json").read_text("utf-8"))["model"]
    path.mkdir()
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")


def _dataset(world: World, path: Path) -> None:
    """The sections in an order of its own: stages tell sources by content."""
    texts = path.with_name(f"{path.name}_texts.jsonl")
    texts.write_text(rows(sorted(sections(), key=lambda section: sha256((path.name + section).encode()).digest())))
    lmtrain("preprocess", texts, "--tokenizer", world.path("gpt2"), "--output", path)


def _run(world: World, path: Path) -> None:
    chosen = ["model=gpt2_small", f"data.path={world.path('data/train')}", f"run.dir={path}", "observe.trace=all"]
    lmtrain("pretrain", *chosen, *settings())


def _hugging_face(world: World, path: Path) -> None:
    lmtrain("export", world.path("runs/a"), "--to", "hf", "--output", path)


def _qwen(world: World, path: Path) -> None:
    chosen = ["model=qwen3_0.6b", f"data.path={world.path('data/train')}", f"run.dir={path}.run"]
    chosen += ["model.num_kv_heads=1", "model.head_width=16", "model.ffn_width=64"]
    lmtrain("pretrain", *chosen, *settings())
    lmtrain("export", f"{path}.run", "--to", "hf", "--output", path)


def _megatron(world: World, path: Path) -> None:
    chosen = ["model=megatron_355m", f"data.path={world.path('data/train')}", f"run.dir={path}.run"]
    lmtrain("pretrain", *chosen, *settings())
    lmtrain("export", f"{path}.run", "--to", "megatron", "--output", path)


MAKERS: dict[str, Callable[[World, Path], None]] = {
    **dict.fromkeys(("my_text", "corpus", "crawl", "data/raw"), _texts),
    **dict.fromkeys(("a.txt", "any_text.txt", "text.txt"), _text),
    **dict.fromkeys(("b.jsonl", "runs/demo/corpus/train.jsonl"), _rows),
    **dict.fromkeys(("wiki.test.raw", "wiki.test.tokens"), _articles),
    "lambada_test.jsonl": _passages,
    **dict.fromkeys(("notes.txt", "more.txt"), _notes),
    "texts": _compressed,
    "lines.jsonl": _other_key,
    "dump.gz": _archive,
    "wikitext-103-raw-v1.zip": _zipped_articles,
    "dewiki-20260101-pages-articles.xml.bz2": _wikipedia,
    **dict.fromkeys(("tokenizer", "runs/demo/tokenizer"), _tokenizer),
    "gpt2": _gpt2,
    **dict.fromkeys(
        (
            "data/train",
            "data/heldout",
            "data/web",
            "data/books",
            "data/code",
            "data/text",
            "data/mine",
            "runs/demo/data/heldout",
        ),
        _dataset,
    ),
    **dict.fromkeys(("runs/a", "runs/b"), _run),
    **dict.fromkeys(("models/a", "models/gpt2"), _hugging_face),
    "models/qwen3": _qwen,
    **dict.fromkeys(("checkpoints/gpt", "their_checkpoint"), _megatron),
}
