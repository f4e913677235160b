"""What the day runs: parts of under eight minutes, each made of items, each a command. Most telling first.

Called by __main__.py; tests are chosen in suites.py. Knows no torch, and nothing of how long anything took: `expect_s`
are estimates for one H200, made from the figures of a bare-torch bench before any of this had run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.switches import present
from tests.gpu.day.suites import FEW, FEW_OF_RANKS, GRADIENTS, MORE_GRADIENTS, MORE_MASKS, MORE_OF_RANKS, Item

ROOT = Path(__file__).resolve().parents[3]
ONE_RUN = ("-m", "tests.benchmarks.one_run")
ROUNDS = 3
FITS_3_8B = 100  # GiB of a device: the whole High-Flyer model takes about 115 of an H200's 140 at a microbatch of 16
PART_S = 470  # the most that a part may take in one call


@dataclass(frozen=True)
class Part:
    name: str
    why: str
    items: tuple[Item, ...]

    @property
    def expect_s(self) -> int:
        return sum(item.expect_s for item in self.items)


@dataclass(frozen=True)
class Where:
    """What the items depend on."""

    data: Path
    runs: Path
    memory_GiB: float = 0.0
    toy: bool = False
    nanogpt: str | None = None
    titan: str | None = None

    def one(self, name: str, contender: str, work: str, expect_s: int, *more: str) -> Item:
        path = {"nanogpt": self.nanogpt, "titan": self.titan}.get(contender)
        words = [*ONE_RUN, contender, work, *(["--path", path] if path else []), *(["--toy"] if self.toy else [])]
        words += ["--data", str(self.data), "--run", str(self.runs / name), *more]
        return Item(name, tuple(words), expect_s)

    @property
    def largest(self) -> tuple[str, ...]:
        if self.toy or self.memory_GiB < FITS_3_8B:
            return ("high_flyer_8_layers",)
        return "high_flyer_16", "high_flyer_8"


def parts(where: Where) -> list[Part]:
    first, *rest = where.largest
    later = (*rest, "gpt2_xl", "bert_large", "llama_2k", "llama_8k")
    rounds = 1 if where.toy else ROUNDS
    found = [
        Part("start", "what this machine is, NCCL's environment, the data", tuple(_start(where))),
        Part("tests", "a few of each kind: kernels, gradients against the CPU's, masks, resumed runs", FEW),
        Part("profile", "one step by kernel class", (_profile(where, first),)),
        Part("switches", "what each change is worth, on 8 layers of High-Flyer's", tuple(_switches(where))),
        Part("speed", f"{first} beside bare torch", tuple(_rounds(where, (first,), 0, rounds))),
        Part("small", "GPT-2 124M beside bare torch", tuple(_rounds(where, ("gpt2_small",), 0, rounds))),
        Part("masks", "documents and windows, and memory under recompute", (*_masks(where), *_memory(where))),
        Part("ranks", "NCCL with several ranks on one GPU", (*_recipes(where), *FEW_OF_RANKS)),
        Part("models", "the other models beside bare torch", tuple(_rounds(where, later, 0, 1))),
    ]
    if where.toy:  # because: these tests ask for a GPU, and another round would show nothing new on a CPU
        return found
    return [
        *found,
        Part("more_ranks", "NCCL with four ranks, for 200 steps, compiled", MORE_OF_RANKS),
        Part("gradients", "the rest of eager ones and of those in bf16, of checkpoints and shards", GRADIENTS),
        Part("more_gradients", "those in fp32 and fp16", MORE_GRADIENTS),
        Part("more_masks", "attention by blocks in every precision and width", MORE_MASKS),
        Part("models_again", "their second round", tuple(_rounds(where, later, 1, 2))),
        Part("models_at_last", "their third", tuple(_rounds(where, later, 2, 3))),
    ]


def _start(where: Where) -> Iterator[Item]:
    yield Item("machine", ("-m", "tests.gpu.day.machine"), 20, env={"NCCL_DEBUG": "INFO"})
    yield Item("data", ("-m", "tests.gpu.day.make_data", str(where.data)), 15)


def _rounds(where: Where, works: Sequence[str], begin: int, end: int) -> Iterator[Item]:
    """Contenders take turns within a round."""
    for number in range(begin, end):
        for work in works:
            for contender in _contenders(where, work):
                yield where.one(f"{work}-{contender}-{number + 1}", contender, work, 35 if "high" in work else 20)


def _contenders(where: Where, work: str) -> list[str]:
    found = ["lmtrain", "bare"]
    found += ["nanogpt"] if where.nanogpt and work.startswith(("gpt2", "high")) else []
    return found + (["titan"] if where.titan and work.startswith("llama") else [])


def _profile(where: Where, work: str) -> Item:
    """Of a step of several microbatches: what adds up over them is part of it."""
    return where.one("profile", "lmtrain", work, 45, "observe.profile_steps=[4,4]")


def _switches(where: Where) -> Iterator[Item]:
    work = "high_flyer_8_layers"
    yield where.one("as_it_is", "lmtrain", work, 25)
    for name in present():
        yield where.one(f"without_{name}", "lmtrain", work, 25, "--without", name)
    yield where.one("attention_flash", "lmtrain", work, 25, "--attention", "flash")
    if where.toy:  # because: a CPU has no cuDNN, and a toy is not compiled
        return
    yield where.one("attention_cudnn", "lmtrain", work, 25, "--attention", "cudnn")
    yield where.one("without_compile", "lmtrain", work, 25, "compute.compile=false")
    yield where.one("as_it_is_again", "lmtrain", work, 25)


def _masks(where: Where) -> Iterator[Item]:
    for name in ("llama_2k_short_texts", "llama_2k_documents", "llama_8k", "llama_8k_window"):
        yield where.one(f"masks-{name}", "lmtrain", name, 25)


def _memory(where: Where) -> Iterator[Item]:
    """Each kind of recompute that conf has; none is the first of the switches."""
    kinds = sorted({path.stem for path in (ROOT / "conf/recompute").glob("*.yaml")} - {"none"})
    for kind in kinds[:1] if where.toy else kinds:
        yield where.one(f"recompute_{kind}", "lmtrain", "high_flyer_8_layers", 25, f"recompute={kind}")


def _recipes(where: Where) -> Iterator[Item]:
    for name in ("host_ids",) if where.toy else ("host_ids", "multi_rank"):
        for count in (2,) if where.toy else (2, 4):
            yield Item(f"{name}-{count}", ("-m", "tests.gpu.day.several_ranks", name, str(count)), 20, 60)
