"""The reference page of Hugging Face's model families, made from their modules. Called by reference. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lmtrain.config.settings_base import show
from lmtrain.exchange.huggingface.config_keys import IGNORED, NOT_COMPUTED
from lmtrain.exchange.huggingface.family import Family, families

_INTRODUCTION = """# Families of Hugging Face's models

`lmtrain import` and `lmtrain export` convert models of these families, both ways;
[Exchange with Hugging Face](../how_to/exchange_with_hugging_face.md) shows how. A family is known by `model_type` in
`config.json`, and a folder of another one is refused.

Each decoder with rotary angles is proven with random small models of odd sizes, whose weights are so large that every
part is seen in the logits. In fp32 the logits are transformers' within 1e-5 of the largest, for texts of one token up
to four times the original length, and the gradients within 1e-4; each setting that is changed alone moves the logits;
weights and `config.json` come back as they went; another value of any key of transformers' config is computed, refused
by name or shown to change nothing; a damaged folder is refused by name. GPT-2 and the BERTs have tests of their own.
`make test-transformers` runs four draws of each family with transformers 4.57 and the newest 5, which was 5.24, and the
tests of exported tokenizers; `make test-slow` runs twenty with both versions.

Every key of a `config.json` decides a setting, is known to change nothing, or is refused by name.
"""
_REFUSED = """## Keys of all families

These keys are refused in a family that does not list them above, unless they are null or have the value that is given:
"""
_IGNORED = "These change nothing in a family that does not list them above:\n"


def model_families_page() -> str:
    """Return a Markdown page with a table of the families, and what each reads in a config.json."""
    known = list(families().values())
    rows = [
        f"| `{family.model_type}` | {_models(family)} | `{family.architecture}` | [keys](#{family.model_type}) |"
        for family in known
    ]
    table = ["| `model_type` | Models | Class of transformers | `config.json` |", "|---|---|---|---|", *rows]
    parts = [_INTRODUCTION, "\n".join(table) + "\n", *(part for family in known for part in _family_section(family))]
    refused = [f"`{key}` ({_harmless(values)})" if values else f"`{key}`" for key, values in NOT_COMPUTED.items()]
    parts += [_REFUSED, f"{', '.join(refused)}.\n", _IGNORED, _reasons(IGNORED)]
    return "\n".join(parts)


def _models(family: Family[Any]) -> str:
    """Return the names of a family's models, which are its class's docstring."""
    return " ".join((type(family).__doc__ or "").split()).rstrip(".")


def _family_section(family: Family[Any]) -> Iterator[str]:
    """Yield the Markdown text about a family's keys in config.json."""
    yield f"## {family.model_type}\n"
    free = [key for key in family.defaults if key not in family.required]
    yield f"{_models(family)}. These keys decide settings: {_code(free)}.\n"
    if family.required:
        fixed = [f"`{key}={show(value)}`" for key, value in family.required.items()]
        yield f"Any other value of these is refused: {', '.join(fixed)}.\n"
    if family.inert:
        yield f"These change nothing:\n\n{_reasons(family.inert)}"


def _reasons(keys: Mapping[str, str]) -> str:
    """Return a Markdown list of reasons, each with the keys that change nothing for it."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in keys.items():
        by_reason.setdefault(reason, []).append(key)
    return "".join(f"* {_code(names)}: {reason}\n" for reason, names in by_reason.items())


def _harmless(values: Iterable[object]) -> str:
    return " or ".join(show(value) for value in values)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
