"""The space of layouts that must equal one process, and seeded arrays of cases that cover its pairs and triples.

A case is named by its words, as in `gqa-tp2-dp4-zero3-hybrid-sp-full-bf16-micro4`; any name of the space can be
replayed, whether an array has it or not. Pipelines, whose models are deeper, have arrays of their own.
What is legal is asked of the settings themselves, never repeated here.
Must not import torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations, product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lmtrain.config.settings_base import kinds
from lmtrain.data.data_settings import DataSettings
from lmtrain.errors import LmtrainError
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.parallel.device_and_precision_settings import (
    ComputeSettings,
    Fp16Settings,
    PrecisionSettings,
    RecomputeSettings,
)
from lmtrain.placement.attention_activation_bytes import needs_mask
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.schedules.pipeline_schedule import PipelineSchedule, schedule_named
from lmtrain.train.run_config import RunConfig
from lmtrain.train.train_settings import TrainSettings
from tests.layouts.family_models import DEEP_FAMILY_MODELS, FAMILY_MODELS

# of the arrays, which are stored; a new one is proven by itself in test_pipelines.py
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")
SEED = 20
MOST_PROCESSES = 8
MOST_PROCESSES_OF_WORDS = 4  # because: larger groups are the same for every model, and those above have them
GLOBAL_BATCH = 96  # because: every dp x microbatches of the space divides it, so a model has one reference
ODD_BATCHES = (90, 84)  # because: 2p + 1 microbatches of two dp copies are 10, 14 or 18
SEQ_LEN = 24  # because: every tp of the space divides it, as sequence parallelism asks
VOCAB = 67  # because: a prime; no tp divides it without padding
_TINY: dict[str, Any] = {"num_layers": 2, "vocab_size": VOCAB, "seq_len": SEQ_LEN, "init_std": 0.1}
_SMALL = _TINY | {"head_width": 4}

# Three models have a table of twice as many positions as a sequence needs, which every layout holds and saves whole.
# because: a width of 42 leaves the last of 8 shards of a norm empty, and 80 rows of vocabulary leave the last of 8
# tensor-parallel ranks with padding alone
MODELS: dict[str, GPTSettings | BertSettings] = {
    "tied": GPTSettings(width=42, num_heads=24, ffn_width=96, vocab_multiple=1, **_SMALL),
    "untied": GPTSettings(width=48, num_heads=12, ffn_width=72, vocab_multiple=16, tied=False, **_SMALL),
    "gqa": GPTSettings(
        width=48, num_heads=24, num_kv_heads=12, ffn_width=96, vocab_multiple=1, tied=False, bias="none",
        positions="rotary", norm="rmsnorm", activation="silu", gated=True, **_SMALL,
    ),
    "parallel": GPTSettings(
        width=44, num_heads=8, ffn_width=88, vocab_multiple=1, parallel_block="one_norm", num_positions=48, **_SMALL
    ),
    "window": GPTSettings(width=40, num_heads=24, num_kv_heads=24, ffn_width=120, vocab_multiple=8, window=7, **_SMALL),
    "bert": BertSettings(width=48, num_heads=24, ffn_width=96, vocab_multiple=1, num_positions=48, **_TINY),
    "postnorm": BertSettings(width=44, num_heads=4, ffn_width=80, vocab_multiple=16, norm_order="post", **_TINY),
}  # fmt: skip
# because: 9 layers are at least one for each of 4 x 2 stages, and never the same number for all
_DEEP = _TINY | {"num_layers": 9, "init_std": 0.05}
DEEP_MODELS: dict[str, GPTSettings | BertSettings] = {
    "deep": GPTSettings(width=18, num_heads=2, head_width=4, ffn_width=24, vocab_multiple=1, num_positions=48, **_DEEP),
    "deepuntied": GPTSettings(width=16, num_heads=2, ffn_width=32, vocab_multiple=16, tied=False, **_DEEP),
    "deepgqa": GPTSettings(
        width=16, num_heads=4, num_kv_heads=2, head_width=4, ffn_width=24, vocab_multiple=1, bias="none",
        positions="rotary", norm="rmsnorm", activation="silu", gated=True, **_DEEP,
    ),
    "deepbert": BertSettings(width=16, num_heads=2, ffn_width=32, vocab_multiple=1, **_DEEP),
    "deeppost": BertSettings(width=16, num_heads=4, ffn_width=24, vocab_multiple=16, norm_order="post", **_DEEP),
}  # fmt: skip
# because: of heads as narrow as those above no kernel of a GPU's attention is made, and of rows shorter than a block of
# positions others than of longer ones; 8 more than a block are two, of which one is cut short
_HEADED = _TINY | {"seq_len": 136, "ffn_width": 64, "vocab_multiple": 8}
HEADED_MODELS: dict[str, GPTSettings | BertSettings] = {
    "headed": GPTSettings(width=32, num_heads=2, head_width=64, positions="rotary", **_HEADED),
    "headedwindow": GPTSettings(width=32, num_heads=2, num_kv_heads=1, head_width=64, window=50, **_HEADED),
    "headedbert": BertSettings(width=64, num_heads=1, **_HEADED),
}
# heads of keys and values fewer than the ranks of tp 4 and 8, which then hold copies of them
FEW_KEYS_MODELS: dict[str, GPTSettings | BertSettings] = {
    "fewkeys": GPTSettings(
        width=40, num_heads=8, num_kv_heads=2, ffn_width=64, vocab_multiple=1, positions="rotary", qk_norm="whole",
        **_SMALL,
    ),
    "onekey": GPTSettings(
        width=40, num_heads=8, num_kv_heads=1, ffn_width=64, vocab_multiple=1, positions="rotary", qk_norm="head",
        bias="none", tied=False, **_SMALL,
    ),
}  # fmt: skip
# each word of a decoder with words that keep other tensors beside it
_WORDS: dict[str, Any] = _SMALL | {"width": 40, "num_heads": 12, "ffn_width": 72, "vocab_multiple": 8, "num_layers": 3}
_ROTARY = _WORDS | {"positions": "rotary", "bias": "none", "norm": "rmsnorm"}
WORD_MODELS: dict[str, GPTSettings | BertSettings] = {
    "headnorm": GPTSettings(qk_norm="head", num_kv_heads=6, activation="silu", gated=True, **_ROTARY),
    "headnormlearned": GPTSettings(qk_norm="head", norm_weight="from_zero", bias="qkv", **_WORDS),
    "wholenorm": GPTSettings(qk_norm="whole", norm_order="branch", num_kv_heads=6, tied=False, **_ROTARY),
    "wholenormbare": GPTSettings(qk_norm="whole", norm_weight="none", norm_order="branch", **_ROTARY),
    "sandwich": GPTSettings(
        norm_order="sandwich", norm_weight="from_zero", activation="gelu_tanh", gated=True, logit_cap=3.0,
        embedding_scale=2.0, residual_scale=0.5, z_loss=0.01, **_ROTARY,
    ),
    "twonorms": GPTSettings(parallel_block="two_norms", rotary_share=0.5, positions="rotary", head_bias=True, **_WORDS),
    "twonormsrms": GPTSettings(parallel_block="two_norms", residual_scale=0.5, logit_scale=0.5, **_ROTARY),
    "postorder": GPTSettings(norm_order="post", bias="mlp", norm_bias=True, activation="relu", **_WORDS),
    "squared": GPTSettings(activation="relu2", norm_weight="none", **_WORDS),
    "gatedsquared": GPTSettings(activation="relu2", gated=True, norm_weight="none", **_ROTARY),
    "gatedrelu": GPTSettings(activation="relu", gated=True, attention_scale=0.2, **_WORDS),
    "capped": GPTSettings(attention_cap=2.0, **_WORDS),
    "cappedgqa": GPTSettings(
        attention_cap=2.0, num_kv_heads=6, qk_norm="head", window=7, layer_pattern="wf", **_ROTARY
    ),
    "pattern": GPTSettings(window=7, layer_pattern="wfF", local_rotary_base=100.0, num_kv_heads=6, **_ROTARY),
    "patternsame": GPTSettings(window=7, layer_pattern="wwF", rotary_scaling="linear", rotary_factor=2.0, **_ROTARY),
    "deeptwonorms": GPTSettings(
        width=16, num_heads=2, ffn_width=32, vocab_multiple=16, parallel_block="two_norms", tied=False, **_DEEP
    ),
    "deepscaled": GPTSettings(
        width=16, num_heads=2, ffn_width=32, vocab_multiple=16, parallel_block="one_norm", residual_scale=0.5, **_DEEP
    ),
    "patternlearned": GPTSettings(window=7, layer_pattern="WF", qk_norm="whole", **_WORDS),
}  # fmt: skip
# because: as large as this, the z-loss makes gradients and norms others, whatever their tolerance
Z_MODELS: dict[str, GPTSettings | BertSettings] = {
    "zloss": GPTSettings(width=42, num_heads=24, ffn_width=96, vocab_multiple=1, z_loss=0.1, **_SMALL),
    "deepzloss": GPTSettings(
        width=16, num_heads=2, ffn_width=32, vocab_multiple=16, tied=False, z_loss=0.1, **_DEEP
    ),
}
ALL_MODELS = MODELS | DEEP_MODELS | HEADED_MODELS | FEW_KEYS_MODELS | WORD_MODELS | Z_MODELS
ALL_MODELS |= FAMILY_MODELS | DEEP_FAMILY_MODELS
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "attention": {"kind": "attention"},
    "operators": {"kind": "operators"},
    "full": {"kind": "full"},
    "first": {"kind": "full", "blocks": 1},
}


@dataclass(frozen=True)
class Case:
    model: str
    tp: int = 1
    dp: int = 1
    zero: int = 1
    hybrid: bool = False  # two copies of the shards, as on two nodes
    sequence: bool = False
    recompute: str = "none"
    precision: str = "fp32"
    microbatches: int = 1
    compile: bool = False
    dropout: bool = False  # the arrays are without: masks depend on the layout wherever tp cuts what is dropped
    pp: int = 1
    vp: int = 1
    schedule: str = "1f1b"
    balance: Literal["layers", "cost"] = "layers"
    documents: bool = False  # a document is a world of its own: data.document_mask
    blocks: bool = False  # masks are of blocks, as on a GPU
    summed: bool = False  # products sum their weights' gradients and kernels' twins run, as on a GPU

    @property
    def num_processes(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def global_batch(self) -> int:
        return next(b for b in (GLOBAL_BATCH, *ODD_BATCHES) if b % (self.dp * self.microbatches) == 0)

    @property
    def name(self) -> str:
        words = [self.model]
        words += [f"pp{self.pp}"] if self.pp > 1 else []
        words += [f"vp{self.vp}"] if self.vp > 1 else []
        words += [self.schedule] if self.schedule != "1f1b" else []
        words += [self.balance] if self.balance != "layers" else []
        words += [f"tp{self.tp}", f"dp{self.dp}"]
        words += [f"zero{self.zero}"] if self.dp > 1 else []
        words += ["hybrid"] if self.hybrid else []
        words += ["sp"] if self.sequence else []
        words += [self.recompute] if self.recompute != "none" else []
        words += [self.precision, f"micro{self.microbatches}"]
        words += ["summed"] if self.summed else []
        words += ["dropout"] if self.dropout else []
        words += ["documents"] if self.documents else []
        words += ["blocks"] if self.blocks else []
        return "-".join(words + (["compile"] if self.compile else []))

    @classmethod
    def named(cls, name: str) -> Case:
        model, *words = name.split("-")
        if model not in ALL_MODELS:
            raise ValueError(f"{name} does not begin with a model: {', '.join(ALL_MODELS)}")
        values: dict[str, Any] = {"model": model}
        for word in words:
            values |= _value_of(word, name)
        return cls(**values)

    @property
    def model_settings(self) -> GPTSettings | BertSettings:
        return replace(ALL_MODELS[self.model], dropout=0.1 if self.dropout else 0.0)

    @property
    def parallel(self) -> ParallelSettings:
        copies = self.dp if self.zero == 0 else 2 if self.hybrid else 1
        return ParallelSettings(
            pp=self.pp, vp=self.vp, schedule=self.schedule, balance=self.balance,
            dp_replicate=copies, dp_shard=self.dp // copies, tp=self.tp, zero=self.zero,
            sequence_parallel=self.sequence,
        )  # fmt: skip

    @property
    def precision_settings(self) -> PrecisionSettings:
        # because: a scale that these models do not overflow, so that no step is skipped
        if self.precision == "fp16":
            return Fp16Settings(initial_scale=1024.0)
        settings = kinds(PrecisionSettings)[self.precision]()
        assert isinstance(settings, PrecisionSettings)
        return settings

    @property
    def recompute_settings(self) -> RecomputeSettings:
        values = dict(RECOMPUTE[self.recompute])
        settings = kinds(RecomputeSettings)[values.pop("kind")](**values)
        assert isinstance(settings, RecomputeSettings)
        return settings

    @property
    def train(self) -> TrainSettings:
        return TrainSettings(
            steps=3, global_batch=self.global_batch, micro_batch=self.global_batch // (self.dp * self.microbatches)
        )

    @property
    def compute(self) -> ComputeSettings:
        return ComputeSettings(device="cpu", compile=self.compile)

    def problems(self) -> list[str]:
        """What the settings say against this case."""
        try:
            parts: dict[str, Any] = {
                "model": self.model_settings, "parallel": self.parallel, "precision": self.precision_settings,
                "recompute": self.recompute_settings, "train": self.train, "compute": self.compute,
            }  # fmt: skip
            parts |= {"data": DataSettings(path="toy", document_mask=True)} if self.documents else {}
        except LmtrainError as error:
            return [str(error)]
        return [problem.text() for problem in RunConfig.problems_across(parts)]

    @property
    def reference(self) -> Case:
        """One process, nothing recomputed or compiled. Dropout needs the microbatches whose masks the ranks draw."""
        same_batch = 1 if self.global_batch == GLOBAL_BATCH else self.microbatches
        return Case(
            self.model, precision=self.precision, dropout=self.dropout, documents=self.documents,
            microbatches=self.dp * self.microbatches if self.dropout else same_batch,
        )  # fmt: skip


FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "tp": (1, 2, 3, 4, 8),
    "dp": (1, 2, 3, 4, 8),
    "zero": (0, 1, 2, 3),
    "hybrid": (False, True),
    "sequence": (False, True),
    "recompute": tuple(RECOMPUTE),
    "precision": ("fp32", "bf16", "fp16"),
    "microbatches": (1, 4),
}
WORD_FACTORS = FACTORS | {"model": tuple(FAMILY_MODELS), "tp": (1, 2, 4), "dp": (1, 2), "hybrid": (False,)}
DOCUMENTS = {"documents": (False, True)}  # a factor of every array, besides these


def means_something(case: Case) -> bool:
    """Whether every setting of the case makes a difference: one name for one computation."""
    if case.num_processes > MOST_PROCESSES or (case.tp == 1 and case.sequence):
        return False
    if case.dp == 1 and case.zero != 1:
        return False
    return not case.hybrid or (case.dp in (4, 8) and case.zero > 0)


@cache
def space() -> tuple[Case, ...]:
    """Every legal case without compile and documents."""
    return tuple(_legal(FACTORS, MOST_PROCESSES))


@cache
def word_space() -> tuple[Case, ...]:
    """Return the legal cases of the models of words that need few processes."""
    return tuple(_legal(WORD_FACTORS, MOST_PROCESSES_OF_WORDS))


def _legal(factors: dict[str, tuple[Any, ...]], most_processes: int) -> Iterator[Case]:
    cases = (Case(**dict(zip(factors, values, strict=True))) for values in product(*factors.values()))
    few = (case for case in cases if case.num_processes <= most_processes)
    return (case for case in few if means_something(case) and not case.problems())


def array(strength: int, num_compiled: int, *, seed: int = SEED) -> list[Case]:
    """Legal cases in which every legal combination of `strength` values occurs, greedily few; then compiled ones.

    What documents add comes last, so that the cases without are those of the factors without.
    """
    plain = covering(space(), FACTORS, strength, seed)
    return plain + compiled_cases(num_compiled) + _documents_beside(plain, space(), FACTORS, strength, seed)


def word_array(strength: int, *, seed: int = SEED) -> list[Case]:
    plain = covering(word_space(), WORD_FACTORS, strength, seed)
    return plain + _documents_beside(plain, word_space(), WORD_FACTORS, strength, seed)


def with_documents(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The same cases, and those of them that may have documents with them."""
    twins = (replace(case, documents=True) for case in cases)
    return cases + tuple(twin for twin in twins if not twin.problems())


