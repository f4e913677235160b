"""A model in transformers and the same in lmtrain: hot weights, logits, gradients, and settings that must be seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtrain.batch import Batch
from lmtrain.config.settings_base import Settings
from lmtrain.errors import SettingsError
from lmtrain.exchange.huggingface.compare_with_transformers import quiet_transformers
from lmtrain.exchange.huggingface.folder_reader import HFFolder
from lmtrain.exchange.huggingface.model_family_base import families, weight_mappings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.rotary_settings import RotarySettings
from tests.unit.exchange.huggingface.families.drawing import Config
from tests.unit.exchange.models import tokenizer_for

TOLERANCE = 1e-5  # of the largest logit: some three times rounding with such weights
SEEN = 1e-4  # of the largest logit: what each setting, changed alone, must move


def make_folder(folder: Path, family: str, config: Config, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """Save transformers' model of a config.json with hot weights as a folder with a tokenizer. The config.json that
    is written is `config`, not what transformers would make of it.
    """
    import transformers

    with quiet_transformers(transformers):
        made = transformers.AutoConfig.for_model(family, **plain(config))
        model = transformers.AutoModelForCausalLM.from_config(made)
        heat(model, seed)
        # because: some values that a config.json may ask for are refused
        model.generation_config = transformers.GenerationConfig()
        model.to(dtype).save_pretrained(folder)
    write_config(folder, {"model_type": family, "architectures": [type(model).__name__], **config}, dtype)
    words = tokenizer_for(GPTSettings(num_layers=1, width=8, num_heads=1, seq_len=8))
    words.save(folder / "tokenizer.json")
    return folder


def plain(config: Config) -> Config:
    """Return a copy, since transformers changes what it is given."""
    copied: Config = json.loads(json.dumps(config))
    return copied


def write_config(folder: Path, config: Config, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": name, "dtype": name}))


def heat(model: Any, seed: int) -> None:
    """Fill a model with weights so large that every branch, bias and norm is seen in the logits."""
    generator = torch.Generator().manual_seed(seed)
    # because: of eight such layers fp32's rounding errors would be seen too
    size = 1.5 if model.config.num_hidden_layers < 8 else 1.25
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(size * noise / weight.shape[1] ** 0.5)
            elif name.endswith("bias"):
                weight.copy_(0.3 * noise)
            else:  # because: a norm's weight starts at 1, or at 0 where 1 is added to it
                weight.copy_(weight.round().clamp(0, 1) + 0.2 * noise)


def load_theirs(folder: Path) -> Any:
    import transformers

    family = families()[json.loads((folder / "config.json").read_text())["model_type"]]
    options = {"attn_implementation": "eager", **family.load_options}
    with quiet_transformers(transformers):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
        return model.float().eval()


@dataclass
class Ours:
    """lmtrain's model of a Hugging Face folder."""

    settings: GPTSettings
    weights: dict[str, Tensor]  # by our names, without rows of padding
    family: str

    @classmethod
    def load(cls, folder: Path) -> Ours:
        source = HFFolder(folder)
        mappings = source.check_weights()
        settings = source.settings
        assert isinstance(settings, GPTSettings)
        read = source.weight_reader(settings)
        return cls(settings, {mapping.name: read(mapping.name).float() for mapping in mappings}, source.family)

    def build(self, settings: GPTSettings | None = None) -> Any:
        """Build the model, with other settings that keep the weights' shapes if they are given."""
        model: Any = (settings or self.settings).build()
        first = {tie.second: tie.first for tie in self.settings.ties()}
        with torch.no_grad():
            for name, weight in model.named_parameters(remove_duplicate=False):
                value = self.weights[first.get(name, name)]
                assert weight.shape[1:] == value.shape[1:], name
                weight.zero_()[: len(value)] = value
        return model.eval()

    def logits(self, tokens: Tensor, settings: GPTSettings | None = None) -> Tensor:
        return scores(self.build(settings), tokens, self.settings)


def scores(model: Any, tokens: Tensor, settings: GPTSettings) -> Tensor:
    logits: Tensor = model.logits(model(Batch(tokens, tokens)))
    return logits[..., : settings.vocab_size]


def random_tokens(length: int, vocab_size: int, seed: int) -> Tensor:
    return torch.randint(vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))


def lengths(settings: GPTSettings) -> list[int]:
    """Return 1, those around the window and the original length, and the longest: four times the original one."""
    around = [settings.window, settings.rotary_original_len]
    chosen = {1, settings.seq_len, *(value + d for value in around if value for d in (-1, 0, 1))}
    return sorted(length for length in chosen if 0 < length <= settings.seq_len)


def difference(left: Tensor, right: Tensor) -> float:
    """Return the largest difference in shares of the largest number on the right."""
    return float((left - right).abs().max() / right.abs().max())


