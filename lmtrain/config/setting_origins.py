"""What sets the value of each setting: a line of a file, a typed word, or another setting that it has to fit. This
module is torch-free.

Made by the composition of settings, and read by `lmtrain config explain`. Nothing here knows what a key means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.config.settings_base import show

if TYPE_CHECKING:
    from lmtrain.config.strict_yaml import YamlFile


@dataclass(frozen=True)
class Origin:
    """The place that sets a value: a line of a config file, or an override. `text` is the value or the override."""

    text: str
    file: Path | None = None  # None: the command line
    line: int = 0


class Origins(dict[str, Origin]):
    """The origin of each composed setting, by its dotted key."""

    def put(self, key: str, origin: Origin) -> None:
        """Record a key's origin, which replaces those of all keys below it."""
        self.remove(key)
        self[key] = origin

    def remove(self, key: str) -> None:
        """Remove the origins of a key and of all keys below it."""
        for other in [other for other in self if other == key or other.startswith(f"{key}.")]:
            del self[other]

    def put_file(self, file: YamlFile, place: str) -> None:
        """Record the origins of a file's settings; `place` is the dotted key below which they go, "" for the top."""
        for key, origin in origins_in_file(file).items():
            self.put(f"{place}.{key}" if place else key, origin)

    def nearest(self, key: str) -> Origin | None:
        """Return the origin of a dotted key. If it has none, return that of the innermost enclosing group that has one,
        as when an override sets the whole group; None if there is none either.
        """
        while key not in self and "." in key:
            key = key.rpartition(".")[0]
        return self.get(key)


def origins_in_file(file: YamlFile) -> dict[str, Origin]:
    """Return the origin of each dotted key of a config file."""
    values = iter_leaves({key: value for key, value in file.data.items() if key != "defaults"})
    return {".".join(path): Origin(show(value), file.path, file.lines.get(path, 0)) for path, value in values}


def iter_leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, value) for each value in the nested dicts `node` that is no dict itself, and for empty dicts. A path
    is the tuple of keys that leads to the value; `path` is the one that leads to `node`.
    """
    if isinstance(node, Mapping) and node:
        for name, inner in node.items():
            yield from iter_leaves(inner, (*path, str(name)))
    elif path:
        yield path, node
