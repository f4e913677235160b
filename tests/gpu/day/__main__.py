"""Runs the day on a GPU, or what of it a call before has left, and packs what it found.

    python3 -m tests.gpu.day                      all parts that fit into 25 minutes; call it again for the rest
    python3 -m tests.gpu.day --minutes 9          in pieces, where a call may not take longer
    python3 -m tests.gpu.day --only ranks         one part, with what of it was done before
    python3 -m tests.gpu.day --smoke              its first 25 minutes on a CPU with tiny models

Each item is a process; what it said and how it ended is a file in OUT/items, and an item that has one is not run again.
Delete the file to repeat it. Needs Python's own library alone: what a bare machine lacks of the others is unpacked from
the wheels that the archive carries.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.gpu.day.carried import unpack
from tests.gpu.day.parts import PART_S, ROOT, Part, Where, parts
from tests.gpu.day.suites import Item
from tests.gpu.day.summary import pack, summary

OUT = ROOT / "build/gpu_day"
MINUTES = 25.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="where results are kept between calls")
    parser.add_argument("--archive", type=Path, help="the results in one file; OUT/results.tar.gz if not given")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="begin nothing that would end later")
    parser.add_argument("--only", action="append", default=[], metavar="PART")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT, to be measured too")
    parser.add_argument("--titan", help="a checkout of torchtitan 0.2, likewise")
    parser.add_argument("--list", action="store_true", help="say what would be run, and stop")
    asked = parser.parse_args(arguments)
    began = time.monotonic()
    out: Path = asked.out.resolve()
    (out / "items").mkdir(parents=True, exist_ok=True)
    where = Where(out / "data", out / "runs", gpu_memory_GiB(), asked.smoke, asked.nanogpt, asked.titan)
    day = parts(where)
    if unknown := set(asked.only) - {part.name for part in day}:
        parser.error(f"--only={', '.join(unknown)} is none of {', '.join(part.name for part in day)}")
    if asked.list:
        print(plan(day))
        return 0
    env = environment(out)
    left = 0
    for part in day:
        if not asked.only or part.name in asked.only:
            left += run(part, out, env, began + 60 * asked.minutes)
    text = summary(out, day)
    print(text)
    (out / "summary.txt").write_text(text)
    archive = asked.archive or out / "results.tar.gz"
    print(f"{pack(out, archive):,} bytes in {archive}")
    if left:
        print(f"{left} items are left: the same command goes on with them")
    return 0


def plan(day: list[Part]) -> str:
    lines = []
    for part in day:
        lines.append(f"{part.name:<16}{part.expect_s:>5} s  {part.why}")
        lines += [f"    {item.name:<36}{item.expect_s:>4} s" for item in part.items]
    return "\n".join([*lines, f"{'all':<16}{sum(part.expect_s for part in day):>5} s, estimated"])


def run(part: Part, out: Path, env: dict[str, str], end_s: float) -> int:
    """How many items are left: those that would not come to their end in time.

    One that was cut off for lack of room has another try, and no third: what is behind it has to have its turn.
    """
    print(f"== {part.name}: {part.why}", flush=True)
    end_s, left = min(end_s, time.monotonic() + PART_S), 0
    for item in part.items:
        told = out / "items" / f"{part.name}.{item.name}.json"
        if told.exists():
            continue
        room_s = end_s - time.monotonic()
        if room_s < item.expect_s:
            print(f"   {item.name} is left: no time", flush=True)
            left += 1
            continue
        result = take(item, told.with_suffix(".log"), env, min(item.limit_s, room_s))
        how = "ok" if result["code"] == 0 else result["ended"]
        print(f"   {item.name}: {how}, {result['seconds']:.0f} s", flush=True)
        tried = told.with_suffix(".tried")
        if result["ended"] == "cut off" and room_s < item.limit_s and not tried.exists():
            tried.touch()
            left += 1
        else:
            told.write_text(json.dumps(result))
    return left


def take(item: Item, log: Path, env: dict[str, str], limit_s: float) -> dict[str, Any]:
    """Run one item; a JSON object in its last line is what it `said`."""
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *item.words], cwd=ROOT, env={**env, **item.env}, stdout=file, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            process.wait()
    seconds = time.monotonic() - began
    lines = log.read_text(errors="replace").splitlines()
    said = next((line for line in reversed(lines) if line.startswith("{")), "null")
    try:
        found = json.loads(said)
    except ValueError:
        found = None
    ended = "cut off" if code is None else f"exit code {code}"
    return {"words": item.words, "code": code, "ended": ended, "seconds": seconds, "said": found, "tail": lines[-15:]}


def environment(out: Path) -> dict[str, str]:
    """Of all items: what is missing here on the path, and one cache of compiled kernels."""
    path = [str(ROOT), unpack(out), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    return env | {"TORCHINDUCTOR_CACHE_DIR": str(out / "inductor"), "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}


def gpu_memory_GiB() -> float:
    if shutil.which("nvidia-smi") is None:
        return 0.0
    words = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()
    return float(found[0]) / 1024 if found and found[0].isdigit() else 0.0


if __name__ == "__main__":
    sys.exit(main())
