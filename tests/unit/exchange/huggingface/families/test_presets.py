"""A preset of a released model is computed by that model's own family of transformers."""

from __future__ import annotations

import pytest

from lmtrain.exchange.huggingface.config_json import hf_family
from tests.contracts.test_models import EXACT, settings_of

FAMILIES = {  # the first letters of a preset's name -> model_type
    "llama": "llama", "smollm2": "llama", "qwen2.5": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2",
    "gemma3": "gemma3_text", "pythia": "gpt_neox", "olmo2": "olmo2", "smollm3": "smollm3",
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_a_preset_is_of_the_family_of_its_release(name: str) -> None:
    (family,) = (family for start, family in FAMILIES.items() if name.startswith(start))
    assert hf_family(settings_of(name)) == family