def _documents_beside(
    plain: list[Case], cases: tuple[Case, ...], factors: dict[str, tuple[Any, ...]], strength: int, seed: int
) -> list[Case]:
    return covering(with_documents(cases), factors | DOCUMENTS, strength, seed, beside=plain)


PIPELINE_FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(DEEP_MODELS),
    "pp": (2, 3, 4),
    "vp": (1, 2),
    "schedule": SCHEDULES,
    "balance": ("layers", "cost"),
    "tp": (1, 2),
    "dp": (1, 2),
    "zero": (0, 1, 2, 3),
    "sequence": (False, True),
    "recompute": tuple(RECOMPUTE),
    "precision": ("fp32", "bf16", "fp16"),
    "microbatches": (2, 3, 4, 5, 6, 7, 8, 9),
}
WORD_PIPELINE_FACTORS = PIPELINE_FACTORS | {"model": tuple(DEEP_FAMILY_MODELS), "pp": (2, 3)}
# because: all legal ones are 60,000, and this many of them have every legal pair and triple of values among them
NUM_DRAWN = 5_000
FLAGS = {
    "hybrid": "hybrid", "sp": "sequence", "summed": "summed", "compile": "compile", "dropout": "dropout",
    "documents": "documents", "blocks": "blocks",
}  # fmt: skip


