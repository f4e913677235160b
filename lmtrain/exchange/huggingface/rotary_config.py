"""Convert between our settings of rotary angles and the keys of config.json, in the forms of transformers 4 and 5.

transformers 4 reads rope_theta and rope_scaling; 5 reads rope_parameters, unless there is a rope_scaling. Both forms
are written. A file that the two would read differently is refused. Called by the families of decoders; torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from lmtrain.config.settings_base import show
from lmtrain.errors import shorten
from lmtrain.exchange.huggingface.model_family_base import Config
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.rotary_settings import RotarySettings

# The keys of transformers that decide the angles, with what is taken for those that are left out.
ROTARY_DEFAULTS: Mapping[str, Any] = {
    "rope_parameters": None, "rope_scaling": None, "rope_theta": None, "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
}  # fmt: skip
ROTARY_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")
DEFAULT_BASE = 10000.0
ORIGINAL_LENGTH = "original_max_position_embeddings"
_LARGEST = 1e30
# Our settings that rotary_entries writes: RotaryDecoder leaves them free, unless a family's words fix one.
ROTARY_WORDS = tuple(key for key in vars(RotarySettings()) if key not in ("local_rotary_base", "rotary_share"))
_COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# Keys of each type of scaling -> our settings.
_KEYS = {
    "default": {},
    "linear": {"factor": "rotary_factor"},
    "llama3": {
        "factor": "rotary_factor", "original_max_position_embeddings": "rotary_original_len",
        "low_freq_factor": "rotary_low_factor", "high_freq_factor": "rotary_high_factor",
    },
    "yarn": {
        "factor": "rotary_factor", "original_max_position_embeddings": "rotary_original_len",
        "beta_fast": "rotary_beta_fast", "beta_slow": "rotary_beta_slow", "truncate": "rotary_rounds",
        "attention_factor": "rotary_attention_factor",
    },
    "longrope": {
        "factor": "rotary_factor", "original_max_position_embeddings": "rotary_original_len",
        "short_factor": "rotary_short_factors", "long_factor": "rotary_long_factors",
        "attention_factor": "rotary_attention_factor",
    },
}  # fmt: skip
_MUST = {
    "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}  # fmt: skip


def rotary_entries(s: GPTSettings, *, default_share: float | None = None) -> Config:
    """Return the entries of config.json for the rotary angles of a decoder whose layers all have the same, in the forms
    of transformers 4 and 5. `default_share` is the share of a head's numbers that the family rotates where the key
    partial_rotary_factor is left out; None if it has no such key.
    """
    # because: transformers 4 reads the base and the share alone, 5 the group
    share = {"partial_rotary_factor": s.rotary_share} if default_share not in (None, s.rotary_share) else {}
    entries: Config = {"rope_theta": s.rotary_base, **share}
    scaling = rope_scaling(s)
    if scaling["rope_type"] != "default":
        entries["rope_scaling"] = scaling
    if s.rotary_scaling == "longrope":
        entries["original_max_position_embeddings"] = s.rotary_original_len  # because: transformers 4 reads it here
    return entries | {"rope_parameters": scaling | {"rope_theta": s.rotary_base, **share}}


def rope_scaling(s: GPTSettings) -> Config:
    """Return the entry rope_scaling of config.json: the type of scaling of `s` and all its numbers, defaults included.
    Without scaling that is {"rope_type": "default"}.
    """
    kind = "default" if s.rotary_scaling == "none" else s.rotary_scaling
    values = {key: getattr(s, setting) for key, setting in _KEYS[kind].items()}
    if "attention_factor" in values:
        values["attention_factor"] = s.angle_factor
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return {"rope_type": kind} | lists


def rotary_settings(
    c: Config, problems: list[str], *, default_base: float = DEFAULT_BASE, default_share: float | None = None
) -> Config:
    """Return lmtrain's settings of the rotary angles in the config.json `c`, completed with ROTARY_DEFAULTS. Append a
    message to `problems` for angles that lmtrain does not compute or that transformers 4 and 5 read differently. Where
    the file states none, `default_base` is the base, and `default_share` the share of a head's numbers that are
    rotated; None if the family always rotates all of them.
    """
    # because: transformers 5 takes rope_parameters only if there is no rope_scaling, and 4 never takes it
    key = "rope_scaling" if c["rope_scaling"] else "rope_parameters"
    rope = c[key] or {}
    if not isinstance(rope, dict):
        problems.append(f"{key}={show(rope)} would have to be a group")
        rope = {}
    has_old_form = key == "rope_scaling"
    base = value_of_both_forms(
        "rope_theta", c["rope_theta"], rope.get("rope_theta"), key, default_base, problems, has_old_form=has_old_form
    )
    values = {"rotary_base": base} | scaling_settings(rope, key, c, problems)
    shares = (c["partial_rotary_factor"], rope.get("partial_rotary_factor"))
    if default_share is not None:
        share = value_of_both_forms(
            "partial_rotary_factor", *shares, key, default_share, problems, has_old_form=has_old_form
        )
        return values | {"rotary_share": share}
    if any(share not in (None, 1.0) for share in shares):
        problems.append(f"partial_rotary_factor in config.json or {key} would have to be 1, over the whole head")
    return values


def value_of_both_forms(
    name: str, outside: object, inside: object, key: str, default: object, problems: list[str], *, has_old_form: bool
) -> Any:
    """Return a rotary base or share from a config.json: `inside`, the value in the group `key`, or else `outside`, the
    value of the key `name` beside the group, or else `default`. Append a message to `problems` if both are given and
    differ. If `has_old_form`, the file has a rope_scaling, and a missing `outside` counts as `default`, as in
    transformers 4.
    """
    if outside is None and has_old_form:
        outside = default  # because: transformers 4 takes neither a base nor a share from a group
    found = [value for value in (inside, outside) if value is not None]
    if len(found) == 2 and found[0] != found[1]:
        problems.append(f"{name}={show(outside)} would have to be {show(found[0])}, as in {key}")
    return found[0] if found else default


def scaling_settings(rope: Config, key: str, c: Config, problems: list[str]) -> Config:
    """Return lmtrain's settings for the scaling of rotary angles in `rope`, the group at `key` (rope_scaling or
    rope_parameters) of the config.json `c`. Append a message to `problems` for a scaling that lmtrain does not compute
    or that transformers 4 and 5 read differently. Return {} if its type is unknown.
    """
    kind = angle_type(rope)
    if rope.get("type", kind) != kind:
        problems.append(f"{key} has rope_type={shorten(kind)} and type={shorten(rope['type'])}, which must be equal")
    if not isinstance(kind, str) or kind not in _KEYS:
        problems.append(f"{key} has angles of type {shorten(kind)}, which would have to be {', '.join(_KEYS)}")
        return {}
    if key != "rope_scaling" and kind != "default" and c["rope_theta"] is not None:
        problems.append(
            f"{key} would have to be without rope_theta={show(c['rope_theta'])} beside it, or with a rope_scaling of "
            f"the same {kind} angles: transformers 4 reads those two keys alone"
        )
    keys = _KEYS[kind]
    known = {*keys, *_COMMON_KEYS, *(("mscale", "mscale_all_dim") if kind == "yarn" else ())}
    if unknown := sorted(str(name) for name, value in rope.items() if name not in known and value is not None):
        problems.append(f"{key} has {shorten(unknown[0])}, which {kind} angles lack")
    if missing := [name for name in _MUST.get(kind, ()) if rope.get(name) is None]:
        problems.append(f"{key} lacks {missing[0]}, which {kind} angles need")
    values = {setting: rope[name] for name, setting in keys.items() if rope.get(name) is not None}
    if "rotary_original_len" in keys.values():
        values |= _original_length(rope, kind, key, c, problems)
    for name, setting in keys.items():
        if name in ("short_factor", "long_factor") and not isinstance(values.get(setting), list):
            problems.append(f"{name} in {key} would have to be a list of numbers")
            values.pop(setting, None)
    if kind == "yarn":
        # because: transformers takes the default for a 0
        for setting in ("rotary_beta_fast", "rotary_beta_slow"):
            if values.get(setting) == 0:
                del values[setting]
        values |= _mscale_factor(rope, values)
    values["rotary_scaling"] = "none" if kind == "default" else kind
    return _without_usual_attention_factor(values)


def angle_type(group: Config) -> Any:
    """Return the type of the angles of a group of config.json."""
    return group.get("rope_type", group.get("type", "default"))


def check_numbers_of_group(group: Config, kind: object, key: str, c: Config, problems: list[str]) -> None:
    """Append a message to `problems` if transformers 5 would take other numbers than 4 from a group of rotary entries:
    an original length that is beside the group only, or a `truncate` that is false. `group` has angles of the type
    `kind` and is called `key` in messages; `c` is the config.json around it.
    """
    original = c[ORIGINAL_LENGTH]
    is_lost = group.get(ORIGINAL_LENGTH) is None and original not in (None, c["max_position_embeddings"])
    if is_lost and kind in ("llama3", "yarn", "longrope"):
        problems.append(
            f"{ORIGINAL_LENGTH}={show(original)} would have to be in {key} too, where transformers 5 reads it"
        )
    if group.get("truncate") not in (None, True):
        problems.append(f"truncate={show(group['truncate'])} of {key} would have to be true: transformers 5 takes that")


def _original_length(rope: Config, kind: str, key: str, c: Config, problems: list[str]) -> Config:
    """Return the setting rotary_original_len, the length in tokens of the texts of the original training, for the group
    `rope` at `key` of the config.json `c`. If the group states no factor, also return rotary_factor,
    max_position_embeddings divided by that length. Append a message to `problems` where transformers 4 and 5 would take
    other values.
    """
    name, longest = ORIGINAL_LENGTH, c["max_position_embeddings"]
    inside, outside = rope.get(name), c.get(name)
    if inside is not None and outside is not None and inside != outside:
        problems.append(f"{name}={show(outside)} would have to be {show(inside)}, as in {key}")
    if key == "rope_scaling" and kind == "longrope" and outside is None and inside not in (None, longest):
        problems.append(f"{name}={show(inside)} of {key} would have to be beside it too, where transformers 4 reads it")
    if key == "rope_scaling" and kind != "longrope" and inside is None and outside not in (None, longest):
        problems.append(f"{name}={show(outside)} would have to be in {key} too, where transformers 4 reads it")
    original = next((value for value in (outside, inside, longest) if value is not None), None)
    values: Config = {"rotary_original_len": original}
    factor = rope.get("factor")
    if not is_number(original) or not is_number(longest):
        return values
    implied = longest / original if original else 1.0
    if factor is None:
        values["rotary_factor"] = max(implied, 1.0) if kind == "longrope" else implied
    elif kind == "longrope" and rope.get("attention_factor") is None and outside is not None and factor != implied:
        problems.append(
            f"factor={show(factor)} of {key} would have to be {show(implied)}, the ratio of max_position_embeddings to "
            f"{name}, which transformers 4 takes"
        )
    return values


def _mscale_factor(rope: Config, values: Config) -> Config:
    """Return {"rotary_attention_factor": factor of cosines and sines} of YaRN angles that state mscale and
    mscale_all_dim in its place. Return {} if they state the factor itself, or if one of the two is missing or 0. `rope`
    is the group in config.json, and `values` are the settings read from it so far.
    """
    scales: tuple[Any, Any] = (rope.get("mscale"), rope.get("mscale_all_dim"))
    factor: Any = values.get("rotary_factor")
    if (
        values.get("rotary_attention_factor") is not None
        or not all(map(is_number, (*scales, factor)))
        or not all(scales)  # because: transformers takes the usual factor unless both are given
    ):
        return {}
    above, below = (1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0 for scale in scales)
    return {"rotary_attention_factor": above / below}


def _without_usual_attention_factor(values: Config) -> Config:
    """Return `values`, the settings of a scaling of rotary angles, without rotary_attention_factor if that is the value
    which lmtrain computes where it is left out; unchanged otherwise.
    """
    keys = ("rotary_attention_factor", "rotary_factor", "rotary_original_len")
    if not all(is_number(values.get(key)) for key in keys) or values["rotary_original_len"] < 2:
        return values
    without = {key: value for key, value in values.items() if key != keys[0]}
    usual = RotarySettings(**{key: without[key] for key in (*keys[1:], "rotary_scaling")}).angle_factor
    return without if usual == values[keys[0]] else values


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value of a config.json is a number, and not so large that arithmetic with it fails."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST
