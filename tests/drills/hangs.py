"""Processes that stand still in each of the ways they can: which is named, how soon, and whether all are gone then.

Right is: that rank, that phase, that step; named within the limit and a second; every process gone ten seconds later.
One that is killed stands still too, and is missed sooner: within two seconds, without stacks.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.drills.broken import Broken, Options, journal, marked

COUNT = 20
LIMIT_S = 8
LOST_S = 2
KINDS = ("stop", "gil", "skip", "loop", "kill", "store")
# a step is shown as people count it, from 1; what is read within step 5 is for the next one
_PLACES = {
    "forward": ("forward",),
    "backward": ("backward",),
    "opt_step": ("optimizer", "backward"),
    "data.next": ("data",),
}
_NAMED = re.compile(
    r"rank (\d+) on \S+ (?:has been|was ended by SIGKILL: it was|ended without a word[^:]*: it was) in "
    r"(\w+)(?: \([^)]*\))?(?: of step (\d+))?"
)
_STORE = (
    "import sys, time, torch.distributed as dist\n"
    "store = dist.TCPStore('127.0.0.1', int(sys.argv[1]), is_master=True, wait_for_workers=False)\n"
    "print('listening', flush=True)\ntime.sleep(3600)\n"
)


def drill(options: Options) -> dict[str, Any]:
    count, path = options.count or COUNT, options.folder / "journal.jsonl"
    done = [row for row in journal(path) if row["seed"] == options.seed]
    for number in range(count):
        for kind in KINDS:
            if not any((row["kind"], row["number"]) == (kind, number) for row in done):
                rng = random.Random(f"{options.seed} {kind} {number}")
                row = store(options, number, rng) if kind == "store" else hang(options, kind, number, rng)
                done.append({"seed": options.seed, "kind": kind, "number": number} | row)
                with path.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
    found: dict[str, Any] = {kind: _summed([row for row in done if row["kind"] == kind]) for kind in KINDS}
    return {"passed": all(one["right"] == one["of"] for one in found.values()), "limit_s": LIMIT_S, **found}


def _summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "of": len(rows), "right": sum(row["right"] for row in rows),
        "named_s": _spread([row["named_s"] for row in rows if row["named_s"] is not None]),
        "gone_s": _spread([row["gone_s"] for row in rows]),
        "wrong": [row for row in rows if not row["right"]][:5],
    }  # fmt: skip


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 2), "most": round(max(values), 2)} if values else {}


def hang(options: Options, kind: str, number: int, rng: random.Random) -> dict[str, Any]:
    """One run of four processes, one of which stands still, or is gone, once the run knows its ways."""
    folder = options.folder / f"{kind}{number:02d}"
    shutil.rmtree(folder, ignore_errors=True)
    layout = "dp2 tp2"
    rank, step = rng.randrange(4), rng.randrange(5, 12)
    point = "collective" if kind == "skip" else rng.choice(list(_PLACES))
    fault = f"{kind}:point={point}:step={step}:rank={rank}"
    words = options.world.settings(
        layout, folder, parallel__timeout_s=LIMIT_S, eval__tasks="[]", eval__interval_steps=0
    )
    process = Broken(words, fault=fault)
    struck = process.line(lambda line: "fault: " in line)
    if struck is None:
        ended = process.to_the_end()
        return {"fault": fault, "right": False, "said": ended.output[-500:], "named_s": None, "gone_s": ended.seconds}
    named_s = _named_after(process, folder, struck[0])
    ended = process.to_the_end()
    gone_s = time.monotonic() - struck[0]
    said = next((line for line in ended.output.splitlines() if _NAMED.search(line)), ended.output[-500:])
    match = _NAMED.search(said)
    wanted = (rank, ("collective",) if kind == "skip" else _PLACES[point], step + (2 if point == "data.next" else 1))
    right = match is not None and int(match[1]) == wanted[0] and match[2] in wanted[1]
    right = right and match is not None and match[3] == str(wanted[2])
    limit_s, num_stacks = (LOST_S, 0) if kind == "kill" else (LIMIT_S + 1, 4)
    in_time = named_s is not None and named_s <= limit_s and gone_s <= named_s + 10
    stacks = list((folder / "hangs").rglob("rank_*.txt"))
    row = {"fault": fault, "right": right and in_time and ended.code == 76 and not ended.left}
    row["right"] = row["right"] and len(stacks) >= num_stacks
    row |= {"code": ended.code, "left": ended.left, "stacks": len(stacks), "named_s": named_s, "gone_s": gone_s}
    if row["right"]:
        shutil.rmtree(folder)
    return row | {"said": said}


def _named_after(process: Broken, folder: Path, since: float) -> float | None:
    """Seconds until the run's folder names it, or the run says its error."""
    while process.process.poll() is None:
        if (folder / "stop.json").exists() or list((folder / "hangs").glob("*")):
            return time.monotonic() - since
        time.sleep(0.02)
    found = process.line(lambda line: "error: " in line)
    return found[0] - since if found else None


def store(options: Options, number: int, rng: random.Random) -> dict[str, Any]:
    """Two processes whose store, which a third one keeps as torchrun's agent does, stops answering as they begin."""
    folder = options.folder / f"store{number:02d}"
    shutil.rmtree(folder, ignore_errors=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keeper = subprocess.Popen([sys.executable, "-c", _STORE, str(port)], stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    try:
        keeper.stdout.readline()
        words = options.world.settings("tp2", folder, parallel__timeout_s=LIMIT_S)
        words = [word for word in words if word not in ("--nproc", "2")]
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        env |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        late = rng.randrange(2)  # this one comes when the store is dead; the other may have spoken with it
        asked = f"stop:point=start.rendezvous:rank={late}"
        ranks = [Broken(words, env | {"RANK": str(r), "LOCAL_RANK": str(r)}, fault=asked) for r in range(2)]
        assert ranks[late].line(lambda line: "fault: " in line) is not None
        time.sleep(rng.random())
        keeper.send_signal(rng.choice((signal.SIGSTOP, signal.SIGKILL)))
        began = time.monotonic()
        for pid in marked(ranks[late].mark):
            os.kill(pid, signal.SIGCONT)
        named = [one.line(lambda line: "error: " in line) for one in ranks]
        ended = [one.to_the_end(120) for one in ranks]
        gone_s = time.monotonic() - began
    finally:
        keeper.kill()
        keeper.communicate()
    said = [line for one in ended for line in one.output.splitlines() if "error: " in line]
    named_s = max((line[0] - began for line in named if line is not None), default=None)
    right = len(said) == 2 and all(f"127.0.0.1:{port}" in line or "rank" in line for line in said)
    right = right and [one.code for one in ended] == [76, 76] and not any(one.left for one in ended)
    in_time = named_s is not None and named_s <= LIMIT_S + 1 and gone_s <= named_s + 10
    return {
        "right": right and in_time, "named_s": named_s, "gone_s": gone_s, "said": said, "late": late,
        "code": [one.code for one in ended],
    }  # fmt: skip
