"""Each key of transformers' config class, at another value: it is honoured, refused by its name, or changes nothing."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.errors import LmtrainError
from lmtrain.exchange.huggingface.compare_with_transformers import quiet_transformers
from lmtrain.exchange.huggingface.config_json import settings_from_config
from lmtrain.exchange.huggingface.model_family_base import families
from tests.unit.exchange.huggingface.families.drawing import Config, Draw, configs
from tests.unit.exchange.huggingface.families.keys import (
    NOT_OF_THE_MODEL,
    NOT_TAKEN,
    OTHER_SETTINGS,
    SETTINGS,
    other_values,
)
from tests.unit.exchange.huggingface.families.twins import (
    TOLERANCE,
    Ours,
    difference,
    load_theirs,
    make_folder,
    plain,
    random_tokens,
    write_config,
)

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.wide
SEED = 2


def class_values(family: str) -> Config:
    """Return the keys of transformers' config class and of the base of all such classes, with their defaults."""
    with quiet_transformers(transformers):
        values: Config = transformers.AutoConfig.for_model(family).to_dict()
    old_form = {"rope_theta": None, "rope_scaling": None} if "rope_parameters" in values else {}
    return old_form | values


@pytest.mark.parametrize("family", configs())
def test_another_value_is_honoured_refused_by_name_or_inert(family: str, tmp_path: Path) -> None:
    keys = Keys(family, tmp_path)
    outcomes = {
        key: [keys.outcome(key, value) for value in other_values(key, keys.base.get(key, usual), keys.base)]
        for key, usual in class_values(family).items()
        if key not in NOT_OF_THE_MODEL
    }
    wrong = {key: found for key, found in outcomes.items() if set(found) - {"the same", "refused", "not theirs"}}
    assert not wrong
    never = {key for key, found in outcomes.items() if set(found) == {"not theirs"}}
    assert never <= NOT_TAKEN, f"transformers takes none of the values for {', '.join(sorted(never))}"


@pytest.mark.parametrize("family", sorted(families()))
def test_values_of_other_types_are_refused_or_unread(family: str) -> None:
    for key in families()[family].defaults:
        for value in ("odd", [1], {"odd": 1}, 2.5, -1, True, None, [["odd"]], float("nan")):
            with suppress(LmtrainError):
                settings_from_config(
                    {"model_type": family, "dtype": "float32", key: value}, "here", pair_head=False, dropout=0.0
                )


class Keys:
    """A family's model with plain rotary angles, and what becomes of it with another value of a key."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family, self.folder, self.count = family, folder, 0
        scaled = ("rope_scaling", "original_max_position_embeddings")
        drawn = configs()[family](Draw(family, SEED))
        groups = drawn.get("rope_parameters", {})
        for group in groups.values():
            group |= {"rope_type": "default"}
            group.pop("factor", None)
        types = {"dtype": "float32", "torch_dtype": "float32"}
        self.base = {key: value for key, value in drawn.items() if key not in scaled} | types
        self.good = make_folder(folder / "good", family, plain(self.base), SEED)
        self.settings = Ours.load(self.good).settings

    def outcome(self, key: str, value: Any) -> str:
        """Return what becomes of the model: "the same" logits in both programs, "refused" by the name of `key`, "not
        theirs" if transformers does not take the value, or what is wrong.
        """
        hiding = {"rope_parameters": ("rope_scaling", "rope_theta")}.get(key, ())
        config = {name: held for name, held in self.base.items() if name not in hiding} | {key: value}
        try:
            _, settings = settings_from_config({"model_type": self.family, **plain(config)}, "here", pair_head=False)
        except LmtrainError as error:
            names = (key, *(SETTINGS | OTHER_SETTINGS).get(key, ()))
            return "refused" if any(name in str(error) for name in names) else f"refused without its name: {error}"
        self.count += 1
        folder = self.folder / str(self.count)
        tokens = random_tokens(config["max_position_embeddings"], config["vocab_size"], SEED)
        try:
            if settings == self.settings:
                shutil.copytree(self.good, folder)
                write_config(folder, {"model_type": self.family, **plain(config)}, torch.float32)
            else:
                make_folder(folder, self.family, plain(config), SEED)
            with torch.no_grad():
                expected = load_theirs(folder)(tokens)[0]
        except Exception:  # because: each of its classes refuses in its own way
            return "not theirs"
        with torch.no_grad():
            found = difference(Ours.load(folder).logits(tokens), expected)
        return "the same" if found <= TOLERANCE else f"other logits: {found}"
