"""Ways out of a wrong layout, in the words of a verb whose layout is the value of one option, such as --to tp=2,pp=4.

Used by reshard and plan. The checks of a layout name settings, such as parallel.tp=2, which such a verb does not take,
or which would contradict its option.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lmtrain.errors import LayoutError, SettingsError, Way, split_ways, with_other_ways
from lmtrain.placement.parallel_settings import KEYS

_GROUP = "parallel."


@contextmanager
def ways_in_layout_option(option: str, layout: str, *, takes_settings: bool = False) -> Iterator[None]:
    """Context manager that raises errors about settings again with ways out that change `layout`, the value typed for
    `option`. Ways that need other settings are only text, unless the verb takes settings.
    """
    try:
        yield
    except (SettingsError, LayoutError) as error:
        words = _OptionWords(option, parse_sizes(layout), takes_settings)
        problems = [words.rewrite(problem) for problem in error.marked_problems]
        raise (LayoutError(*problems) if isinstance(error, LayoutError) else SettingsError(problems)) from error


def parse_sizes(layout: str) -> dict[str, str]:
    """Return the sizes that the text of a layout names, axis -> text: "tp=2,dp=4" -> {"tp": "2", "dp_shard": "4"}."""
    pairs = (word.strip().removeprefix(_GROUP).partition("=") for word in layout.split(",") if word.strip())
    return {{"dp": "dp_shard"}.get(key.strip(), key.strip()): size.strip() for key, _, size in pairs}


def option_word(option: str, sizes: dict[str, str]) -> str:
    """Return the word that gives `option` a layout, such as "--to=tp=2,pp=4"."""
    return f"{option}={','.join(f'{key}={size}' for key, size in sizes.items())}"


class _OptionWords:
    """The words of one option while problems are rewritten: each problem's first way changes `sizes` for those after
    it, because the ways of all problems are applied to the one option.
    """

    def __init__(self, option: str, sizes: dict[str, str], takes_settings: bool) -> None:
        self._option, self._sizes, self._takes_settings = option, sizes, takes_settings

    def rewrite(self, problem: str) -> str:
        """Return the problem with the ways that the option can say; of several sizes of an axis, the nearest."""
        sizes, ways = self._sizes, [way for way in split_ways(problem)[1] if not way.is_example]

        def change(way: Way) -> Way | None:
            if any(_axis(way) == _axis(other) and self._distance(way) > self._distance(other) for other in ways):
                return None
            new, words, old = self._change(sizes, way)
            if new is None:
                return way if self._takes_settings else None
            if not new or ((words or old) and not self._takes_settings):
                return None
            if not way.is_example and self._sizes is sizes:
                self._sizes = new
            return Way((option_word(self._option, new), *words), tuple(old), way.is_example)

        return type(problem)(with_other_ways(problem, change))

    def _change(self, sizes: dict[str, str], way: Way) -> tuple[dict[str, str] | None, list[str], list[str]]:
        """Return the sizes after this way, None if it does not concern them, and its other (new, old) words."""
        removed = [key for key in way.old if key.removeprefix(_GROUP) in sizes]
        pairs = [word.removeprefix(_GROUP).partition("=") for word in way.new if word.startswith(_GROUP)]
        is_for_option = not self._takes_settings or removed
        added = {key: size for key, _, size in pairs if key in KEYS and (key in sizes or is_for_option)}
        kept = {key: size for key, size in sizes.items() if f"{_GROUP}{key}" not in removed}
        words = [word for word in way.new if word.partition("=")[0].removeprefix(_GROUP) not in added]
        return kept | added if removed or added else None, words, [key for key in way.old if key not in removed]

    def _distance(self, way: Way) -> float:
        """Return how far the size that a way sets is from the one that was typed; 0 for other ways."""
        key, size = _axis(way), way.new[0].partition("=")[2] if way.new else ""
        typed = self._sizes.get(key, "")
        return abs(int(size) - int(typed)) if size.isdecimal() and typed.isdecimal() else 0


def _axis(way: Way) -> str:
    """Return the axis that a way gives another size and nothing else; "" for other ways."""
    return way.new[0].partition("=")[0].removeprefix(_GROUP) if len(way.new) == 1 else ""
