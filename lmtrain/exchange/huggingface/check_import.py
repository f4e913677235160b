"""Check an import from a Hugging Face folder: what is taken and left out, and whether transformers computes the same.

Called before the import writes anything. The comparison finds what no rule knows of: a setting in config.json that
changes what is computed and that lmtrain does not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lmtrain.errors import CheckpointError, shorten
from lmtrain.exchange.huggingface.config_json import ignored_keys
from lmtrain.exchange.huggingface.family import families
from lmtrain.exchange.huggingface.folder_reader import HFFolder
from lmtrain.exchange.huggingface.import_and_export import (
    TOLERANCE,
    largest_difference,
    memory_problem,
    model_scores,
    random_batch,
    transformers_scores,
)
from lmtrain.runtime.files.safe_files import read_json

_ROUNDINGS = 4  # because: the other program's sums are rounded too, in another order


def check_import(folder: Path, dropout: object) -> dict[str, Any]:
    """Return the facts about an import of the Hugging Face folder `folder`: the numbers of its tensors that are read,
    the tensors and keys that are not, each with the reason, and the comparison of logits with transformers. `dropout`,
    if given, overrides that of config.json. Raise CheckpointError if the logits differ by more than rounding.
    """
    source = HFFolder(folder, dropout)
    source.check_weights()
    left_out = source.left_out()
    return {
        "tensors_read": source.num_tensors - len(left_out), "left_out": left_out,
        "ignored": ignored_keys(read_json(folder / "config.json")),
    } | _compare_with_transformers(source)  # fmt: skip


def _compare_with_transformers(source: HFFolder) -> dict[str, Any]:
    """Return the facts of a comparison of logits on random tokens, by lmtrain's model and by transformers', both with
    the folder's weights; if transformers cannot be asked, the reason. Raise CheckpointError if they differ.
    """
    family = families()[source.family]
    settings = family.in_fp32(source.settings)
    if problem := memory_problem(settings):
        return {"compared_with": f"nothing: {problem}"}
    batch = random_batch(settings)
    try:
        answer = transformers_scores(source.path, settings, batch, family.load_options)
    except Exception as error:  # because: any of its parts may refuse a folder, each in its own way
        return {"compared_with": f"nothing: transformers does not load the folder ({shorten(error)})"}
    if answer is None:
        return {"compared_with": "nothing: transformers is not installed"}
    version, expected = answer
    scores = model_scores(settings, source.weight_reader(settings), batch)
    difference = largest_difference(scores, expected)
    allowed = TOLERANCE * max(1.0, *(float(value.abs().max()) for value in expected))
    if difference > allowed:  # because: deep models, and those with outliers, round more; this costs another pass
        exact = model_scores(settings, source.weight_reader(settings), batch, torch.float64)
        allowed = max(allowed, _ROUNDINGS * largest_difference(scores, exact))
    if not difference <= allowed:
        raise CheckpointError(
            f"{source.path} is a model of which lmtrain computes other logits than transformers {version}: they differ "
            f"by {difference:g}, and at most {allowed:g} can be rounding. Nothing was imported. Please report this "
            "with the model's config.json."
        )
    return {
        "compared_with": f"transformers {version}", "tokens_compared": batch.tokens_BT.numel(),
        "largest_difference": difference, "allowed_difference": allowed,
    }  # fmt: skip
