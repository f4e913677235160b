"""Changes to files, to bytes and to JSON: each draws from a generator, and says in words what it did."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

EDGES = (0, 1, -1, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, 2**63,
         2**64, 10**30)  # fmt: skip
HOSTILE: tuple[Any, ...] = (
    None, True, False, "", " ", "x" * 70_000, "../../etc/passwd", "/etc/passwd", "a/b", "nul\0byte", "[/red]",
    "\x1b[31m", "\ud800", "${oc.env:HOME}", "{}", [], {}, [[]], [None], {"": None}, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), -float("inf"), 10**400,
)  # fmt: skip


def some_bytes(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """The same bytes but for one change."""
    size = len(data)
    at = rng.randrange(size) if size else 0
    length = min(size - at, rng.choice((1, 2, 4, 8, 64, 512, 4096)))
    end = at + length
    kind = rng.choice(("flip", "flip", "flip", "set", "number", "zero", "cut", "cut", "grow", "drop", "double", "swap"))
    if kind in ("flip", "set", "number") and not size:
        kind = "grow"
    if kind == "flip":
        bit = rng.randrange(8)
        return f"bit {bit} of byte {at} flipped", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    if kind == "set":
        value = rng.choice((0, 1, 10, 32, 34, 127, 128, 255))
        return f"byte {at} set to {value}", data[:at] + bytes([value]) + data[at + 1 :]
    if kind == "number":
        width, edge = rng.choice((1, 2, 4, 8)), rng.choice(EDGES)
        at -= at % width
        number = (edge % (1 << 8 * width)).to_bytes(width, "little")
        return f"{edge} as {width} bytes at {at}", data[:at] + number[: size - at] + data[at + width :]
    if kind == "zero":
        return f"zeros in bytes {at} to {end}", data[:at] + bytes(length) + data[end:]
    if kind == "cut":
        return f"cut to {at} bytes", data[:at]
    if kind == "grow":
        more = rng.choice((bytes(1), bytes(4096), b"\xff" * 9, data[:100]))
        return f"{len(more)} bytes more", data + more
    if kind == "drop":
        return f"without bytes {at} to {end}", data[:at] + data[end:]
    if kind == "double":
        return f"bytes {at} to {end} twice", data[:end] + data[at:]
    other = rng.randrange(max(1, size - length + 1))
    changed = bytearray(data)
    changed[at:end], changed[other : other + length] = data[other : other + length], data[at:end]
    return f"{length} bytes at {at} and {other} exchanged", bytes(changed[:size])


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] + [place for key, one in inner for place in _places(one, (*path, key))]


def some_json(value: Any, rng: random.Random) -> tuple[str, Any]:
    """The same value but for one change somewhere in it; the value given is left as it is."""
    value = json.loads(json.dumps(value))
    places = _places(value)
    path = rng.choice(places)
    name = ".".join(map(str, path)) or "the whole"
    if not path:
        new = rng.choice(HOSTILE)
        return f"{name} is now {_short(new)}", new
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    old = holder[path[-1]]
    kind = rng.choice(("hostile", "hostile", "edge", "near", "near", "gone", "copied", "more", "deep"))
    if kind == "near" and isinstance(old, bool | int | float | str):
        new = _near(old, rng)
    elif kind == "gone":
        del holder[path[-1]]
        return f"{name} is gone", value
    elif kind == "copied":
        source = rng.choice(places)
        new = json.loads(json.dumps(value))
        for key in source:
            new = new[key]
    elif kind == "more":
        if isinstance(holder, dict):
            extra = rng.choice(("extra", "", "../x", "__class__", "_target_", f"{path[-1]} "))
            holder[extra] = old
            return f"{name} once more as {extra!a}", value
        holder.extend([old] * rng.choice((1, 2, 1000)))
        return f"{name} repeated", value
    elif kind == "deep":
        new = old
        for _ in range(rng.choice((1, 70, 400))):
            new = [new]
    else:
        new = rng.choice(HOSTILE if kind == "hostile" else EDGES)
    holder[path[-1]] = new
    return f"{name} is now {_short(new)}", value


def _near(old: Any, rng: random.Random) -> Any:
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice((old + 1, old - 1, old * 2, old // 2, -old, float(old), str(old), old * 1_000_000))
    if isinstance(old, float):
        return rng.choice((old * 2, old + 1e-9, -old, int(old) if abs(old) < 1e18 else 0, str(old)))
    place = rng.randrange(len(old) + 1)
    dropped, added = old[:place] + old[place + 1 :], old[:place] + "x" + old[place:]
    return rng.choice((dropped, added, old.upper(), old + " ", "../" + old))


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


def as_json(value: Any) -> bytes:
    """As a damaged writer might have left it: what JSON cannot hold stays in it."""
    return json.dumps(value, indent=1).encode("utf-8", "surrogatepass")


def change_bytes(path: Path, rng: random.Random) -> str:
    what, data = some_bytes(path.read_bytes(), rng)
    path.write_bytes(data)
    return f"{path.name}: {what}"


def change_json(path: Path, rng: random.Random) -> str:
    what, value = some_json(json.loads(path.read_bytes()), rng)
    path.write_bytes(as_json(value))
    return f"{path.name}: {what}"


def change_file(path: Path, rng: random.Random) -> str:
    """Something else in this file's place."""

    def linked() -> None:
        (kept := path.with_name(path.name + ".kept")).write_bytes(path.read_bytes())
        path.unlink()
        path.symlink_to(kept.name)

    def instead(make: Callable[[], object]) -> Callable[[], None]:
        def act() -> None:
            path.unlink()
            make()

        return act

    acts: dict[str, Callable[[], object]] = {
        "gone": path.unlink,
        "empty": lambda: path.write_bytes(b""),
        "a folder": instead(path.mkdir),
        "a FIFO": instead(lambda: os.mkfifo(path)),
        "a link to itself": instead(lambda: path.symlink_to(path.name)),
        "a link to nothing": instead(lambda: path.symlink_to("nothing")),
        "a link to /dev/zero": instead(lambda: path.symlink_to("/dev/zero")),
        "a link to its own bytes": linked,
        "a sparse terabyte": lambda: os.truncate(path, 1 << 40),
    }
    what = rng.choice(sorted(acts))
    acts[what]()
    return f"{path.name} is now {what}"


