"""Which tokens end a generated text, as a Hugging Face folder says it in its small files. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lmtrain.runtime.files.safe_files import parse_json

# The files that may name them; transformers reads the second only if there is no first.
FILES = ("generation_config.json", "config.json")


def end_ids(files: Mapping[str, bytes]) -> frozenset[int]:
    """Return the ids after which transformers stops to generate, from the files of a Hugging Face folder by name. The
    result is empty if no file names any.
    """
    name = next((name for name in FILES if name in files), None)
    config = parse_json(files[name], Path(name)) if name is not None else None
    ids = config.get("eos_token_id") if isinstance(config, dict) else None
    return frozenset(token for token in (ids if isinstance(ids, list) else [ids]) if type(token) is int and token >= 0)
