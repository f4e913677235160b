"""Damaged folders of each family are refused, with a message that names what is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from lmtrain.errors import LmtrainError
from tests.unit.exchange.huggingface.families.damage import damages
from tests.unit.exchange.huggingface.families.drawing import Draw, configs
from tests.unit.exchange.huggingface.families.twins import Ours, make_folder

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.wide
MOST_CHARACTERS = 1500  # of a message


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("family", configs())
def test_each_damage_is_refused_by_name(family: str, seed: int, tmp_path: Path) -> None:
    config = configs()[family](Draw(family, seed)) | {"tie_word_embeddings": seed == 1}
    good = make_folder(tmp_path / "good", family, config, seed, torch.float32)
    settings = Ours.load(good).settings
    found = list(damages(good, family))
    assert len(found) >= 40
    wrong = []
    for number, (what, word, damage) in enumerate(found):
        folder = tmp_path / str(number)
        shutil.copytree(good, folder)
        damage(folder)
        try:
            if Ours.load(folder).settings != settings or "rope" not in what:
                wrong.append(f"{what}: it is taken")  # a model of one layer may read none of the keys of angles
        except LmtrainError as error:
            if not any(part in str(error) for part in word.split("|")):
                wrong.append(f"{what}: the message does not say {word}: {error}")
            if len(str(error)) > MOST_CHARACTERS:
                wrong.append(f"{what}: the message has {len(str(error))} characters")
        except Exception as error:  # because: the list says which, and goes on
            wrong.append(f"{what}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
