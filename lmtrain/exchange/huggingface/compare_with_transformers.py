"""Compare lmtrain's model and tokenizer with those that transformers reads from the same Hugging Face folder.

Called before an import writes anything, and before an exported folder takes its name. The comparison of logits finds
what no rule knows of: a setting in config.json that changes what is computed and that lmtrain does not read.
transformers is optional, and only then imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from lmtrain.batch import Batch
from lmtrain.errors import CheckpointError, shorten
from lmtrain.exchange.huggingface.config_json import ignored_keys
from lmtrain.exchange.huggingface.exported_tokenizer_files import tokenizer_class_to_load
from lmtrain.exchange.huggingface.folder_reader import HFFolder
from lmtrain.exchange.huggingface.model_family_base import families
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.block_stack import Stack
from lmtrain.models.model_settings import ModelSettings
from lmtrain.runtime.files.atomic_files import read_json
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.units import format_bytes

# because: kernels add in other orders; of the largest score this is some eight times fp32's rounding in a long sum
TOLERANCE = 1e-5
_LENGTH, _LONGEST = 64, 512  # tokens in a random row whose scores are compared
_ROUNDINGS = 4  # because: the other program's sums are rounded too, in another order
# Texts whose ids depend on the rules around a vocabulary: case, accents, spaces, bytes, spellings of special tokens.
_TEXTS = (
    "The cat", " the  Cat ", "", "\n\n a\tb", "na\u00efve caf\u00e9 e\u0301", "\u65e5\u672c\u8a9e 12345", "I'LL don't",
    "\U0001f600\x00\u200d", "<s>a</s> [MASK] <|endoftext|>",
)  # fmt: skip


def check_import(folder: Path, dropout: object) -> dict[str, Any]:
    """Check the Hugging Face folder `folder` before an import, and return the facts to report: how many tensors are
    read, which tensors and config.json keys are not, each with the reason, and how far lmtrain's logits are from those
    of transformers. Raise CheckpointError if they differ by more than rounding. `dropout`, if given, overrides
    config.json.
    """
    source = HFFolder(folder, dropout)
    source.check_weights()
    left_out = source.left_out()
    return {
        "tensors_read": source.num_tensors - len(left_out), "left_out": left_out,
        "ignored": ignored_keys(read_json(folder / "config.json")),
    } | _compare_with_transformers(source)  # fmt: skip


def _compare_with_transformers(source: HFFolder) -> dict[str, Any]:
    """Compare the logits on random tokens of lmtrain's model and of transformers' model, both with the folder's
    weights. Return the facts to report: transformers' version, the number of tokens, the largest difference and the
    allowed one; or only why nothing was compared. Raise CheckpointError if the difference is larger than allowed.
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


def compare_scores(
    folder: Path, settings: ModelSettings, source: Callable[[str], Tensor], *, exact: bool
) -> dict[str, Any]:
    """Check an exported `folder` by the logits on random tokens of three models: lmtrain's with the source's weights
    (`source` returns one by name), lmtrain's with the folder's, and transformers' with the folder's, if it is installed
    and memory suffices. Raise CheckpointError if the last two differ by more than rounding, or if `exact` and the first
    two differ at all. Return the facts to report, such as the largest difference.
    """
    opened = HFFolder(folder)
    family = families()[opened.family]
    settings, batch = family.in_fp32(settings), random_batch(settings)
    expected = model_scores(settings, source, batch)
    exported = model_scores(settings, opened.weight_reader(settings), batch)
    rounding = largest_difference(expected, exported)
    if exact and rounding:
        raise CheckpointError(
            f"The export {folder} does not hold the weights of its source: logits differ by {rounding:g}. Try again."
        )
    facts: dict[str, Any] = {"tokens_compared": batch.tokens_BT.numel(), "largest_difference": rounding}
    answer = None if memory_problem(settings) else transformers_scores(folder, settings, batch, family.load_options)
    if answer is None:
        return facts | {"compared_with": "lmtrain"}
    version, scores = answer
    difference = largest_difference(exported, scores)
    allowed = TOLERANCE * max(1.0, *(float(value.abs().max()) for value in exported))
    if not difference <= allowed:
        raise CheckpointError(
            f"transformers {version} computes logits that differ from lmtrain's by {difference:g}; at most {allowed:g} "
            "can be rounding. The export was removed. Please report this with the model's settings."
        )
    return facts | {
        "compared_with": f"transformers {version}", "largest_difference": largest_difference(expected, scores)
    }  # fmt: skip


def memory_problem(settings: ModelSettings) -> str:
    """Return a message if transformers, which loads a model whole and here in fp32, would need half of this machine's
    memory or more; an empty text otherwise.
    """
    need, memory = 4 * settings.num_parameters, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need < memory // 2:
        return ""
    return f"transformers would need {format_bytes(need)}, more than half of the memory ({format_bytes(memory)})"