@cache
def pipeline_space() -> tuple[Case, ...]:
    """A seeded part of the legal cases with a pipeline. A schedule gets p, 2p or 2p + 1 microbatches."""
    return tuple(_drawn_legal(PIPELINE_FACTORS, MOST_PROCESSES))


@cache
def word_pipeline_space() -> tuple[Case, ...]:
    """The same of the models of words, of few processes."""
    return tuple(_drawn_legal(WORD_PIPELINE_FACTORS, MOST_PROCESSES_OF_WORDS))


def _drawn_legal(factors: dict[str, tuple[Any, ...]], most_processes: int) -> Iterator[Case]:
    rng = random.Random(SEED)
    drawn = dict.fromkeys(_drawn(rng, factors) for _ in range(NUM_DRAWN))
    few = (case for case in drawn if case.num_processes <= most_processes)
    return (case for case in few if means_something(case) and not case.problems())


def _drawn(rng: random.Random, factors: dict[str, tuple[Any, ...]] = PIPELINE_FACTORS) -> Case:
    values = {name: rng.choice(values) for name, values in factors.items()}
    case = Case(**values)
    return replace(
        case,
        microbatches=rng.choice((case.pp, 2 * case.pp, 2 * case.pp + 1)),
        vp=rng.choice([vp for vp in factors["vp"] if schedule_named(case.schedule).allows(vp)]),
        zero=case.zero if case.dp > 1 else 1,
        sequence=case.sequence and case.tp > 1,
    )


