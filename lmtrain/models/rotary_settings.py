"""The settings of rotary positions: how far apart the angles of two positions are, and what stretches them. Torch-free.

A part of a decoder's settings. layers/rotary.py computes the angles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lmtrain.config.settings_base import Problem, Settings, problem_if, setting, show
from lmtrain.errors import example, leave_out, own, way

# The keys that each scaling reads.
_READ_BY = {
    "none": (),
    "linear": ("rotary_factor",),
    "llama3": ("rotary_factor", "rotary_original_len", "rotary_low_factor", "rotary_high_factor"),
    "yarn": ("rotary_factor", "rotary_original_len", "rotary_beta_fast", "rotary_beta_slow", "rotary_rounds",
             "rotary_attention_factor"),
    "longrope": ("rotary_factor", "rotary_original_len", "rotary_short_factors", "rotary_long_factors",
                 "rotary_attention_factor"),
}  # fmt: skip
_SCALING_KEYS = tuple(dict.fromkeys(key for keys in _READ_BY.values() for key in keys))

_MAX_WIDER = 1024  # numbers by which a head may be wider than it is, in the advice on its width


def _angle(default: Any) -> Any:
    """Return a field of a setting that decides angles, which stages may set, as they go on with longer texts."""
    return setting(default=default, per_stage=True)


@dataclass(frozen=True, kw_only=True)
class RotarySettings(Settings):
    optional: ClassVar[tuple[str, ...]] = ("rotary_original_len",)
    positive: ClassVar[tuple[str, ...]] = (
        "rotary_base", "rotary_factor", "rotary_low_factor", "rotary_high_factor", "rotary_beta_fast",
        "rotary_beta_slow",
    )  # fmt: skip

    rotary_base: float = _angle(10000.0)
    # rotary_base of layers with a window, without scaling; None: as the others
    local_rotary_base: float | None = _angle(None)
    rotary_share: float = 1.0  # share of a head's numbers that are turned, from its first
    # of the angles, for longer texts
    rotary_scaling: Literal["none", "linear", "llama3", "yarn", "longrope"] = _angle("none")
    rotary_factor: float = _angle(1.0)  # how many times longer texts are than those of the original training
    rotary_original_len: int | None = _angle(None)  # tokens of the original training's texts
    rotary_low_factor: float = _angle(1.0)  # llama3: frequencies below so many turns in rotary_original_len are divided
    rotary_high_factor: float = _angle(4.0)  # llama3: frequencies above so many turns in rotary_original_len stay
    rotary_beta_fast: float = _angle(32.0)  # yarn: frequencies above so many turns in rotary_original_len stay
    rotary_beta_slow: float = _angle(1.0)  # yarn: frequencies below so many turns in rotary_original_len are divided
    # yarn: whether the range of frequencies scaled in part is rounded to whole numbers
    rotary_rounds: bool = _angle(True)
    rotary_attention_factor: float | None = _angle(None)  # factor of cosines and sines; None: by the paper's formula
    rotary_short_factors: tuple[float, ...] | None = _angle(None)  # longrope: divisors up to rotary_original_len
    rotary_long_factors: tuple[float, ...] | None = _angle(None)  # longrope: divisors for longer texts

    @property
    def keys_of_scaling(self) -> tuple[str, ...]:
        """The keys that the chosen scaling reads."""
        return _READ_BY[self.rotary_scaling]

    def rotary_width(self, head_width: int) -> int:
        """Return the number of a head's numbers that are turned."""
        return int(head_width * self.rotary_share)

    @property
    def angle_factor(self) -> float:
        """The factor by which cosines and sines are multiplied: 1, except with the scalings yarn and longrope."""
        if self.rotary_scaling not in ("yarn", "longrope"):
            return 1.0
        if self.rotary_attention_factor is not None:
            return self.rotary_attention_factor
        if self.rotary_factor <= 1:
            return 1.0
        if self.rotary_scaling == "yarn":
            return 0.1 * math.log(self.rotary_factor) + 1.0
        return math.sqrt(1 + math.log(self.rotary_factor) / math.log(self.rotary_original_len or 1))

    def unused_rotary(self) -> Iterator[Problem]:
        """Yield a problem for each rotary setting that differs from its default and has no effect beside the others."""
        for key, usual in vars(RotarySettings()).items():
            rule = None if getattr(self, key) == usual else self._rule_against(key)
            way_out = f"{leave_out()}, which is {own(show(usual))}."
            yield from self.problem_if(rule is not None, key, rule or "", way_out)

    def _rule_against(self, key: str) -> str | None:
        """Return the rest of a sentence that says why the setting `key` has no effect beside the other settings, such
        as "has an effect only with ...". Return None if it has an effect.
        """
        if getattr(self, "positions", "rotary") == "learned":
            return "has an effect only with model.positions=rotary, and positions are learned"
        scaling, kinds = self.rotary_scaling, {kind for kind in getattr(self, "layer_kinds", ()) if kind.rotary}
        if not kinds:
            return "has an effect only in layers with rotary angles, and model.layer_pattern has none"
        if key == "local_rotary_base":
            has_window = any(kind.window for kind in kinds)
            return None if has_window else "has an effect only in layers with a window, and there are none"
        if key in _SCALING_KEYS and key not in _READ_BY[scaling]:
            readers = " or ".join(kind for kind, keys in _READ_BY.items() if key in keys)
            return f"has an effect only with model.rotary_scaling={readers}, and it is {scaling}"
        if key != "rotary_share" and self.local_rotary_base is not None and all(kind.window for kind in kinds):
            return "has an effect only in layers that read all tokens: local_rotary_base is set, and all have a window"
        if key == "rotary_factor" and scaling == "longrope" and self.rotary_attention_factor is not None:
            return "has an effect in longrope only with rotary_attention_factor=null, which is then computed from it"
        has_factor = self.rotary_factor != 1 or self.rotary_attention_factor is not None
        if key == "rotary_scaling" and scaling != "longrope" and not has_factor:
            return "has an effect only with another rotary_factor than 1"
        return None

    def rotary_problems(self, head_width: int) -> Iterator[Problem]:
        """Yield a problem for each rule that the rotary settings break in a model whose heads are `head_width` numbers
        wide.
        """
        if getattr(self, "positions", "rotary") == "learned" or head_width < 1:
            return
        width, kind = self.rotary_width(head_width), self.rotary_scaling
        original = f"Give the tokens of the original training's texts, such as {example(4096)}."
        yield from self.checked(
            (not 0 < self.rotary_share <= 1, "rotary_share",
             "is not a share of a head's numbers, which lies above 0 and up to 1", f"Use {own(1)} or {own(0.25)}."),
            self.above_0("local_rotary_base", f"Use {own(10000)}, or null."),
            self.above_0("rotary_attention_factor", f"Use {own(1)}, or null for the formula."),
            ("rotary_original_len" in self.keys_of_scaling and self.rotary_original_len is None, "rotary_original_len",
             f"must be set with rotary_scaling={kind}", original),
            (kind == "longrope" and self.rotary_original_len == 1, "rotary_original_len",
             "must be at least 2 with rotary_scaling=longrope", original),
            (kind == "llama3" and self.rotary_high_factor <= self.rotary_low_factor, "rotary_high_factor",
             f"must be above rotary_low_factor={self.rotary_low_factor:g}",
             f"Use {own(f'{4 * max(self.rotary_low_factor, 1):g}')}, or a smaller rotary_low_factor."),
            (kind == "yarn" and self.rotary_beta_fast <= self.rotary_beta_slow, "rotary_beta_fast",
             f"must be above rotary_beta_slow={self.rotary_beta_slow:g}",
             f"Use {own(f'{32 * max(self.rotary_beta_slow, 1):g}')}, or a smaller rotary_beta_slow."),
        )  # fmt: skip
        if kind == "longrope" and width % 2 == 0:
            for key in ("rotary_short_factors", "rotary_long_factors"):
                factors = getattr(self, key)
                yield from self.problem_if(
                    factors is None or len(factors) != width // 2 or min(factors, default=0.0) <= 0, key,
                    f"is not a list of {width // 2} numbers above 0, one for each frequency",
                    "Give those of the model's publication.",
                )  # fmt: skip
        if 0 < self.rotary_share <= 1:
            widths = range(head_width, head_width + _MAX_WIDER)
            even = next((size for size in widths if (turned := self.rotary_width(size)) and turned % 2 == 0), None)
            yield from problem_if(
                width % 2 == 1 or width == 0, "head_width", head_width,
                f"x rotary_share={self.rotary_share:g} is {width} numbers, and rotary positions turn pairs",
                f"{f'Use {own(even)}, another' if even else 'Give another'} width or share, or "
                f"{way('.positions=learned')}.",
            )  # fmt: skip
