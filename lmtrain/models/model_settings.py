"""The interface of every model's settings, and the settings that decoders and encoders share. Torch-free.

Called by train/run_config (checks across settings), placement, parallel and the planner. A kind named `gpt` has its
settings in `gpt_settings.py`, and `gpt.py` beside it has `build(settings)`. TransformerSettings, the base of both
built-in kinds, has the sizes, the vocabulary and the blocks' weights.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Self

from lmtrain.config.settings_base import Choice, Problem, facts_of, setting
from lmtrain.errors import SettingsError, own
from lmtrain.layout import divisors, format_choices
from lmtrain.spec import Cut, Cuts, LanguageModel, LayerKind, ModelShape, Split, Tie

Shape = tuple[int, ...]
NORM_PARTS = ("weight", "bias")  # of a layer norm
POSITIONS = "embedding.position.weight"  # a table of learned positions
# sizes for which null means a default that other models state explicitly
_SIZES_WITH_DEFAULTS = ("num_kv_heads", "head_width", "ffn_width")


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Choice):
    package: ClassVar[str] = "lmtrain.models"

    @property
    @abstractmethod
    def terms(self) -> tuple[str, ...]:
        """The loss terms: first the token term, and the data must have labels for all terms."""

    @property
    @abstractmethod
    def shape(self) -> ModelShape:
        """The integers that determine sizes and FLOPs; vocab_size is 0 until the tokenizer is known."""

    @property
    @abstractmethod
    def padded_vocab_size(self) -> int:
        """The number of embedding rows and logits columns, rounded up so that they can be sharded evenly."""

    @property
    @abstractmethod
    def uses_dropout(self) -> bool:
        """True if a training step draws random numbers for dropout."""

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, which says what its attention reads."""
        return (LayerKind(),) * self.shape.num_layers

    @property
    def caps_scores(self) -> bool:
        """True if attention caps its scores, which needs kernels of their own."""
        return False

    @property
    def z_loss(self) -> float:
        """The factor of the z-loss, which is minimised beside the loss of the token term."""
        return 0.0

    def unused(self) -> Iterator[Problem]:
        """Yield a problem for each setting without an effect in this model: refused in runs, allowed in checkpoints."""
        return iter(())

    @abstractmethod
    def with_vocab(self, vocab_size: int) -> Self:
        """Return the settings for a tokenizer of this size; raise SettingsError if a smaller vocabulary is set."""

    @cached_property
    def num_parameters(self) -> int:
        """The number of parameters without padding, tied weights once."""
        return sum(math.prod(shape) for shape in unpadded_shapes(self).values())

    @cached_property
    def num_embedding_parameters(self) -> int:
        """The number of them that are embeddings: of tokens, positions and segments."""
        return sum(
            math.prod(shape) for name, shape in unpadded_shapes(self).items() if name.startswith("embedding.")
        )

    @abstractmethod
    def weights(self) -> dict[str, Shape]:
        """Return the shape of every parameter by name, padding included; a tied weight occurs under its first name."""

    @abstractmethod
    def cuts(self) -> Cuts:
        """Return how each parameter may be sharded.

        Together with `weights` this determines the placement without torch.
        """

    @abstractmethod
    def ties(self) -> tuple[Tie, ...]:
        """Return the pairs of names that share a weight."""

    def layer_of(self, name: str) -> int:
        """Return the number of the block that has the weight `name`. Return -1 for a weight of the embedding, which is
        before all blocks, and num_layers for any weight after them.

        In every model the blocks are named `blocks.0`, `blocks.1` and so on; other parts may have any name.
        """
        part, _, rest = name.partition(".")
        if part == "blocks":
            return int(rest.partition(".")[0])
        return -1 if part == "embedding" else self.shape.num_layers

    def build(self) -> LanguageModel:
        """Build the whole model on torch's default device; `meta` allocates no memory."""
        model: LanguageModel = self.component().build(self)
        return model


def unpadded_shapes(settings: ModelSettings) -> dict[str, Shape]:
    """Return weight name -> shape for all weights of a model, as checkpoints store them: without the rows that pad the
    vocabulary. Tied weights are there once, under their first name.
    """
    cuts, num_rows = settings.cuts(), settings.shape.vocab_size
    return {
        name: (num_rows, *shape[1:]) if name in cuts and cuts[name].split is Split.VOCAB else shape
        for name, shape in settings.weights().items()
    }