def random_batch(settings: ModelSettings) -> Batch:
    """Return a batch of two rows of random tokens, the same at every call. A row has 64 to 512 tokens, if possible
    twice the model's sliding window, but never more than its seq_len. For an encoder the rows are sentence pairs, and
    the second is padded.
    """
    shape = settings.shape
    length = min(shape.seq_len, max(_LENGTH, min(2 * (shape.window or 0), _LONGEST)))
    tokens = torch.randint(shape.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    if shape.causal:
        return Batch(tokens, tokens)
    at = torch.arange(length)
    ends = torch.tensor([[length], [-(-3 * length // 4)]])
    return Batch(tokens, tokens, segments_BT=(at >= length // 3).long().expand(2, -1), not_padding_BT=at < ends)


@torch.no_grad()
def model_scores(
    settings: ModelSettings, weight: Callable[[str], Tensor], batch: Batch, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return the logits of lmtrain's model for a batch, computed on the CPU in `dtype`: a list of one tensor, [tokens
    without padding, vocabulary], and of a second, [samples, 2], if the model has a sentence-pair head. `weight` returns
    a weight by its name, without the rows that pad the vocabulary. One layer at a time is in memory.
    """
    with torch.device("meta"):
        model = cast(Stack, settings.build()).eval()
    first = {tie.second: tie.first for tie in settings.ties()}

    def run(path: str, *inputs: Any) -> Tensor:
        part = model.get_submodule(path).to(dtype).to_empty(device="cpu")
        for name, parameter in part.named_parameters(prefix=path):
            value = weight(first.get(name, name))
            parameter.zero_()[: len(value)] = value
        result: Tensor = part(*inputs)
        part.to_empty(device="meta")
        return result

    x_BTD, contexts = run("embedding", batch), model.block_contexts(batch)
    for layer in model.blocks:
        x_BTD = run(f"blocks.{layer}", x_BTD, contexts[layer])
    if model.norm is not None:
        x_BTD = run("norm", x_BTD)
    real = torch.ones_like(batch.tokens_BT, dtype=torch.bool) if batch.not_padding_BT is None else batch.not_padding_BT
    result = [model.finish_logits(run("head", x_BTD[real]))[:, : settings.shape.vocab_size]]
    pair: nn.Module | None = getattr(model, "pair", None)
    return result if pair is None else [*result, run("pair", x_BTD)]


def largest_difference(left: list[Tensor], right: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


@torch.no_grad()
def transformers_scores(
    folder: Path, settings: ModelSettings, batch: Batch, options: Mapping[str, Any] = MappingProxyType({})
) -> tuple[str, list[Tensor]] | None:
    """Return (version of transformers, list of logits as `model_scores` returns it) for the model that transformers
    loads from `folder` in fp32. Return None if transformers is not installed. `options` are further arguments of
    from_pretrained.
    """
    try:
        import transformers  # because: optional
    except ImportError:
        return None
    encoder = isinstance(settings, BertSettings)
    masked = isinstance(settings, BertSettings) and not settings.pair_head
    name = "AutoModelForMaskedLM" if masked else "AutoModelForPreTraining" if encoder else "AutoModelForCausalLM"
    with quiet_transformers(transformers):
        model = getattr(transformers, name).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, dtype=torch.float32, **options
        ).eval()
        inputs = {"input_ids": batch.tokens_BT}
        if encoder:
            inputs |= {"attention_mask": batch.not_padding_BT.long(), "token_type_ids": batch.segments_BT}
        output = model(**inputs)
    if not encoder:
        return transformers.__version__, [output.logits.flatten(0, 1)]
    if masked:
        return transformers.__version__, [output.logits[batch.not_padding_BT]]
    return transformers.__version__, [output.prediction_logits[batch.not_padding_BT], output.seq_relationship_logits]


@contextmanager
def quiet_transformers(transformers: Any) -> Iterator[None]:
    """Context manager: switch off the progress bars and warnings of the module `transformers`, and restore them
    afterwards.
    """
    bars, logger = transformers.utils.logging, transformers.utils.logging.get_logger("transformers")
    bars_before, level_before = bars.is_progress_bar_enabled(), logger.level
    bars.disable_progress_bar()
    bars.set_verbosity_error()
    try:
        yield
    finally:
        if bars_before:
            bars.enable_progress_bar()
        logger.setLevel(level_before)


def compare_ids(folder: Path, tokenizer: Tokenizer, family: str) -> dict[str, Any]:
    """Check an exported folder's tokenizer: compare the ids that `tokenizer` gives a few difficult texts with those of
    the tokenizer that transformers loads from `folder`. Raise CheckpointError if they differ. Return {"texts_compared":
    their number, or why there are none}, {} if transformers is not installed. `family` is the model_type.
    """
    try:
        import transformers  # because: optional
    except ImportError:
        return {}
    with quiet_transformers(transformers):
        try:
            kind: Any = getattr(transformers, tokenizer_class_to_load(family, tokenizer))
            theirs = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # because: a class that came with the model may ask for anything
            return {"texts_compared": f"none: transformers does not load the tokenizer ({shorten(error)})"}
        ids = [theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] for text in _TEXTS]
    for text, found in zip(_TEXTS, ids, strict=True):
        if found != (expected := tokenizer.encode(text)):
            raise CheckpointError(
                f"transformers gives {text!r} the ids {found[:8]}, and lmtrain gives it {expected[:8]}. The export is "
                "not kept; please report this with the tokenizer.json."
            )
    return {"texts_compared": len(_TEXTS)}
