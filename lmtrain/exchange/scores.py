"""What a model says of random tokens, to see that weights moved elsewhere are still the same model.

Called after an export. The model is run on the CPU part by part, so that no more than one block and one embedding is
in memory, whatever the size of the model. Knows weights by name alone and not where they come from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lmtrain.batch import Batch
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.model_settings import ModelSettings
from lmtrain.models.stack import Stack

_LONGEST = 512
_LENGTH = 64


def random_batch(settings: ModelSettings, seed: int = 0) -> Batch:
    """Two rows, longer than a sliding window if possible; an encoder's are pairs, and the second is padded."""
    shape = settings.shape
    length = min(shape.seq_len, max(_LENGTH, min(2 * (shape.window or 0), _LONGEST)))
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(shape.vocab_size, (2, length), generator=generator)
    if shape.causal:
        return Batch(tokens, tokens)
    at = torch.arange(length)
    ends = torch.tensor([[length], [-(-3 * length // 4)]])
    return Batch(tokens, tokens, segments_BT=(at >= length // 3).long().expand(2, -1), real_BT=at < ends)


@torch.no_grad()
def answers(settings: ModelSettings, weight: Callable[[str], Tensor], batch: Batch) -> list[Tensor]:
    """fp32 scores of every real token over the true vocabulary, and those of a pair head. `weight` gives true rows."""
    with torch.device("meta"):
        model = cast(Stack, settings.build()).eval()
    first = {tie.second: tie.first for tie in settings.ties()}

    def run(path: str, *inputs: Any) -> Tensor:
        part = model.get_submodule(path).to_empty(device="cpu")
        for name, parameter in part.named_parameters(prefix=path):
            value = weight(first.get(name, name))
            parameter.zero_()[: len(value)] = value
        result: Tensor = part(*inputs)
        part.to_empty(device="meta")
        return result

    x_BTD, around = run("embedding", batch), model.surroundings(batch)
    for layer in model.blocks:
        x_BTD = run(f"blocks.{layer}", x_BTD, around)
    if model.norm is not None:
        x_BTD = run("norm", x_BTD)
    real = torch.ones_like(batch.tokens_BT, dtype=torch.bool) if batch.real_BT is None else batch.real_BT
    result = [run("head", x_BTD[real])[:, : settings.shape.vocab_size]]
    pair: nn.Module | None = getattr(model, "pair", None)
    return result if pair is None else [*result, run("pair", x_BTD)]


def largest_difference(left: list[Tensor], right: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


def largest(values: list[Tensor]) -> float:
    return max(float(value.abs().max()) for value in values)


@torch.no_grad()
def transformers_answers(folder: Path, settings: ModelSettings, batch: Batch) -> tuple[str, list[Tensor]] | None:
    """The same of transformers' own model of a folder, and its version; None where it is not installed."""
    try:
        import transformers  # because: optional
    except ImportError:
        return None
    encoder = isinstance(settings, BertSettings)
    masked = isinstance(settings, BertSettings) and not settings.pair_head
    name = "AutoModelForMaskedLM" if masked else "AutoModelForPreTraining" if encoder else "AutoModelForCausalLM"
    bars, logger = transformers.utils.logging, transformers.utils.logging.get_logger("transformers")
    was_shown, was_said = bars.is_progress_bar_enabled(), logger.level
    bars.disable_progress_bar()
    bars.set_verbosity_error()
    try:
        theirs = getattr(transformers, name).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        theirs = theirs.float().eval()
        inputs = {"input_ids": batch.tokens_BT}
        if encoder:
            inputs |= {"attention_mask": batch.real_BT.long(), "token_type_ids": batch.segments_BT}
        found = theirs(**inputs)
    finally:
        if was_shown:
            bars.enable_progress_bar()
        logger.setLevel(was_said)
    if not encoder:
        return transformers.__version__, [found.logits.flatten(0, 1)]
    if masked:
        return transformers.__version__, [found.logits[batch.real_BT]]
    return transformers.__version__, [found.prediction_logits[batch.real_BT], found.seq_relationship_logits]
