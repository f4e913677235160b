"""Draw the config.json of small models with odd sizes. Each of the 20 seeds of a family draws the same every time, and
over all seeds each choice is drawn about as often as every other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from lmtrain.config.settings_base import load_modules

Config = dict[str, Any]
NUM_SEEDS = 20
VOCAB = 331  # not divisible by anything, and more than the tokenizers have
ORIGINAL_LEN = 16  # tokens of the original training; longest texts have four times as many
ROTARY_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
LONGEST = 4 * ORIGINAL_LEN
WINDOW = 9


class Draw:
    """The choices of one seed of a family."""

    def __init__(self, family: str, seed: int) -> None:
        self.family, self.seed = family, seed
        self.rng = random.Random(f"{family} {seed}")

    def choose(self, name: str, choices: Sequence[Any]) -> Any:
        """Return one of `choices`; over all seeds of the family each is returned about as often as every other."""
        row = (list(choices) * NUM_SEEDS)[:NUM_SEEDS]
        random.Random(f"{self.family} {name}").shuffle(row)
        return row[self.seed % NUM_SEEDS]

    def sizes(self, *, own_head_width: bool = True, divides: bool = False, one_head_kind: bool = False) -> Config:
        """Return the sizes of a model, by LLaMA's keys: width, MLP, heads x head width and keys x head width differ.
        Without `own_head_width` the head width is that of the model shared by its heads; with `divides` the number of
        heads divides the width in any case; with `one_head_kind` there are as many keys as heads.
        """
        heads, keys = self.choose("heads", [(4, 2), (6, 2), (6, 1), (3, 1), (4, 4), (6, 3)])
        keys = heads if one_head_kind else keys
        head = self.choose("head width", [8, 12, 16])
        width = heads * head
        if own_head_width:
            width = next(
                size for size in (40, 42, 44, 48, 50, 54, 56, 60)
                if size not in (heads * head, keys * head) and not (divides and size % heads)
            )  # fmt: skip
        config: Config = {
            "vocab_size": VOCAB, "hidden_size": width, "intermediate_size": self.choose("mlp", [70, 86, 101]),
            "num_attention_heads": heads, "max_position_embeddings": LONGEST,
            "tie_word_embeddings": self.choose("tied", [False, True]),
        }  # fmt: skip
        config |= {"head_dim": head} if own_head_width else {}
        return config if one_head_kind else config | {"num_key_value_heads": keys}

    def layers(self, period: int) -> int:
        """Return the number of layers: two periods of the pattern of layers, or one layer."""
        return int(self.choose("layers", [2 * period, 2 * period, 2 * period, 1]))

    def eps(self) -> float:
        # because: large weights make large hidden states, where a usual eps is not seen
        return float(self.choose("eps", [0.05, 0.2]))

    def rotary(self, head_width: int, kinds: Sequence[str] = ROTARY_KINDS) -> Config:
        """Return the entries for rotary angles: the form of transformers 4, which 5 reads too."""
        base = self.choose("base", [97.0, 500.0, 2000.0])
        kind = self.choose("rotary", kinds)
        if kind == "yarn" and head_width == 4:
            base = 97.0  # because: of two pairs a larger base mixes the same ones whatever beta_fast is
        return {"rope_theta": base} | self.scaling(kind, head_width)

    def scaling(self, kind: str, rotary_width: int) -> Config:
        """Return the entries for a kind of scaled angles."""
        factor, original = self.choose("factor", [2.0, 4.0, 8.0]), {"original_max_position_embeddings": ORIGINAL_LEN}
        pairs = rotary_width // 2
        match kind:
            case "linear":
                return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
            case "llama3":
                bounds = {"low_freq_factor": 1.0, "high_freq_factor": self.choose("high", [3.0, 4.0])}
                return {"rope_scaling": {"rope_type": "llama3", "factor": factor, **bounds, **original}}
            case "yarn":
                extra: Config = self.choose(
                    "yarn", [{}, {"truncate": False}, {"attention_factor": 1.3}, {"mscale": 1.0, "mscale_all_dim": 0.7}]
                )
                # because: within the length of small models no pair turns 32 times, the usual beta_fast
                betas = {"beta_fast": 0.5, "beta_slow": 0.05}
                return {"rope_scaling": {"rope_type": "yarn", "factor": factor, **original, **betas, **extra}}
            case "longrope":
                lists = {
                    f"{name}_factor": [round(self.rng.uniform(low, low + 1), 3) for _ in range(pairs)]
                    for name, low in (("short", 1.0), ("long", 2.0))
                }
                extra = self.choose("longrope", [{}, {"attention_factor": 1.2}])
                return {"rope_scaling": {"rope_type": "longrope", **lists, **extra}, **original}
        return {}


@cache
def configs() -> dict[str, Callable[[Draw], Config]]:
    """Return model_type -> function that draws a config.json, of all modules of this folder that have some."""
    modules = load_modules("tests.unit.exchange.huggingface.families", "_configs")
    return {name: draw for module in modules for name, draw in getattr(module, "CONFIGS", {}).items()}


def draw_config(family: str, seed: int) -> Config:
    return configs()[family](Draw(family, seed))
