"""Documents as lines of JSON, as every corpus step writes them."""

from __future__ import annotations

import json

from lmtrain.tokenizer.json_lines import Document


def to_line(document: Document) -> bytes:
    try:
        return json.dumps(document, ensure_ascii=False, separators=(", ", ": ")).encode() + b"\n"
    except UnicodeEncodeError:  # beside the text stands half a character, which only an escape can hold
        return json.dumps(document, separators=(", ", ": ")).encode() + b"\n"
