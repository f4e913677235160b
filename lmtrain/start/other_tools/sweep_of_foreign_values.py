"""Put the translations of a list of values together, as in learning_rate=1e-3,3e-4, which names the runs of a sweep.

Called by translate_foreign_flags, which translates the line once for each of the values.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmtrain.start.other_tools.foreign_translation import Option, Translation


def join_sweep(result: Translation, option: Option, first: str, others: Sequence[Translation]) -> None:
    """Give the settings of `result` that depend on `option` all their values. It is the translation with the value
    `first`, and `others` are those with each of the values.
    """
    single = option.with_value(first)
    _tell_replaced(result, option, others)
    keys = [key for key in result.settings if len({other.settings.get(key) for other in others}) > 1]
    varying = {key: [other.settings.get(key, "") for other in others] for key in keys}
    _name_whole(result, single, option)
    result.changed = [text for text in result.changed if not text.startswith(f"{option.typed} is ")]
    leader = next((key for key in keys if key in result.origins), keys[0] if keys else "")
    if not keys or not all(map(all, varying.values())):
        result.omit(option, "Its values are no values of one setting here; give one of them.")
        return
    result.settings[leader] = ",".join(varying[leader])
    for key in keys:
        if key != leader and varying[key] == varying[leader]:
            result.settings[key] = f"${{{leader}}}"
        elif key != leader:
            del result.settings[key]
            result.omit(option, f"{key} would be {', '.join(varying[key])} with it; start these runs one by one.")
    if varying[leader] != option.value.split(","):
        result.changed.append(f"{option.typed} is {leader}={result.settings[leader]} here.")


def _tell_replaced(result: Translation, option: Option, others: Sequence[Translation]) -> None:
    """Say of another option that one of the values of `option` replaces its value, though the first may be the same."""
    for other, value in zip(others, option.value.split(","), strict=False):
        replaced = f": {option.with_value(value).typed} sets "
        for text in other.left_out:
            if replaced in text and not any(told.startswith(text.partition(":")[0]) for told in result.left_out):
                result.left_out.append(text)
        result.left_out = [text.replace(replaced, f": {option.typed} sets ") for text in result.left_out]


def _name_whole(result: Translation, single: Option, option: Option) -> None:
    """Put the option with its whole list into a translation in the place of the one with a single value."""
    for options in (result.known, result.unknown, result.later):
        options[:] = [option if each == single else each for each in options]
    result.origins = {key: option if origin == single else origin for key, origin in result.origins.items()}
    for notes in (result.changed, result.left_out, result.refused):
        notes[:] = [text.replace(f"{single.typed} ", f"{option.typed} ", 1).replace(f"{single.typed}:",
                    f"{option.typed}:", 1) for text in notes]  # fmt: skip