def differing_keys(model: ModelSettings, other: ModelSettings) -> list[str]:
    """Return the keys of `other` whose values in `model` differ, so that the same weights would give other outputs in
    the two models. Keys that change no output are left out: those without an effect in `other`, those that only
    training reads, such as dropout, and paths.
    """
    values, other_values = with_explicit_sizes(model), with_explicit_sizes(other)
    facts = {key: facts_of(ModelSettings, key) for key in other_values}
    ignored = {key for key in other_values if "path" in facts[key] or facts[key].get("affects") == "training"}
    ignored |= {problem.key for problem in other.unused()}
    if POSITIONS not in other.weights():
        ignored |= {"seq_len", "num_positions"}  # because: rotary positions have no table that limits the length
    elif "num_positions" in other_values:
        ignored.add("seq_len")  # because: a table of as many rows serves every length up to theirs
    return [key for key in other_values if key not in ignored and values.get(key) != other_values[key]]


def with_explicit_sizes(model: ModelSettings) -> dict[str, Any]:
    """Return the model's settings as plain data, key -> value. Sizes that are null, such as num_kv_heads, are replaced
    by the number that null stands for; num_positions stays null in a model without a table of positions.
    """
    values, shape, table = model.to_dict(), model.shape, model.weights().get(POSITIONS)
    explicit = {key: getattr(shape, key) for key in _SIZES_WITH_DEFAULTS if key in values}
    return values | explicit | ({"num_positions": table[0]} if "num_positions" in values and table else {})


def checked_vocab_size(vocab_size: int | None, num_tokens: int) -> int:
    """Return the model's vocabulary size: the setting `vocab_size` or, if it is None, `num_tokens`, the tokenizer's
    number of tokens. Raise SettingsError if the setting is the smaller of the two.
    """
    if vocab_size is not None and vocab_size < num_tokens:
        problem = Problem(
            "model.vocab_size", vocab_size,
            f"is smaller than the tokenizer's {num_tokens} tokens",
            f"Use {own(num_tokens)}, or null for the tokenizer's.",
        )  # fmt: skip
        raise SettingsError([problem.text()])
    return num_tokens if vocab_size is None else vocab_size


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def format_largest_choices(values: list[int]) -> str:
    """Return the largest dozen of these ordered values, marked as values for the message's key, as a phrase, so that a
    message stays short: "2, 4 or 8".
    """
    return format_choices(values if len(values) <= 12 else values[-12:], own)


MAX_LAYERS = 4096  # because: every weight is listed before a model is built, and no known model has a third of this
MAX_VOCAB_MULTIPLE = 1 << 16  # because: an imported small model must not lead to logits of a million columns


@dataclass(frozen=True, kw_only=True)
class TransformerSettings(ModelSettings):
    """The settings that decoders and encoders share."""

    optional: ClassVar[tuple[str, ...]] = ("ffn_width", "vocab_size", "num_positions")  # sizes that may be null
    positive: ClassVar[tuple[str, ...]] = ("norm_eps", "init_std")  # numbers that must be above 0

    num_layers: int
    width: int
    num_heads: int
    ffn_width: int | None = None  # None: 4 x width
    vocab_size: int | None = setting(default=None, chosen_at_start=True)  # None: the tokenizer's
    vocab_multiple: int = setting(default=128, affects="training")
    seq_len: int = setting(per_stage=True)
    num_positions: int | None = None  # rows of the learned table of positions; None: seq_len
    norm_eps: float = 1e-5
    dropout: float = setting(default=0.0, per_stage=True, affects="training")
    init_std: float = setting(default=0.02, affects="training")

    @property
    def ffn(self) -> int:
        return 4 * self.width if self.ffn_width is None else self.ffn_width

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape(
            num_layers=self.num_layers,
            width=self.width,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_width=self.width // self.num_heads,
            ffn_width=self.ffn,
            gated=False,
            vocab_size=self.vocab_size or 0,
            seq_len=self.seq_len,
        )

    @property
    def position_rows(self) -> int:
        """The number of rows of the learned table of positions. A sequence of seq_len tokens uses the first ones."""
        return self.seq_len if self.num_positions is None else self.num_positions

    @property
    def padded_vocab_size(self) -> int:
        return round_up(self.vocab_size or 0, self.vocab_multiple)

    @property
    def uses_dropout(self) -> bool:
        return self.dropout > 0

    @property
    def branch_std(self) -> float:
        """The init std of a branch's last linear: smaller, because 2L branches add up in the residual stream."""
        return self.init_std / math.sqrt(2 * self.num_layers)

    @property
    def norm_start(self) -> float:
        """The initial value of a norm's weights."""
        return 1.0

    def cuts(self) -> Cuts:
        return {name: self.cut_of(name) for name in self.weights()}

    def cut_of(self, name: str) -> Cut:
        """Return how the parameter `name` is split over tensor-parallel ranks, as in Megatron-LM: the first linear of
        attention and of the MLP by outputs, the second by inputs, embedding and head by vocabulary rows; all others are
        not split.

        Head and decoder have a bias element for each token; the parameters of an encoder's head before are whole.
        """
        shape = self.shape
        match name.split(".")[-2:]:
            case ["qkv", _]:
                kv = shape.num_kv_heads * shape.head_width
                return Cut(Split.COLUMN, (shape.num_heads * shape.head_width, kv, kv), unit=shape.head_width)
            case ["up", _]:
                return Cut(Split.COLUMN, (shape.ffn_width,) * (2 if shape.gated else 1))
            case ["out" | "down", "weight"]:
                return Cut(Split.ROW)
            case ["token", "weight"] | ["head" | "decoder", _]:
                return Cut(Split.VOCAB)
        return Cut(Split.NONE)

    def with_vocab(self, vocab_size: int) -> Self:
        return replace(self, vocab_size=checked_vocab_size(self.vocab_size, vocab_size))

    def problems(self) -> Iterator[Problem]:
        yield from self.checked(
            *(self.at_least(1, key) for key in ("num_layers", "vocab_multiple", "seq_len")),
            # because: the number of heads divides the width
            *(self.at_least(1, key, "Give 1 or more.") for key in ("width", "num_heads")),
            *(self.at_least(1, key, self.way_out_of_size(key)) for key in self.optional),
            self.at_most(MAX_LAYERS, "num_layers"),
            self.at_most(MAX_VOCAB_MULTIPLE, "vocab_multiple"),
            (1 <= (self.num_positions or 0) < self.seq_len, "num_positions",
             f"has fewer rows than a sequence has positions, seq_len={self.seq_len}",
             f"Use {own(self.seq_len)} or more, or null for seq_len."),
        )  # fmt: skip
        yield from self.head_problems()
        yield from self.checked(
            *(self.above_0(key, f"Use {own(f'{getattr(type(self), key):g}')}.") for key in self.positive),
            (not 0 <= self.dropout < 1, "dropout",
             "is not a share of activations to drop, which lies in [0, 1)", f"Use {own(0)} or {own(0.1)}."),
        )  # fmt: skip

    def way_out_of_size(self, key: str) -> str:
        """Return the advice for the optional size `key` if it is below 1."""
        return f"Use {own('null')} for the default, or 1 or more."

    def head_problems(self) -> Iterator[Problem]:
        """Yield a problem if the number of attention heads does not divide the width; none if either is below 1, which
        is reported elsewhere.
        """
        if min(self.width, self.num_heads) >= 1:
            yield from self.problem_if(
                self.width % self.num_heads != 0, "num_heads",
                f"does not divide width={self.width}", f"Use {format_largest_choices(divisors(self.width, 256))}.",
            )  # fmt: skip