def by_blocks(cases: Iterable[Case]) -> list[Case]:
    """Those in which a mask is given, of blocks."""
    given = (case for case in cases if needs_mask(case.model_settings, document_mask=case.documents))
    return [replace(case, blocks=True) for case in given]


def summing(cases: Iterable[Case]) -> list[Case]:
    """Those in which it makes a difference that products sum."""
    sums = (case for case in cases if case.precision != "fp32" and case.microbatches > 1)
    return [replace(case, summed=True) for case in sums if case.dp == 1 or case.zero < 2]


def random_cases(count: int, seed: int = SEED) -> list[Case]:
    """Legal ones of both spaces, in turn."""
    rng = random.Random(seed)
    found: dict[Case, None] = {}
    while len(found) < count:
        case = _drawn(rng) if len(found) % 2 else Case(**{name: rng.choice(FACTORS[name]) for name in FACTORS})
        if means_something(case) and not case.problems():
            found[case] = None
    return list(found)


def pipeline_array(strength: int, *, seed: int = SEED) -> list[Case]:
    plain = covering(pipeline_space(), PIPELINE_FACTORS, strength, seed)
    return plain + _documents_beside(plain, pipeline_space(), PIPELINE_FACTORS, strength, seed)


def word_pipeline_array(strength: int, *, seed: int = SEED) -> list[Case]:
    plain = covering(word_pipeline_space(), WORD_PIPELINE_FACTORS, strength, seed)
    return plain + _documents_beside(plain, word_pipeline_space(), WORD_PIPELINE_FACTORS, strength, seed)


