"""Compare the ids that transformers gives to texts by an exported folder with those of lmtrain's tokenizer.

Called by export before the folder takes its name. transformers is optional, and only then imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmtrain.errors import CheckpointError, shorten
from lmtrain.exchange.huggingface.tokenizer_files import tokenizer_class_to_load
from lmtrain.tokenizer.base import Tokenizer

# Texts whose ids depend on the rules around a vocabulary: case, accents, spaces, bytes, spellings of special tokens.
_TEXTS = (
    "The cat", " the  Cat ", "", "\n\n a\tb", "na\u00efve caf\u00e9 e\u0301", "\u65e5\u672c\u8a9e 12345", "I'LL don't",
    "\U0001f600\x00\u200d", "<s>a</s> [MASK] <|endoftext|>",
)  # fmt: skip


@contextmanager
def quiet_transformers(transformers: Any) -> Iterator[None]:
    """Context manager: switch the progress bars and warnings of transformers off, and on again afterwards."""
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
    """Compare the ids of a few difficult texts: of `tokenizer`, and of the one that transformers reads from the
    exported folder of a model of `family`, if it is installed and can. Raise CheckpointError if they differ. Return the
    facts that the command prints: the number of texts, or why there was nothing to compare.
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
