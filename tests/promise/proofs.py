"""The table of proofs: every key with values that an observer tells apart, or the settings in which it is refused.

Read by test_promise.py, and by `python -m tests.promise`, which counts them. A new key belongs into the table of its
kind, under the observer that sees most directly what it does. A new kind is found, and its keys with it, as far as
values other than the config's can be thought of: derived.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmtrain.models.model_settings import ModelSettings
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.optim.schedule_settings import ScheduleSettings
from lmtrain.schedules.pipeline_schedule import PipelineSchedule, schedule_named
from tests.promise import observers as see
from tests.promise.bench import (
    ALL_NOTES,
    BASE,
    BYTES,
    DONE,
    FOREIGN_A,
    FOREIGN_B,
    FOREIGN_SENTENCES,
    KEYED,
    MORE_BYTES,
    MORE_WORDS,
    NOTES,
    OTHER_SENTENCES,
    OTHER_TEXT,
    SENTENCES,
    TEXT,
    WORDS,
    A,
    B,
    Observer,
    Settings,
)
from tests.promise.derived import fitting, proven_by_kind
from tests.promise.keys import Key, ours


@dataclass(frozen=True)
class Proof:
    """Each of these values looks different from each other one, with all else as in `on`."""

    key: Key
    values: Sequence[Any]
    observer: Observer
    on: Settings
    instead: Mapping[Any, Settings] = field(default_factory=dict)  # of `on`, for values that need others beside them

    @property
    def name(self) -> str:
        given = {name: value for name, value in self.on.items() if BASE.get(name, "") != value}
        order = ["megatron"] * (given.get("data.order") == "megatron")
        return "-".join([self.key.name, *([self.key.kind] if self.key.kind else []), *order])

    def variants(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        for value in self.values:
            on = self.instead.get(value, self.on) if self.instead else self.on
            yield value, {**on, self.key.name: value}


@dataclass(frozen=True)
class Refusal:
    """Settings in which this key would change nothing, and so is not accepted."""

    key: Key
    on: Settings


def proofs(
    kind: str, observer: Observer, on: Settings, values: Mapping[str, Sequence[Any]],
    instead: Mapping[Any, Settings] | None = None,
) -> list[Proof]:  # fmt: skip
    """A proof for each of these keys of one kind."""
    return [Proof(Key(kind, key), of, observer, on, instead or {}) for key, of in values.items()]


def without(settings: Settings, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


VALID = {"train.valid_interval_steps": 2}
MEGATRON = {"data.order": "megatron"}
LONGER = {"model.seq_len": 32}
BERT = BASE | LONGER | {"model": "bert_tiny", "data": "masked", "data.path": SENTENCES}
BLEND = without(BASE, "data.path") | {
    "data": "blend", "data.datasets": [{"path": A, "weight": 1}, {"path": B, "weight": 1}]
}  # fmt: skip
FOREIGN = [{"path": FOREIGN_A, "weight": 1}, {"path": FOREIGN_B, "weight": 1}]


def blend_of(key: str, share: str, number: float, *paths: str) -> dict[str, Any]:
    return BLEND | VALID | {key: [{"path": path, share: number} for path in paths]}


_MODEL: dict[str, Sequence[Any]] = {
    "model.num_layers": (1, 2), "model.width": (16, 32), "model.num_heads": (2, 4), "model.ffn_width": (None, 24),
    "model.vocab_size": (None, 48), "model.vocab_multiple": (8, 64), "model.seq_len": (16, 8),
    "model.num_positions": (None, 40), "model.norm_eps": (1e-5, 1e-1), "model.dropout": (0.0, 0.5),
    "model.init_std": (0.3, 0.1),
}  # fmt: skip
ROTARY = BASE | {"model.positions": "rotary"}
PATTERN = ROTARY | {"model.num_layers": 2, "model.window": 4}
_SCALES: dict[str, Sequence[Any]] = {
    "factor": (2.0, 4.0), "original_len": (8, 512), "low_factor": (1.0, 0.5), "high_factor": (4.0, 16.0),
    "beta_fast": (32.0, 2.0), "beta_slow": (1.0, 0.1), "rounds": (True, False), "attention_factor": (None, 2.0),
    "long_factors": ([1.0] * 4, [1.0, 2.0, 3.0, 4.0]),
}  # fmt: skip
SCALED = {
    kind: ROTARY | {"model.rotary_scaling": kind, "model.rotary_factor": 2.0} | {
        f"model.rotary_{key}": value for key, value in more.items()
    }
    for kind, more in {
        "linear": dict[str, Any](), "llama3": {"original_len": 512}, "yarn": {"original_len": 512},
        "longrope": {"original_len": 8, "short_factors": [1.0] * 4, "long_factors": [1.0, 2.0, 3.0, 4.0]},
    }.items()
}  # fmt: skip
_FITTING = {word: fitting("model", ModelSettings, word) for word in ours(ModelSettings)} | {"gpt": BASE, "bert": BERT}
MODELS = [
    *proofs("", see.built, BASE, {"model.kind": tuple(_FITTING)}, _FITTING),
    *proofs("gpt", see.built, BASE, _MODEL | {
        "model.num_kv_heads": (None, 1), "model.head_width": (None, 4), "model.positions": ("learned", "rotary"),
        "model.norm": ("layernorm", "rmsnorm"), "model.norm_order": ("pre", "branch", "sandwich", "post"),
        "model.norm_bias": (None, False), "model.qk_norm": ("none", "head", "whole"),
        "model.activation": ("gelu", "gelu_tanh", "silu", "relu", "relu2"), "model.gated": (False, True),
        "model.bias": ("all", "none", "qkv", "mlp"), "model.head_bias": (False, True), "model.tied": (True, False),
        "model.parallel_block": ("no", "one_norm", "two_norms"), "model.window": (None, 4),
        "model.embedding_scale": (1.0, 4.0), "model.attention_scale": (None, 0.1), "model.residual_scale": (1.0, 0.5),
        "model.logit_scale": (1.0, 0.5), "model.attention_cap": (None, 0.5), "model.logit_cap": (None, 0.5),
        "model.z_loss": (0.0, 0.1),
    }),
    *proofs("gpt", see.weights, BASE, {"model.norm_weight": ("ones", "from_zero", "none")}),
    *proofs("gpt", see.built, PATTERN, {"model.layer_pattern": (None, "wf", "Wf", "wF", "fw")}),
    *proofs("gpt", see.built, PATTERN | {"model.layer_pattern": "wf"}, {"model.local_rotary_base": (None, 100.0)}),
    *proofs("gpt", see.built, ROTARY, {"model.rotary_base": (10000.0, 100.0), "model.rotary_share": (1.0, 0.5)}),
    *proofs("gpt", see.built, ROTARY, {"model.rotary_scaling": ("none", *SCALED)}, SCALED | {"none": ROTARY}),
    *(
        proof
        for kind, keys in {
            "linear": ("factor",), "llama3": ("factor", "original_len", "low_factor", "high_factor"),
            "yarn": ("factor", "original_len", "beta_fast", "beta_slow", "rounds", "attention_factor"),
            "longrope": ("factor", "original_len", "long_factors"),
        }.items()
        for proof in proofs("gpt", see.built, SCALED[kind], {f"model.rotary_{key}": _SCALES[key] for key in keys})
    ),
    *proofs("gpt", see.built, without(SCALED["longrope"], "model.rotary_factor"),
            {"model.rotary_attention_factor": _SCALES["attention_factor"]}),
    # up to the original length
    *proofs("gpt", see.built, SCALED["longrope"] | {"model.rotary_original_len": 512},
            {"model.rotary_short_factors": _SCALES["long_factors"]}),
    *proofs("bert", see.built, BERT, _MODEL | {
        "model.norm_order": ("pre", "post"), "model.activation": ("gelu", "gelu_tanh"),
        "model.head_activation": ("gelu", "gelu_tanh"),
    }),
    *proofs("bert", see.built, BERT, {"model.pair_head": (True, False)}, {False: BERT | {"data.pairs": "none"}}),
]  # fmt: skip

_DATA: dict[str, Sequence[Any]] = {"data.split": ([0.8, 0.2, 0.0], [0.5, 0.5, 0.0]), "data.first_sample": (0, 5)}
_TEXT: dict[str, Sequence[Any]] = _DATA | {"data.document_mask": (False, True)}
_MASKED: dict[str, Sequence[Any]] = _DATA | {
    "data.min_sentences": (2, 4), "data.short_share": (0.0, 0.9),
    "data.mask_share": (0.15, 0.5), "data.max_predictions": (None, 1), "data.whole_word": (True, False),
    "data.max_ngram": (1, 3),
}  # fmt: skip
_DOMAINS: dict[str, Sequence[Any]] = {"data.valid_paths": ({}, {"b": B}, {"other": B}, {"a": A, "b": B})}
_PACKING = {"data.packing": ("concatenate", "document", "best_fit")}
_ORDER = {"data.order": ("own", "megatron")}
_RUN_SAMPLES = {"data.megatron_samples": (None, 4000)}
_INDEX_DIR = {"data.index_dir": (None, "kept")}
_VERIFY = {"data.verify": ("read", "full", "none")}
_PREFETCH = {"data.prefetch_steps": (0, 2)}
_MAX_EPOCHS = {"data.max_epochs": (None, 0.001, 0.002)}
_OF_TEXT: dict[str, Sequence[Any]] = {
    "data.text": (NOTES, KEYED), "data.text_split": ("file", "blank-line", "line"), "data.text_limit": ("1GiB", 10),
    "data.text_dir": (None, "shared"),
}  # fmt: skip
DATA = [
    *proofs("", see.samples, BASE, {"data.kind": ("dataset", "blend", "masked")},
            {"blend": BLEND, "masked": BERT}),
    *proofs("dataset", see.samples, BASE | VALID,
            _TEXT | _ORDER | _DOMAINS | {"data.path": (A, B), "data.valid_path": (None, B)}),
    *proofs("dataset", see.samples, BASE | VALID | MEGATRON,
            _TEXT | _RUN_SAMPLES | _DOMAINS | {"data.valid_path": (None, B)}),
    *proofs("dataset", see.samples, BASE | LONGER | {"data.document_mask": True}, _PACKING),
    *proofs("dataset", see.samples, BASE | {"data.path": FOREIGN_A}, {"data.tokenizer": (BYTES, MORE_BYTES)}),
    *(
        proof
        for kind, base, tokenizers in (("dataset", BASE, (BYTES, MORE_BYTES)), ("masked", BERT, (WORDS, MORE_WORDS)))
        for proof in [
            *proofs(kind, see.made_of_text, without(base, "data.path") | {"data.text": NOTES},
                    _OF_TEXT | {"data.tokenizer": (None, *tokenizers)}),
            *proofs(kind, see.made_of_text, without(base, "data.path") | {"data.text": KEYED},
                    {"data.text_key": ("text", "other")}),
            *proofs(kind, see.made_of_text, without(base, "data.path") | {"data.text": ALL_NOTES},
                    {"data.text_suffixes": ([], [".md"])}),
        ]
    ),
    *proofs("dataset", see.indexes, BASE, _INDEX_DIR),
    *proofs("dataset", see.verified, BASE, _VERIFY),
    *proofs("dataset", see.threads, BASE, _PREFETCH),
    *proofs("blend", see.samples, BLEND | VALID, _TEXT | _ORDER | _DOMAINS | {
        "data.datasets": (BLEND["data.datasets"][:1], BLEND["data.datasets"]),
        "data.datasets.weight": (1, 3), "data.valid_datasets": ([], BLEND["data.datasets"][1:]),
    }),
    *proofs("blend", see.samples, BLEND | VALID | MEGATRON, _TEXT | _RUN_SAMPLES | {"data.datasets.weight": (1, 3)}),
    *proofs("blend", see.samples, BLEND | LONGER | {"data.document_mask": True}, _PACKING),
    *proofs("blend", see.samples, BLEND | {"data.datasets": FOREIGN}, {"data.tokenizer": (BYTES, MORE_BYTES)}),
    *(
        proof
        for key in ("data.datasets", "data.valid_datasets")
        for proof in [
            *proofs("blend", see.samples, blend_of(key, "weight", 1, A), {f"{key}.path": (A, B)}),
            *proofs("blend", see.samples, blend_of(key, "tokens", 100, A, B), {f"{key}.tokens": (100, 300)}),
            *proofs("blend", see.samples, blend_of(key, "epochs", 1.0, A, B), {f"{key}.epochs": (1.0, 3.0)}),
        ]
    ),
    *proofs("blend", see.samples, blend_of("data.valid_datasets", "weight", 1, A, B),
            {"data.valid_datasets.weight": (1, 3)}),
    *proofs("blend", see.sources, blend_of("data.datasets", "weight", 1, A), {"data.datasets.name": (None, "x", "y")}),
    *proofs("blend", see.sources, blend_of("data.valid_datasets", "weight", 1, A),
            {"data.valid_datasets.name": (None, "x", "y")}),
    *proofs("dataset", see.sources, BASE, _MAX_EPOCHS),
    *proofs("blend", see.sources, BLEND, _MAX_EPOCHS),
    *proofs("masked", see.sources, BERT, _MAX_EPOCHS),
    *proofs("blend", see.indexes, BLEND, _INDEX_DIR),
    *proofs("blend", see.verified, BLEND, _VERIFY),
    *proofs("blend", see.threads, BLEND, _PREFETCH),
    *proofs("masked", see.samples, BERT | VALID,
            _MASKED | _ORDER | {
                "data.path": (SENTENCES, OTHER_SENTENCES), "data.valid_path": (None, OTHER_SENTENCES),
                "data.valid_paths": ({}, {"t": OTHER_SENTENCES}, {"s": SENTENCES, "t": OTHER_SENTENCES}),
            }),
    *proofs("masked", see.samples, BERT, {"data.pairs": ("sentence_order", "next_sentence", "none")},
            {"none": BERT | {"model.pair_head": False}}),
    *proofs("masked", see.samples, BERT | VALID | MEGATRON, _MASKED | _RUN_SAMPLES),
    *proofs("masked", see.samples, BERT | MEGATRON, {"data.pairs": ("sentence_order", "none")},
            {"none": BERT | MEGATRON | {"model.pair_head": False}}),
    *proofs("masked", see.samples, BERT | {"data.path": FOREIGN_SENTENCES}, {"data.tokenizer": (WORDS, MORE_WORDS)}),
    *proofs("masked", see.indexes, BERT, _INDEX_DIR),
    *proofs("masked", see.verified, BERT, _VERIFY),
    *proofs("masked", see.threads, BERT, _PREFETCH),
]  # fmt: skip

_OPTIM: dict[str, Sequence[Any]] = {
    "optim.lr": (0.01, 0.001), "optim.weight_decay": (0.1, 0.0), "optim.clip_norm": (None, 0.01),
    "optim.betas": ([0.9, 0.95], [0.5, 0.95], [0.9, 0.5]), "optim.eps": (1e-8, 1e-3),
}  # fmt: skip
_MUON = _OPTIM | {"optim.momentum": (0.95, 0.5), "optim.newton_schulz_rounds": (5, 2)}
LONG_RUN = BASE | {"train.steps": 8}
OPTIMIZERS, SCHEDULES = tuple(ours(OptimSettings)), tuple(ours(ScheduleSettings))
PRECISIONS = ("bf16", "fp16", "fp32")
RECOMPUTES = ("none", "attention", "operators", "full")


def half(scale: float) -> dict[str, Any]:
    return LONG_RUN | {"precision": "fp16", "precision.initial_scale": scale}


def on_schedule(word: str, **more: Any) -> dict[str, Any]:
    return LONG_RUN | {"schedule": word} | {f"schedule.{key}": value for key, value in more.items()}


UPDATES = [
    *proofs("", see.weights, BASE, {"optim.kind": OPTIMIZERS}, {word: BASE | {"optim": word} for word in OPTIMIZERS}),
    *proofs("adamw", see.weights, BASE, _OPTIM),
    *proofs("lamb", see.weights, BASE | {"optim": "lamb"}, _OPTIM),
    *proofs("muon", see.weights, BASE | {"optim": "muon"}, _MUON),
    *proofs("", see.weights, LONG_RUN, {"schedule.kind": SCHEDULES}, {word: on_schedule(word) for word in SCHEDULES}),
    *(
        proof
        for word in SCHEDULES
        for proof in proofs(word, see.weights, on_schedule(word), {"schedule.warmup_steps": (1, 4)})
    ),
    *(
        proof
        for word in ("cosine", "inverse_sqrt", "linear")
        for proof in proofs(word, see.weights, on_schedule(word), {"schedule.min_ratio": (0.0, 0.6)})
    ),
    *proofs("wsd", see.weights, on_schedule("wsd", decay_fraction=0.5), {
        "schedule.min_ratio": (0.0, 0.6), "schedule.decay": ("linear", "sqrt", "cosine"),
        "schedule.decay_fraction": (0.5, 0.25),
    }),
    *proofs("", see.weights, BASE, {"precision.kind": PRECISIONS},
            {word: BASE | {"precision": word} for word in PRECISIONS}),
    *proofs("fp16", see.rows, LONG_RUN | {"precision": "fp16"}, {"precision.initial_scale": (65536.0, 2.0**40)}),
    *proofs("fp16", see.rows, half(2.0**16), {"precision.growth_interval_steps": (1000, 1)}),
    *proofs("fp16", see.rows, half(2.0**20), {"precision.min_scale": (1.0, 2.0**20)}),
]  # fmt: skip

UNSAVED = BASE | {"checkpoint.interval_steps": None}
SAVING = BASE | {"checkpoint.interval_steps": 1}
AVERAGED = SAVING | {"checkpoint.ema.decay": 0.5}
RAMPUP = BASE | {"train.micro_batch": 1, "train.rampup": {"start": 1, "increment": 1, "samples": 6}}
PERPLEXITY = {"task": "perplexity", "data": TEXT}
EVALUATED = BASE | {"eval.tasks": [PERPLEXITY]}
WORSENS = SAVING | VALID | {"checkpoint.keep_last": 1, "optim.lr": 3.0}  # its loss
TWO = BASE | {"train.micro_batch": 1, "parallel.dp_shard": 2, "checkpoint.interval_steps": None}
RUN = [
    *proofs("", see.rows, BASE, {
        "train.steps": (4, 3), "train.global_batch": (4, 2), "train.seed": (1234, 7),
        "train.valid_interval_steps": (0, 2), "observe.log_interval_steps": (1, 2),
        "checkpoint.init_from": (None, DONE),
    }),
    *proofs("", see.rows, BASE | {"checkpoint.init_from": DONE}, {"checkpoint.init_weights": ("model", "ema")}),
    *proofs("", see.rows, BASE | {"train.micro_batch": 1}, {"train.rampup": (None, RAMPUP["train.rampup"])}),
    *proofs("", see.rows, BASE | {"train.steps": None}, {"train.tokens": (128, 192)}),
    *proofs("", see.rows, BASE | VALID, {"train.valid_samples": (2, 4)}),
    *proofs("", see.rows, RAMPUP, {
        "train.rampup.start": (1, 2), "train.rampup.increment": (1, 3), "train.rampup.samples": (6, 12)
    }),
    *proofs("", see.rows, LONG_RUN, {"checkpoint.resume": ("auto", DONE)}),
    *proofs("", see.activations, BASE, {"train.micro_batch": (2, 4)}),
    *proofs("", see.files, BASE, {
        "checkpoint.interval_steps": (0, 2, None), "observe.tensorboard": (False, True), "run.dir": ("run", "there/run")
    }),
    *proofs("", see.files, BASE, {"checkpoint.interval_s": (None, 1e-6)}),
    *proofs("", see.rows, BASE, {"run.time_limit": (None, 1e-6)}),
    *proofs("", see.advice, BASE | {"run.dir": DONE}, {"run.time_between_failures": (None, 1e6, 1e8)}),
    *proofs("", see.files, SAVING, {"checkpoint.keep_last": (2, 1, "all")}),
    *proofs("", see.files, SAVING | {"checkpoint.keep_last": 1}, {"checkpoint.keep_every_steps": (None, 2)}),
    *proofs("", see.files, WORSENS, {"checkpoint.keep_best": (0, 1)}),
    *proofs("", see.files, WORSENS | {"checkpoint.keep_best": 1},
            {"checkpoint.best_by": ("loss/valid", "valid/accuracy")}),
    *proofs("", see.weights, SAVING, {
        "checkpoint.ema": ({}, {"decay": 0.5}), "checkpoint.ema.decay": (None, 0.5, 0.9)
    }),
    *proofs("", see.weights, AVERAGED, {"checkpoint.ema.every_steps": (1, 3), "checkpoint.ema.from_step": (0, 2, 3)}),
    *proofs("", see.evaluations, BASE, {"eval.tasks": ([], [PERPLEXITY])}),
    *proofs("", see.evaluations, EVALUATED, {
        "eval.tasks.task": ("perplexity", "lambada/megatron-strict"), "eval.tasks.data": (TEXT, OTHER_TEXT),
        "eval.tasks.name": (None, "one"), "eval.interval_steps": (0, 1, 3),
    }),
    *proofs("", see.scored_together, EVALUATED, {"eval.batch_size": (8, 64)}),
    *proofs("", see.threads, BASE | {"checkpoint.interval_s": None}, {"checkpoint.asynchronous": (True, False)}),
    *proofs("", see.bad_disk, BASE, {"checkpoint.verify_after_save": (False, True)}),
    *proofs("", see.damaged, SAVING, {"checkpoint.fallback": (False, True)}),
    *proofs("", see.traced, BASE | {"train.steps": 17}, {"observe.trace": ("none", "sampled", "all")}),
    *proofs("", see.peak, BASE, {"observe.peak_tflops": (None, 1.0, 2.0)}),
    *proofs("", see.profiles, BASE, {"observe.profile_steps": (None, [1, 1], [2, 3])}),
    *proofs("", see.profiles, TWO | {"observe.profile_steps": [1, 1]}, {"observe.profile_ranks": (None, [1], [0, 1])}),
    *proofs("", see.events, BASE | {"observe.tensorboard": True}, {"observe.histograms_every_steps": (None, 2, 3)}),
    *proofs("", see.told_to_wandb, BASE, {"observe.wandb": ("none", "offline", "online")}),
    *proofs("", see.told_to_wandb, BASE | {"observe.wandb": "offline"}, {
        "observe.wandb_project": (None, "p"), "observe.wandb_entity": (None, "us"), "observe.wandb_name": (None, "n"),
        "observe.wandb_tags": ([], ["a"], ["a", "b"]),
    }),
    *proofs("", see.torchs_state, BASE, {"compute.threads": (1, 2), "compute.deterministic": (False, True)}),
    *proofs("", see.graph, BASE, {"compute.device": ("cpu", "cuda"), "compute.compile": (False, True)}),
    *proofs("", see.rounding, BASE | {"compute.device": "auto"}, {"compute.tf32": (False, True)}),
    *proofs("", see.activations, BASE, {"recompute.kind": RECOMPUTES},
            {word: BASE | {"recompute": word} for word in RECOMPUTES}),
    *(
        proof
        for word in RECOMPUTES[1:]
        for proof in proofs(
            word, see.activations, BASE | {"recompute": word, "model.num_layers": 2}, {"recompute.blocks": (1, None)}
        )
    ),
]  # fmt: skip


def pipelines(vp: int) -> list[str]:
    return [word for word in ours(PipelineSchedule) if schedule_named(word).allows(vp)]


TOGETHER = BASE | {"train.steps": 2, "train.micro_batch": 1, "checkpoint.interval_steps": None}
PIPELINE = TOGETHER | {"parallel.pp": 2, "model.num_layers": 4}
LOOPED = PIPELINE | {"parallel.vp": 2, "parallel.schedule": "interleaved"}
PARALLEL = [
    *proofs("", see.ranks, TOGETHER | {"model.num_layers": 4}, {"parallel.pp": (1, 2)}),
    *proofs("", see.ranks, TOGETHER, {
        "parallel.dp_replicate": (1, 2), "parallel.dp_shard": (1, 2), "parallel.tp": (1, 2)
    }),
    *proofs("", see.ranks, TOGETHER | {"parallel.dp_shard": 2}, {"parallel.zero": (1, 2, 3)}),
    *proofs("", see.ranks, TOGETHER | {"parallel.tp": 2}, {"parallel.sequence_parallel": (True, False)}),
    *proofs("", see.ranks, PIPELINE, {
        "parallel.schedule": pipelines(1), "parallel.balance": ("layers", "cost")
    }),
    *proofs("", see.ranks, LOOPED, {"parallel.schedule": pipelines(2)}),
    *proofs("", see.ranks, LOOPED | {"model.num_layers": 6}, {"parallel.vp": (2, 3)}),
    # of the whole model: of a stage, which has two blocks, there would be no third
    *proofs("full", see.ranks, PIPELINE | {"recompute": "full"}, {"recompute.blocks": (2, 3)}),
    *proofs("", see.patience, TOGETHER | {"parallel.dp_shard": 2}, {"parallel.timeout_s": (1.0, 60.0)}),
]  # fmt: skip

# as large as to need all of the machine: a tp group in a node, dp groups across nodes
PLANNED = BASE | {
    "hardware": "h100", "compute.device": "auto", "precision": "bf16", "train.global_batch": 64,
    "train.micro_batch": 1, "parallel.tp": 2, "parallel.dp_shard": 16,
    "model.num_layers": 8, "model.width": 1024, "model.num_heads": 16, "model.seq_len": 1024,
}  # fmt: skip
PLANNER = [
    *proofs("", see.forecast, PLANNED, {
        "hardware.name": ("ours", "theirs"), "hardware.generation": ("ampere", "hopper"),
        "hardware.memory_GiB": (40.0, 80.0), "hardware.peak_tflops": ({"bf16": 300.0}, {"bf16": 900.0}),
        "hardware.memory_GBps": (2000.0, 3000.0), "hardware.num_cores": (108, 132), "hardware.cache_MB": (1.0, 50.0),
        "hardware.gpus_per_node": (4, 8), "hardware.link_GBps": (300.0, 450.0), "hardware.nic_GBps": (200.0, 400.0),
        "hardware.network": ("infiniband", "ethernet"), "hardware.power_W": (400.0, 700.0),
        "hardware.sustained": (0.8, 1.0), "hardware.unchecked": (False, True),
        "hardware.factors": ({"gap_s": 1e-6}, {"gap_s": 4e-6}), "hardware.interval": (0.1, 0.3),
    }),
    *proofs("", see.layout, BASE | {"hardware": "cpu"}, {"parallel.auto": (False, True)}),
]  # fmt: skip

# a stage that differs from the run's settings, after one that does not
STAGED = without(BASE, "train.steps") | {"stages": {"first": {"steps": 2}, "last": {"steps": 2}}}
ENDLESS = STAGED | {"stages": {"first": {"steps": 2}, "last": {}}}
STAGES = [
    *proofs("", see.weights, ENDLESS, {"stages.steps": (1, 3), "stages.tokens": (64, 129), "stages.samples": (4, 9)}),
    *proofs("", see.weights, STAGED, {
        "stages.data": ({}, {"path": B}), "stages.model": ({}, {"seq_len": 8}, {"dropout": 0.5}),
        "stages.train": ({}, {"global_batch": 2}), "stages.optim": ({}, {"lr": 0.1}, {"weight_decay": 0.5}),
        "stages.schedule": ({}, {"kind": "linear"}, {"kind": "constant"}),
    }),
    *proofs("", see.activations, STAGED | {"stages": {"last": {"steps": 4}}},
            {"stages.recompute": ({}, {"kind": "full"})}),
    *proofs("", see.rows, STAGED, {"stages.eval": ({}, {"tasks": [PERPLEXITY]})}),
    *proofs("", see.rows, STAGED | {"stages": {"last": {"steps": 2}, "then": {"steps": 2}}},
            {"stages.stop_after": (False, True)}),
]  # fmt: skip

PROOFS = MODELS + DATA + UPDATES + RUN + PARALLEL + PLANNER + STAGES
_VALUES = {(one.key.kind, one.key.name): one.values for one in PROOFS}
PROOFS += [
    Proof(Key(kind, key), values, observer, on)
    for group, base, observer in (
        ("model", ModelSettings, see.built), ("optim", OptimSettings, see.weights),
        ("schedule", ScheduleSettings, see.weights),
    )
    for kind, key, values, on in proven_by_kind(group, base, _VALUES)
]  # fmt: skip

REFUSALS = [
    *(Refusal(Key(kind, "data.restart"), base | {"data.restart": True})
      for kind, base in (("dataset", BASE), ("masked", BERT))),
    *(Refusal(Key("blend", f"data.{key}.restart"), blend_of(f"data.{key}", "weight", 1, A) |
              {f"data.{key}.restart": True}) for key in ("datasets", "valid_datasets")),
    *(Refusal(Key(kind, "data.train_on_held_out"), base | {"data.train_on_held_out": True})
      for kind, base in (("dataset", BASE), ("blend", BLEND), ("masked", BERT))),
    *(Refusal(Key("", f"observe.{key}"), BASE | {f"observe.{key}": value}) for key, value in {
        "wandb_project": "p", "wandb_entity": "us", "wandb_name": "n", "wandb_tags": ["a"], "profile_ranks": [0],
        "histograms_every_steps": 2, "profile_steps": [4, 5],
    }.items()),
    Refusal(Key("", "observe.profile_ranks"), BASE | {"observe.profile_steps": [1, 2], "observe.profile_ranks": [1]}),
    Refusal(Key("", "observe.histograms_every_steps"),
            BASE | {"observe.tensorboard": True, "observe.histograms_every_steps": 5}),
    Refusal(Key("", "parallel.auto"), BASE | {"parallel.auto": True}),
    Refusal(Key("gpt", "model.rotary_base"), BASE | {"model.rotary_base": 500.0}),
    Refusal(Key("gpt", "model.num_positions"), BASE | {"model.positions": "rotary", "model.num_positions": 32}),
    Refusal(Key("dataset", "data.valid_path"), BASE | {"data.valid_path": B}),
    Refusal(Key("masked", "data.valid_path"), BERT | {"data.valid_path": OTHER_SENTENCES}),
    Refusal(Key("blend", "data.valid_datasets"), BLEND | {"data.valid_datasets": [{"path": B, "weight": 1}]}),
    *(
        Refusal(Key(kind, f"data.{key}"), base | {f"data.{key}": value})
        for kind, base in (("dataset", BASE), ("masked", BERT))
        for key, value in {
            "text": NOTES, "text_suffixes": [".md"], "text_key": "k", "text_split": "line", "text_limit": 5,
            "text_dir": "d",
        }.items()
    ),
    Refusal(Key("", "parallel.schedule"), BASE | {"parallel.schedule": "gpipe"}),
    Refusal(Key("", "parallel.balance"), BASE | {"parallel.balance": "cost"}),
    Refusal(Key("", "checkpoint.interval_s"), UNSAVED | {"checkpoint.interval_s": 300.0}),
    Refusal(Key("", "checkpoint.keep_every_steps"), UNSAVED | {"checkpoint.keep_every_steps": 2}),
    Refusal(Key("", "checkpoint.keep_every_steps"), BASE | {"checkpoint.keep_every_steps": 2}),
    Refusal(
        Key("", "checkpoint.keep_every_steps"),
        SAVING | {"checkpoint.keep_every_steps": 2, "checkpoint.keep_last": "all"},
    ),
    Refusal(Key("", "checkpoint.ema.decay"), UNSAVED | {"checkpoint.ema.decay": 0.5}),
    Refusal(Key("", "checkpoint.ema.every_steps"), SAVING | {"checkpoint.ema.every_steps": 2}),
    Refusal(Key("", "checkpoint.ema.from_step"), SAVING | {"checkpoint.ema.from_step": 2}),
    Refusal(Key("", "checkpoint.verify_after_save"), UNSAVED | {"checkpoint.verify_after_save": True}),
    Refusal(Key("masked", "data.document_mask"), BERT | {"data.document_mask": True}),
    Refusal(Key("masked", "data.packing"), BERT | {"data.packing": "document"}),
    Refusal(Key("dataset", "data.packing"), BASE | MEGATRON | {"data.packing": "document"}),
    Refusal(Key("dataset", "data.megatron_samples"), BASE | {"data.megatron_samples": 100}),
    Refusal(Key("blend", "data.megatron_samples"), BLEND | {"data.megatron_samples": 100}),
    Refusal(Key("masked", "data.megatron_samples"), BERT | {"data.megatron_samples": 100}),
    Refusal(Key("bert", "model.pair_head"), BERT | {"data.pairs": "none"}),
    Refusal(Key("", "compute.tf32"), BASE | {"compute.tf32": True, "compute.device": "cpu"}),
    Refusal(Key("", "compute.tf32"), BASE | {"compute.tf32": True, "precision": "bf16"}),
    Refusal(Key("", "train.steps"), BASE | {"train.tokens": 1000}),
    Refusal(Key("", "parallel.vp"), BASE | {"parallel.vp": 2}),
    Refusal(Key("", "parallel.zero"), BASE | {"parallel.zero": 2}),
    Refusal(Key("dataset", "data.valid_paths"), BASE | {"data.valid_paths": {"b": B}}),
    Refusal(Key("dataset", "data.valid_paths"), BASE | VALID | {"data.valid_path": A, "data.valid_paths": {"b": B}}),
    Refusal(Key("blend", "data.valid_paths"), BLEND | {"data.valid_paths": {"b": B}}),
    Refusal(Key("masked", "data.valid_paths"), BERT | {"data.valid_paths": {"t": OTHER_SENTENCES}}),
    Refusal(Key("", "eval.tasks"), BERT | {"eval.tasks": [PERPLEXITY]}),
    Refusal(Key("", "eval.interval_steps"), BASE | {"eval.interval_steps": 2}),
    Refusal(Key("", "eval.batch_size"), BASE | {"eval.batch_size": 4}),
    Refusal(Key("", "checkpoint.keep_best"), BASE | VALID | {"checkpoint.keep_best": 1}),
    Refusal(Key("", "checkpoint.best_by"), SAVING | VALID | {"checkpoint.best_by": "valid/ppl"}),
    Refusal(Key("", "checkpoint.best_by"), SAVING | {"checkpoint.keep_best": 1}),
    Refusal(Key("", "checkpoint.init_from"), BASE | {"checkpoint.init_from": DONE, "checkpoint.resume": DONE}),
    Refusal(Key("", "checkpoint.init_weights"), BASE | {"checkpoint.init_weights": "ema"}),
    Refusal(Key("", "checkpoint.fallback"), BASE | {"checkpoint.fallback": True, "checkpoint.resume": "none"}),
    Refusal(Key("", "checkpoint.resume"), BASE | {"run.dir": DONE, "checkpoint.resume": "none"}),
]  # fmt: skip
