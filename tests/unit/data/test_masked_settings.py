"""Settings of masked data report their own problems; conf/data/masked.yaml needs only the path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.data.data_settings import MaskedSettings
from lmtrain.errors import SettingsError


def test_the_config_holds_the_defaults(repository: Path) -> None:
    tree = OmegaConf.to_container(OmegaConf.load(repository / "conf" / "data" / "masked.yaml"))
    assert isinstance(tree, dict)
    with pytest.raises(SettingsError, match=r"data\.path is not set"):
        build_settings(MaskedSettings, tree, "data")
    assert build_settings(MaskedSettings, tree | {"path": "books"}, "data") == MaskedSettings(path="books")


@pytest.mark.parametrize(("most", "share"), [(None, 0.15), (20, 20 / 512), (400, 0.15)])
def test_no_more_tokens_are_scored_than_may_be_predicted(most: int | None, share: float) -> None:
    assert MaskedSettings(path="books", max_predictions=most).scored_share(512) == share


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"pairs": "next_sentence", "min_sentences": 1}, "min_sentences=1 must be at least 2 with pairs=next_sentence"),
        ({"pairs": "none", "min_sentences": 0}, "min_sentences=0 must be at least 1"),
        ({"short_share": 1.1}, "short_share=1.1 must lie in"),
        ({"mask_share": 0.0}, "mask_share=0.0 must lie between"),
        ({"mask_share": float("nan")}, "mask_share=nan"),
        ({"max_predictions": 0}, "max_predictions=0 must be at least 1"),
        ({"max_ngram": 0}, "max_ngram=0 must lie in"),
        ({"order": "megatron", "pairs": "next_sentence"}, "order=megatron supports"),
        ({"document_mask": True}, "document_mask=true has no meaning"),
        ({"packing": "document"}, "packing=document has no meaning"),
        ({"path": ""}, "names no dataset"),
        ({"split": ()}, "one to three"),
    ],
)
def test_wrong_values(values: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        MaskedSettings(**({"path": "books"} | values))
