"""What the day has found so far, in words and in one archive. Called by __main__.py; reads the items' files alone."""

from __future__ import annotations

import json
import tarfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from tests.gpu.day.parts import Part

MOST_BYTES = 16 << 20
_LOG_BYTES = 200_000  # of each, its end
GIB = 1 << 30
Said = dict[str, Any]


def summary(out: Path, day: Iterable[Part]) -> str:
    found = results(out)
    lines = []
    for part in day:
        mine = {item.name: found.get(f"{part.name}.{item.name}") for item in part.items}
        done = [one for one in mine.values() if one is not None]
        failed = [name for name, one in mine.items() if one is not None and one["code"] != 0]
        wrong = f", failed: {', '.join(failed)}" if failed else ""
        lines.append(f"{part.name}: {len(done)} of {len(mine)} done{wrong}")
    return "\n".join([*machine(found), *lines, "", *speeds(found), "", *memories(found), "", *profiles(found), ""])


def results(out: Path) -> dict[str, Said]:
    """By part and item."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((out / "items").glob("*.json"))}


def machine(found: dict[str, Said]) -> list[str]:
    """And NCCL's environment."""
    said = (found.get("start.machine") or {}).get("said")
    if not said:
        return []
    named = {"torch": "torch", "cuda": "CUDA", "nccl": "NCCL", "cudnn": "cuDNN"}
    versions = ", ".join(f"{word} {said[key]}" for key, word in named.items() if said.get(key))
    environment = [f"  {key}={value}" for key, value in said["environment"].items() if "NCCL" in key]
    return [f"{said.get('device', 'no GPU')}, Python {said['python']}, {versions}", *environment, ""]


def speeds(found: dict[str, Said]) -> list[str]:
    """Medians of the rounds of one command, and each contender beside lmtrain."""
    rounds: dict[tuple[str, str], list[Said]] = defaultdict(list)
    for key, one in found.items():
        if one["code"] == 0 and "tokens_per_s" in (one["said"] or {}):
            part, _, name = key.partition(".")
            is_round = name[-2:-1] == "-" and name[-1].isdigit()
            rounds["table" if is_round else part, name[:-2] if is_round else name].append(one["said"])
    lines = [f"{'':36}{'tokens/s':>12}{'MFU':>8}  rounds"] if rounds else []
    for (_, name), many in sorted(rounds.items()):
        mfu = [one["mfu"] for one in many if one["mfu"]]
        share = f"{median(mfu):8.1%}" if mfu else f"{'':8}"
        each = ", ".join(f"{one['tokens_per_s']:,.0f}" for one in many)
        lines.append(f"{name:36}{median(one['tokens_per_s'] for one in many):12,.0f}{share}  {each}")
    return lines


def memories(found: dict[str, Said]) -> list[str]:
    """Of runs of ours on a GPU: the most that tensors took, and what the device lacks, beside what was predicted."""
    lines = []
    for key, one in found.items():
        said = one["said"] or {}
        if said.get("allocated_bytes"):
            held, predicted, device, in_all = (
                said[f"{what}_bytes"] / GIB for what in ("allocated", "predicted_tensor", "device", "predicted")
            )
            lines.append(
                f"{key:44} tensors {held:6.1f} GiB, predicted {predicted:6.1f} ({predicted / held - 1:+.1%}); "
                f"of the device {device:6.1f}, predicted {in_all:6.1f} ({in_all / device - 1:+.1%})"
            )
    return lines


def profiles(found: dict[str, Said]) -> list[str]:
    lines = []
    for key, one in found.items():
        for table in (one["said"] or {}).get("profile", ()):
            lines.append(f"{key}: {table['window_s'] * 1e3:.1f} ms in all")
            shares = sorted(table["classes"].items(), key=lambda item: -item[1])
            lines += [f"  {name:<14}{seconds * 1e3:10.2f} ms" for name, seconds in shares if seconds]
    return lines


def pack(out: Path, archive: Path) -> int:
    """JSON and logs; the end of a long log. Its bytes."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    short = out / "short"
    short.mkdir(exist_ok=True)
    for log in (out / "items").glob("*.log"):
        (short / log.name).write_bytes(log.read_bytes()[-_LOG_BYTES:])
    with tarfile.open(archive, "w:gz") as tar:
        for path in [out / "summary.txt", *sorted((out / "items").glob("*.json")), *sorted(short.glob("*.log"))]:
            tar.add(path, path.name)
    size = archive.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{archive} has {size:,} bytes, more than {MOST_BYTES:,}.")
    return size