def change_any(path: Path, rng: random.Random) -> str:
    """One change to a file, of the kind that suits it."""
    if rng.random() < 0.12:
        return change_file(path, rng)
    if path.suffix in (".json", ".config") and rng.random() < 0.6:
        try:
            return change_json(path, rng)
        except ValueError:
            pass
    return change_bytes(path, rng)


def change_leftovers(folder: Path, rng: random.Random, name: str) -> str:
    """Changes to what a killed attempt left. Now and then a file gets a second name, such as `name`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return "; ".join(_change_leftover(rng.choice(files), rng, name) for _ in range(rng.choice((1, 1, 2, 3))))


def _change_leftover(path: Path, rng: random.Random, name: str) -> str:
    if not path.is_file() or path.is_symlink():
        return f"{path.name} was gone"
    other = path.with_name(rng.choice(("more", name, ".x")))
    if rng.random() < 0.1 and not os.path.lexists(other):
        os.link(path, other)
        return f"{path.name} is also {other.name}"
    return (change_bytes if rng.random() < 0.65 else change_any)(path, rng)


def digests(folder: Path) -> dict[str, str]:
    """The files of a folder, by name."""
    files = (path for path in folder.iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def other_files(found: dict[str, str], expected: dict[str, str], *, alone: bool) -> str:
    """What differs between an attempt that was gone on with and an unbroken one; `alone` where nothing lies beside."""
    names = sorted(expected.keys() | (found.keys() if alone else set()))
    names = [name for name in names if found.get(name) != expected.get(name)]
    return f"other than an unbroken one: {', '.join(names)}" if names else ""