def gradients(model: Any, logits: Tensor, seed: int) -> dict[str, Tensor]:
    factors = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
    torch.autograd.backward((logits * factors).sum() / logits.numel())
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def their_gradients_in_our_form(ours: Ours, theirs: dict[str, Tensor], state_name: dict[str, str]) -> dict[str, Tensor]:
    """Return transformers' gradients joined as our weights are. `state_name` maps names in files to those in memory."""
    result = {}
    for mapping in weight_mappings(ours.settings, ours.family):
        parts = [theirs[state_name.get(tensor.name, tensor.name)] for tensor in mapping.hf_tensors]
        rows = [
            (parts[place.tensor].T if mapping.transposed else parts[place.tensor])[place.rows.start : place.rows.stop]
            for place in mapping.places(range(mapping.shape[0]))
        ]
        result[mapping.name] = torch.cat(rows)
    return result


# What each setting that acts in an evaluation becomes, if that is not the number times one of _FACTORS. Small changes
# of the first and last pair that YaRN mixes may be rounded away.
_FACTORS = {"rotary_beta_fast": (4.0, 0.25), "rotary_beta_slow": (4.0, 0.25)}
_OTHER: dict[str, Any] = {
    "activation": {"silu": "gelu", "gelu": "gelu_tanh", "gelu_tanh": "gelu", "relu": "gelu", "relu2": "relu"},
    "norm_weight": {"ones": "from_zero", "from_zero": "ones"},
    "rotary_rounds": {True: False, False: True},
}
_TIMES = (
    "norm_eps", "rotary_base", "local_rotary_base", "rotary_factor", "rotary_low_factor", "rotary_high_factor",
    "rotary_beta_fast", "rotary_beta_slow", "embedding_scale", "residual_scale", "logit_scale", "attention_cap",
    "logit_cap",
)  # fmt: skip


def other_settings(s: GPTSettings) -> dict[str, list[GPTSettings]]:
    """Return settings that differ in one key from `s`, for each key that acts in an evaluation and keeps the shapes of
    weights. Of several one has to be seen.
    """
    result: dict[str, list[GPTSettings]] = {}
    for key, settings in _other_settings(s):
        result.setdefault(key, []).append(settings)
    return result


def _other_settings(s: GPTSettings) -> Iterator[tuple[str, GPTSettings]]:
    unread = {problem.key for key in vars(RotarySettings()) for problem in _unread(s, key)}
    for key in _TIMES:
        value = getattr(s, key)
        is_idle = key == "rotary_factor" and s.rotary_scaling in ("yarn", "longrope") and s.rotary_attention_factor
        if value is not None and key not in unread and not (is_idle and s.rotary_scaling == "longrope"):
            for factor in _FACTORS.get(key, (1.5,)):
                yield key, _changed(s, key, value * factor)
    for key, words in _OTHER.items():
        value = getattr(s, key)
        if value in words and key not in unread:
            yield key, _changed(s, key, words[value])
    yield "attention_scale", _changed(s, "attention_scale", 1.2 * (s.attention_scale or s.head**-0.5))
    if s.rotary_scaling in ("yarn", "longrope"):
        yield "rotary_attention_factor", _changed(s, "rotary_attention_factor", 1.2 * s.angle_factor)
    if s.rotary_original_len is not None:
        for length in (2 * s.rotary_original_len, 8 * s.rotary_original_len):
            yield "rotary_original_len", _changed(s, "rotary_original_len", length)
    for key in ("rotary_short_factors", "rotary_long_factors"):
        if factors := getattr(s, key):
            yield key, _changed(s, key, tuple(1.2 * factor for factor in factors))
    if s.window is not None and any(kind.window for kind in s.layer_kinds):
        yield "window", _changed(s, "window", s.window - 1)
    if s.positions == "rotary":
        letters = "".join(
            ("w" if kind.window else "f") if kind.rotary else ("W" if kind.window else "F") for kind in s.layer_kinds
        )
        for layer, letter in enumerate(letters):
            pattern = letters[:layer] + letter.swapcase() + letters[layer + 1 :]
            yield f"layer_pattern of {layer}", _changed(s, "layer_pattern", pattern)
    if s.qk_norm == "none" and s.num_layers > 1 and s.norm_order == "pre" and s.parallel_block == "two_norms":
        yield "parallel_block", _changed(s, "parallel_block", "no")


def _unread(s: Settings, key: str) -> Iterator[Any]:
    """Yield the problem of a rotary setting that has no effect beside the others."""
    assert isinstance(s, GPTSettings)
    value = getattr(s, key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        if key == "rotary_rounds" and s.rotary_scaling != "yarn":
            yield from _changed(s, key, not value).unused_rotary()
        return
    try:
        yield from (problem for problem in _changed(s, key, value * 1.5).unused_rotary() if problem.key == key)
    except SettingsError:
        return


def _changed(s: GPTSettings, key: str, value: Any) -> GPTSettings:
    changes: Any = {key: value}
    return replace(s, **changes)