def covering(
    cases: tuple[Case, ...], factors: dict[str, tuple[Any, ...]], strength: int, seed: int = SEED,
    beside: Sequence[Case] = (),
) -> list[Case]:  # fmt: skip
    """Cases in which every combination of `strength` values that occurs at all occurs, greedily few.

    Those of the cases that they stand `beside` need not occur again.
    """
    combined = _combinations(cases, factors, strength)
    order = np.array(random.Random(seed).sample(range(len(cases)), len(cases)))
    cost = np.array([case.num_processes for case in cases])
    missing = np.zeros(combined.max() + 1, bool)
    missing[combined] = True
    number = {case: index for index, case in enumerate(cases)}
    missing[combined[[number[case] for case in beside]]] = False
    chosen: list[Case] = []
    while missing.any():
        gain = missing[combined].sum(1)
        best = order[(gain[order] == gain.max()).nonzero()[0]]
        pick = int(best[cost[best].argmin()])
        missing[combined[pick]] = False
        chosen.append(cases[pick])
    return chosen


def _combinations(cases: tuple[Case, ...], factors: dict[str, tuple[Any, ...]], strength: int) -> NDArray[np.int64]:
    """[case, which factors] -> number of the combination of values that these factors have there."""
    codes = np.array([[values.index(getattr(case, f)) for f, values in factors.items()] for case in cases])
    columns, first = [], 0
    for chosen in combinations(range(len(factors)), strength):
        column = np.zeros(len(cases), np.int64)
        for factor in chosen:
            column = column * (1 + codes.max()) + codes[:, factor]
        _, column = np.unique(column, return_inverse=True)
        columns.append(column + first)
        first += int(column.max()) + 1
    return np.stack(columns, axis=1)


def compiled_cases(count: int, num_processes: int = 2) -> list[Case]:
    """Of few processes, as each compiles for itself, and each as unlike the ones before as can be."""
    legal = [replace(case, compile=True) for case in space() if case.num_processes == num_processes]
    # because: torch 2.13's compiler for CPUs declares a variable twice where two half-precision sums are one, as those
    # of the two output biases of a parallel block are
    legal = [c for c in legal if not c.problems() and (c.model != "parallel" or c.precision == "fp32")]
    random.Random(SEED).shuffle(legal)
    seen: set[tuple[str, Any]] = set()
    chosen: list[Case] = []
    for _ in range(count):
        chosen.append(max((c for c in legal if c not in chosen), key=lambda case: len(_values(case) - seen)))
        seen |= _values(chosen[-1])
    return chosen


def _values(case: Case) -> set[tuple[str, Any]]:
    return {(field.name, getattr(case, field.name)) for field in fields(case)}


def _value_of(word: str, name: str) -> dict[str, Any]:
    for prefix in ("pp", "vp", "tp", "dp", "zero", "micro"):
        field = "microbatches" if prefix == "micro" else prefix
        if word.startswith(prefix) and word.removeprefix(prefix).isdecimal():
            return {field: int(word.removeprefix(prefix))}
    if word in RECOMPUTE:
        return {"recompute": word}
    if word in kinds(PipelineSchedule):
        return {"schedule": word}
    for field in ("precision", "balance"):
        if word in PIPELINE_FACTORS[field]:
            return {field: word}
    if word in FLAGS:
        return {FLAGS[word]: True}
    known = ", ".join(_known_words())
    raise ValueError(f"{name} has the word {word}, which is none of {known}")


def _known_words() -> Iterator[str]:
    yield from ("ppN", "vpN", "tpN", "dpN", "zeroN", "microN", *FLAGS)
    yield from (*RECOMPUTE, *FACTORS["precision"], *kinds(PipelineSchedule), "cost")
