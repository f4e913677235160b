"""A layout as users type it, `tp=2,pp=4`, and whether a model allows it. Torch-free.

Called by the commands that take a layout for something other than a run, whose settings say it key by key.
"""

from __future__ import annotations

from typing import Any

from lmtrain.config.build import build_settings
from lmtrain.errors import SettingsError, nearest, refusal
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.parallel_settings import AXES, ParallelSettings, layout_problems

KEYS = (*AXES, "zero", "schedule", "balance")


def parse_layout(text: str, before: ParallelSettings | None = None) -> ParallelSettings:
    """`tp=2,pp=4` -> settings. What is not named is 1; what does not belong to the layout stays as it was."""
    others = before.to_dict() if before else {}
    values: dict[str, Any] = {key: value for key, value in others.items() if key not in KEYS}
    for word in text.split(","):
        key, equals, value = (part.strip() for part in word.partition("="))
        key = {"dp": "dp_shard"}.get(key, key)
        if not equals or key in values or key not in KEYS:
            rule = "is there twice." if key in values else f"is not a layout. {nearest(key, KEYS)}"
            raise SettingsError([f"--to: {word!r} {rule} Give axes and sizes, as in tp=2,pp=4,dp_shard=2."])
        values[key] = int(value) if value.isdecimal() else value
    if values.get("vp", 1) != 1:
        values.setdefault("schedule", "interleaved")  # because: the others have one stage a rank, or are asked for
    return build_settings(ParallelSettings, values, "parallel")


def check_layout(model: ModelSettings, parallel: ParallelSettings) -> None:
    problems = layout_problems(model.shape, parallel, uses_dropout=False, compiles=False)
    texts = [problem.text() for problem in problems]
    if texts:
        raise refusal(texts)
