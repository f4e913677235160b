"""Two hundred faults, each of which a run survives to the bit: at every point, at any moment, at every layout.

Every run is broken a few times, by faults at points and by signals from outside, and gone on with by the same command
or by the launcher itself. At its end it must be the run that was never broken. What has been found is in journal.jsonl,
a line a run, so that a drill which was ended goes on with the next run.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from lmtrain.errors import NoProgressError
from tests.drills.broken import LAYOUTS, SHARED, STEPS, Broken, Options, journal, reached, shared_memory, temporary

COUNT = 200
SHARES = {"one": 10, "dp2": 6, "tp2": 6, "pp2": 5, "dp2 tp2": 3, "tp2 pp2 dp2": 1}  # how often a layout's turn comes
AT_ONCE = 4  # injections into one run
_EVERY = STEPS // (AT_ONCE + 1)  # the steps between checkpoints, in each of which one injection strikes

_START = ("start.imports", "start.rendezvous", "start.folder", "start.build", "start.load", "start.loop")
_STEP = ("step", "data.next", "forward", "backward", "grad_reduce", "opt_step")
_SEVERAL = ("collective",)
_MEASURES = ("valid.batch", "eval.batch")
_SAVE = (
    "ckpt.begin", "ckpt.mid_write", "ckpt.read_back", "ckpt.before_manifest", "ckpt.before_rename", "ckpt.after_rename",
    "ckpt.prune",
)  # fmt: skip
_ENDS = ("kill", "exc", "exit", "abort", "segv", "term", "int", "usr1", "usr2")
_SIGNALS = ("TERM", "INT", "USR1", "USR2", "KILL")


@dataclass(frozen=True)
class Injection:
    """A fault at a point, or a signal to the command when it has run for a share of its usual time."""

    fault: str | None = None
    signal: str | None = None
    share: float = 0.0

    def __str__(self) -> str:
        return self.fault or f"SIG{self.signal} after {self.share:.2f} of a run"


def deck(layout: str, rng: random.Random) -> list[Injection]:
    """Every point of a layout once, with an end drawn for each, and every signal at two moments."""
    nproc = LAYOUTS[layout][0]
    points = [*_START, *_STEP, *_MEASURES, *_SAVE, "shutdown"]
    points += [*_SEVERAL, *(["pipeline.message"] if "pp" in layout else [])] if nproc > 1 else []
    cards = []
    for point in points:
        action = rng.choice(_ENDS + (("enospc",) * 3 if point in _SAVE else ()))
        rank = f":rank={rng.randrange(nproc)}" if nproc > 1 and not point.startswith("ckpt.") else ""
        cards.append(Injection(f"{action}:point={point}{rank}"))
    if nproc > 1:
        cards += [
            Injection(f"{action}:point=backward:rank={rng.randrange(nproc)}") for action in ("stop", "gil", "loop")
        ]
    cards += [Injection(signal=name, share=rng.random() ** 2) for name in _SIGNALS for _ in range(2)]
    rng.shuffle(cards)
    return cards


def plan(seed: int, layouts: tuple[str, ...], runs: int) -> list[tuple[str, list[Injection]]]:
    """The same for the same seed, whatever was done of it before."""
    turns = [layout for layout in layouts for _ in range(SHARES[layout])]
    rng = random.Random(f"{seed} turns")
    rng.shuffle(turns)
    decks: dict[str, list[Injection]] = {layout: [] for layout in layouts}
    rngs = {layout: random.Random(f"{seed} {layout}") for layout in layouts}
    found = []
    for number in range(runs):
        layout = turns[number % len(turns)]
        if len(decks[layout]) < AT_ONCE:
            decks[layout] += deck(layout, rngs[layout])
        found.append((layout, [decks[layout].pop(0) for _ in range(AT_ONCE)]))
    return found


def timed(injection: Injection, number: int, rng: random.Random) -> str:
    """The fault, with its step: one in each stretch between two checkpoints, so that all of them strike."""
    assert injection.fault is not None
    point = injection.fault.partition("point=")[2].partition(":")[0]
    if point in (*_STEP, *_SEVERAL, "pipeline.message"):
        return f"{injection.fault}:step={number * _EVERY + rng.randrange(1, _EVERY + 1)}"
    return injection.fault


def drill(options: Options) -> dict[str, Any]:
    layouts, count = options.layouts or tuple(LAYOUTS), options.count or COUNT
    done = {row["run"]: row for row in journal(options.folder / "journal.jsonl") if row["seed"] == options.seed}
    began, number = time.monotonic(), 0
    runs = plan(options.seed, layouts, count)
    while sum(len(row["struck"]) for row in done.values()) < count:
        if number not in done:
            done[number] = row = broken_run(options, number, *runs[number])
            with (options.folder / "journal.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        number += 1
    return {"runs": len(done), "seconds": round(time.monotonic() - began), **summed(list(done.values()))}


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    struck = [one for row in rows for one in row["struck"]]
    wrong = [{"run": row["run"], "layout": row["layout"], "wrong": row["wrong"]} for row in rows if row["wrong"]]
    codes = Counter(f"{one['kind']} {one['code']}" for one in struck)
    return {
        "passed": not wrong, "injections": len(struck), "bitwise": sum(not row["wrong"] for row in rows),
        "by_layout": dict(Counter(row["layout"] for row in rows for _ in row["struck"])),
        "codes": dict(sorted(codes.items())), "wrong": wrong,
    }  # fmt: skip


def unbroken(options: Options, layout: str) -> dict[str, Any]:
    """What a run that nothing happens to comes to, and how long it takes."""
    path = options.folder / f"unbroken {layout}.json"
    if not path.exists():
        folder = options.folder / f"unbroken {layout}"
        shutil.rmtree(folder, ignore_errors=True)
        ended = Broken(options.world.settings(layout, folder)).to_the_end()
        assert (ended.code, ended.left) == (0, []), ended.output
        path.write_text(json.dumps(reached(folder) | {"seconds": ended.seconds}))
        shutil.rmtree(folder)
    return dict(json.loads(path.read_text()))


def broken_run(options: Options, number: int, layout: str, injections: list[Injection]) -> dict[str, Any]:
    """One run: broken by each injection in turn, gone on with until it is done, and compared."""
    wanted = unbroken(options, layout)
    usual_s = wanted.pop("seconds")
    rng, folder = random.Random(f"{options.seed} {number}"), options.folder / f"run{number:03d}"
    shutil.rmtree(folder, ignore_errors=True)
    before, words = shared_memory(), options.world.settings(layout, folder, parallel__timeout_s=_limit(injections))
    struck: list[dict[str, Any]] = []
    wrong: list[str] = []
    relaunched = number % 2 == 1 and not any(one.signal for one in injections)
    if relaunched:
        faults = ",".join(f"{_lost(timed(one, turn, rng))}:restart={turn}" for turn, one in enumerate(injections))
        ended = Broken([*words, f"--max-restarts={2 * AT_ONCE}"], fault=faults).to_the_end()
        wrong += [f"{faults}: left {one}" for one in ended.left]
        if ended.code == NoProgressError.exit_code and "lost each time before the next checkpoint" in ended.output:
            (folder / "starts.json").unlink()  # because: three faults before the first checkpoint are to end like this
        elif ended.code != 0:
            wrong.append(f"{faults}: the launcher ended with {ended.code}: {ended.output[-1500:]}")
        starts = [int(one) for one in re.findall(r"Start (\d+) of", ended.output)]
        struck = [{"what": faults.split(",")[one - 2], "kind": "launcher", "code": ended.code} for one in starts]
    for turn, injection in enumerate(() if relaunched else injections):
        fault = timed(injection, turn, rng) if injection.fault else None
        process = Broken(words, fault=fault)
        if injection.signal:
            time.sleep(injection.share * usual_s)
            process.process.send_signal(getattr(signal, f"SIG{injection.signal}"))
        ended = process.to_the_end()
        wrong += [f"{fault or injection}: left {one}" for one in ended.left]
        (folder / "starts.json").unlink(missing_ok=True)  # because: these starts are meant to be lost
        if ended.code != 0 or "fault: " in ended.output:
            kind = fault.partition(":")[0] if fault else f"SIG{injection.signal}"
            struck.append({"what": fault or str(injection), "kind": kind, "code": ended.code})
        if ended.code == 0:
            break
    ended = Broken(words).to_the_end()
    wrong += [f"the last start: left {one}" for one in ended.left]
    if ended.code != 0:
        wrong.append(f"the same command ended with {ended.code}: {ended.output[-1500:]}")
    else:
        found = reached(folder)
        wrong += [f"{name} differ from those of an unbroken run" for name in found if found[name] != wanted[name]]
        wrong += [f"{one} is left" for one in temporary(folder)]
    wrong += [f"{SHARED / name} is left" for name in sorted(shared_memory() - before)]
    if not wrong:
        shutil.rmtree(folder)
    return {"seed": options.seed, "run": number, "layout": layout, "struck": struck, "wrong": wrong}


def _lost(fault: str) -> str:
    """The same for a launcher that is to start again by itself, which after a stop it does not."""
    action, _, rest = fault.partition(":")
    return f"kill:{rest}" if action in ("term", "int", "usr1", "usr2", "enospc") else fault


def _limit(injections: list[Injection]) -> int:
    """Short where a process is going to stand still."""
    hangs = any(one.fault and one.fault.startswith(("stop", "gil", "loop", "skip")) for one in injections)
    return 20 if hangs else 60