def block_shapes(
    path: str,
    shape: ModelShape,
    *,
    norms: Mapping[str, tuple[str, ...]] = MappingProxyType(dict.fromkeys(("attention_norm", "mlp_norm"), NORM_PARTS)),
    qkv_bias: bool = True,
    out_bias: bool = True,
    mlp_bias: bool = True,
    qk_norms: tuple[int, ...] = (),
) -> dict[str, Shape]:
    """Return weight name -> shape for a transformer block; `path` is the block's name, such as `blocks.0`. `norms` maps
    each norm of hidden states to its parameters ("weight", "bias"); the three flags tell which linears have a bias;
    `qk_norms` has the number of weights of the norm of queries and that of keys, () without such norms.
    """
    width, ffn = shape.width, shape.ffn_width
    heads, keys = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    norm_weights = {name: norm_shapes(f"{path}.{name}", width, parts) for name, parts in norms.items()}
    qk_weights = zip(("q_norm", "k_norm"), qk_norms, strict=False)
    return (
        norm_weights.get("attention_norm", {})
        | linear_shapes(f"{path}.attention.qkv", heads + 2 * keys, width, bias=qkv_bias)
        | {f"{path}.attention.{name}.weight": (size,) for name, size in qk_weights}
        | linear_shapes(f"{path}.attention.out", width, heads, bias=out_bias)
        | norm_weights.get("attention_out_norm", {})
        | norm_weights.get("mlp_norm", {})
        | linear_shapes(f"{path}.mlp.up", ffn * (2 if shape.gated else 1), width, bias=mlp_bias)
        | linear_shapes(f"{path}.mlp.down", width, ffn, bias=mlp_bias)
        | norm_weights.get("mlp_out_norm", {})
    )


def norm_shapes(path: str, width: int, parts: tuple[str, ...] = NORM_PARTS) -> dict[str, Shape]:
    """Return the shapes of a norm's weights by name; `path` is the module's name in the model, `parts` those of weight
    and bias that it has.
    """
    return {f"{path}.{name}": (width,) for name in parts}


def linear_shapes(path: str, outputs: int, inputs: int, *, bias: bool = True) -> dict[str, Shape]:
    """Return the shapes of a linear's weights by name; `path` is the module's name in the model."""
    weight: dict[str, Shape] = {f"{path}.weight": (outputs, inputs)}
    return weight | {f"{path}.bias": (outputs,)} if bias else weight
