"""Starts of 1 to 4 ranks in which the server, the launcher, a rank, a companion or the guardian is lost or stopped.

Each case sends signals at random and at chosen moments, from the first instant to past the first step. Right is: the
exit code that such a loss has, a message that names the server if the server was lost, no process, port or file left,
and the same command afterwards reaches the losses of a run that nothing happened to.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.drills.broken import LAYOUTS, Broken, Options, journal, marked, reached, temporary

COUNT = 80
LIMIT_S = 12  # of a collective; a stopped rank is named after it
STOPPED_S = 90.0  # that a run may take in which something stands still
NUM_MOMENTS = 20  # of the signals that ask the launcher for a stop
SHARES = ("dp2", "tp2", "pp2", "dp2 tp2", "one")
TARGETS = ("server", "launcher", "rank", "companion", "guardian")
# what has to be there before a signal is sent; a number is a share of the time to the first step
EVENTS = ("server", "guardian", "rank 0", "last rank", "companion", "first step", "later")
ACTIONS = ("KILL", "STOP CONT", "STOP")
STOPS = ("TERM", "INT", "USR1")
_LISTEN = "0A"
_CAP_READ = "dac_read_search"


@dataclass(frozen=True)
class Blow:
    """A signal to one kind of process, once `moment` has come."""

    target: str
    action: str
    moment: str | float

    def __str__(self) -> str:
        at = f"after {self.moment:.2f} of a start" if isinstance(self.moment, float) else f"at {self.moment}"
        return f"{self.action} to {self.target} {at}"


def cases(seed: int, count: int) -> list[tuple[str, list[Blow]]]:
    """Return (layout, blows) of each case: every target with every action in turn, stops in between, then several."""
    rng = random.Random(f"{seed} starts")
    turns: list[tuple[str, str]] = [(target, action) for target in TARGETS for action in ACTIONS]
    rng.shuffle(turns)
    found = []
    for number in range(count):
        layout, kind = SHARES[number % len(SHARES)], number % 4
        moment: str | float = rng.choice(EVENTS) if rng.random() < 0.6 else rng.random() * 1.2
        if kind == 1:  # asked to stop, at moments spread over the whole start
            share = (number // 4) % NUM_MOMENTS / NUM_MOMENTS
            blows = [Blow("launcher", STOPS[(number // 4) % len(STOPS)], share * 1.1)]
        elif kind == 3 and number % 8 == 7:  # several at once
            first = [Blow(*rng.choice(turns), moment) for _ in range(2)]
            blows = [*first, Blow("launcher", rng.choice(STOPS), moment)] if rng.random() < 0.5 else first
        else:
            blows = [Blow(*turns[(number // 2) % len(turns)], moment)]
        found.append((layout, blows))
    return found


def drill(options: Options) -> dict[str, Any]:
    count, path = options.count or COUNT, options.folder / "journal.jsonl"
    done = {row["number"]: row for row in journal(path) if row["seed"] == options.seed}
    rows = []
    for number, (layout, blows) in enumerate(cases(options.seed, count)):
        if options.layouts and layout not in options.layouts:
            continue
        if number not in done:
            done[number] = {"seed": options.seed, "number": number} | struck_start(options, number, layout, blows)
            with path.open("a") as file:
                file.write(json.dumps(done[number]) + "\n")
        rows.append(done[number])
    full = full_table(options) if os.getuid() == 0 and shutil.which("setpriv") else {"wrong": [], "codes": []}
    wrong = [{key: row[key] for key in ("number", "layout", "blows", "wrong")} for row in rows if row["wrong"]]
    return {
        "passed": not wrong and not full["wrong"], "cases": len(rows), "right": len(rows) - len(wrong),
        "blows": dict(Counter(blow.partition(" a")[0] for row in rows for blow in row["blows"])),
        "codes": dict(sorted(Counter(str(row["code"]) for row in rows).items())), "full_table": full, "wrong": wrong,
    }  # fmt: skip


def words(options: Options, layout: str, folder: Path) -> list[str]:
    """Return the command of a run without evaluations, whose starts are most of it."""
    asked = options.world.settings(
        layout, folder, parallel__timeout_s=LIMIT_S, eval__tasks="[]", eval__interval_steps=0,
        train__valid_interval_steps=0, checkpoint__interval_steps=5,
    )  # fmt: skip
    return [*asked, "--max-restarts=1"] if LAYOUTS[layout][0] == 1 else asked


def unbroken(options: Options, layout: str) -> dict[str, Any]:
    """Return what a run that nothing happens to reaches, and the seconds until its first step."""
    path = options.folder / f"unbroken {layout}.json"
    if not path.exists():
        folder = options.folder / f"unbroken {layout}"
        shutil.rmtree(folder, ignore_errors=True)
        process = Broken(words(options, layout, folder))
        first = process.line(lambda line: line.startswith("step "))
        ended = process.to_the_end()
        assert first is not None, ended.output
        assert (ended.code, ended.left) == (0, []), ended.output
        path.write_text(json.dumps(reached(folder) | {"seconds": first[0] - process.began}))
        shutil.rmtree(folder)
    return dict(json.loads(path.read_text()))


def struck_start(options: Options, number: int, layout: str, blows: Sequence[Blow]) -> dict[str, Any]:
    """Start a run, send the signals, check how it ends, start the same command again and compare."""
    wanted = unbroken(options, layout)
    usual_s = wanted.pop("seconds")
    folder, place = options.folder / f"run{number:03d}", options.folder / f"tmp{number:03d}"
    for path in (folder, place):
        shutil.rmtree(path, ignore_errors=True)
    place.mkdir()
    command = words(options, layout, folder)
    process = Broken(command, {"TMPDIR": str(place)})
    ports, sent, num = set[int](), list[str](), LAYOUTS[layout][0]
    for blow in sorted(blows, key=lambda blow: isinstance(blow.moment, str)):
        sent += _strike(process, blow, usual_s, num, ports)
    ports |= _ports(process.mark)
    if any(line.endswith("STOP to launcher") for line in sent):
        time.sleep(2.0)
        process.process.kill()  # because: who stops a launcher for good ends it some time
        sent.append("KILL to launcher")
    if num == 1 and "STOP to rank" in sent:
        time.sleep(2.0)
        _strike(process, Blow("rank", "CONT", "rank 0"), usual_s, num, ports)  # because: it has no peer to miss it
    ended = process.to_the_end(STOPPED_S)
    wrong = [f"left {one}" for one in ended.left] + _wrong_end(folder, sent, ended.code, ended.output)
    (folder / "starts.json").unlink(missing_ok=True)  # because: these starts are meant to be lost
    wrong += [f"port {port} still listens" for port in sorted(ports & _listening())]
    wrong += [f"{path} is left" for path in _kept(place) if "KILL to launcher" not in sent]
    again = Broken(command).to_the_end()
    wrong += [f"the last start: left {one}" for one in again.left]
    if again.code != 0:
        wrong.append(f"the same command ended with {again.code}: {again.output[-1500:]}")
    else:
        found = reached(folder)
        wrong += [f"{name} differ from those of an unbroken run" for name in found if found[name] != wanted[name]]
        wrong += [f"{one} is left" for one in temporary(folder)]
    if wrong:
        (options.folder / f"output{number:03d}.txt").write_text(ended.output)
    else:
        shutil.rmtree(folder)
    shutil.rmtree(place)
    facts = {"layout": layout, "blows": [str(blow) for blow in blows], "sent": sent, "code": ended.code}
    return facts | {"seconds": round(ended.seconds, 1), "wrong": wrong}


def _kept(place: Path) -> list[Path]:
    """Return what a run has left in the folder for temporary files, but for the cache that importing torch makes."""
    return sorted(path for path in place.iterdir() if not path.name.startswith("torchinductor_"))


def _strike(process: Broken, blow: Blow, usual_s: float, num: int, ports: set[int]) -> list[str]:
    """Wait for the moment, send the signal, and return what was sent: nothing where the run had ended before."""
    if isinstance(blow.moment, float):
        _until(process, lambda: time.monotonic() - process.began >= float(blow.moment) * usual_s)
    elif blow.moment in ("first step", "later"):
        process.line(lambda line: line.startswith("step "))
        time.sleep(0.3 if blow.moment == "later" else 0.0)
    else:
        title = {"server": "fork_server", "last rank": f"lmtrain rank {num - 1} ", "companion": "lmtrain companion"}
        wanted = title.get(blow.moment, f"lmtrain {blow.moment}")
        _until(process, lambda: _titled(process.mark, wanted) is not None)
    ports |= _ports(process.mark)
    if blow.target == "launcher":
        _until(process, lambda: _catches(process.process.pid, signal.SIGTERM))
        pid: int | None = process.process.pid if process.process.poll() is None else None
    else:
        title = {"server": "fork_server", "rank": f"lmtrain rank {num - 1} "}
        wanted = title.get(blow.target, f"lmtrain {blow.target}")
        if isinstance(blow.moment, float):
            _until(process, lambda: _titled(process.mark, wanted) is not None, timeout_s=5.0)
        pid = _titled(process.mark, wanted)
    if pid is None:
        return []
    first, _, second = blow.action.partition(" ")
    with suppress(ProcessLookupError):
        os.kill(pid, getattr(signal, f"SIG{first}"))
        if second:
            time.sleep(1.0)
            os.kill(pid, getattr(signal, f"SIG{second}"))
        return [f"{blow.action} to {blow.target}"]
    return []


def _wrong_end(folder: Path, sent: Sequence[str], code: int, output: str) -> list[str]:
    """Return what is wrong with how a run ended that was sent these signals."""
    stops = [line.split()[0] for line in sent if line.split()[0] in STOPS]
    allowed = {0}
    if stops:
        allowed |= {75}
    for line in sent:
        # because: with rank 0's companion the hub is gone, and a rank without one is not watched and may hang
        allowed |= {76} if line.split()[-1] in ("rank", "companion") and not line.startswith("STOP CONT") else set()
        allowed |= {-9} if line == "KILL to launcher" else set()
    wrong = [] if code in allowed else [f"exit code {code}, where {sorted(allowed)} are right: {output[-1500:]}"]
    if "Traceback" in output:
        wrong.append(f"a traceback: {output[output.index('Traceback') :][:1500]}")
    if sent == ["KILL to server"] and "the server that forks the ranks" in output:
        told = re.search(r"On node \S+, the server that forks the ranks was ended by SIGKILL\. A new server", output)
        wrong += [] if told else ["the message does not say how the server ended"]
    if code == 75:
        wrong += _wrong_stop(folder, stops)
    return wrong


def _wrong_stop(folder: Path, stops: Sequence[str]) -> list[str]:
    try:
        facts = json.loads((folder / "stop.json").read_text())
    except (OSError, ValueError) as error:
        return [f"stop.json: {error}"]
    right = any(f"SIG{name}" in str(facts.get("cause")) for name in stops)
    right = right and (facts.get("exit_code"), facts.get("requeue")) == (75, True)
    right = right and "resume" in facts and (facts["resume"] is None or Path(facts["resume"], "manifest.json").exists())
    return [] if right else [f"stop.json says {facts}"]


def _until(process: Broken, happened: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while process.process.poll() is None and not happened() and time.monotonic() < deadline:
        time.sleep(0.002)


def _titled(mark: str, title: str) -> int | None:
    """Return the process of a run whose command line has this text."""
    for pid in marked(mark):
        with suppress(OSError):
            if title.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "):
                return pid
    return None


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal; before that the system ends it, as any program."""
    with suppress(OSError):
        caught = re.search(r"SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return False


def _ports(mark: str) -> set[int]:
    """Return where the ranks of a run meet."""
    found = set()
    for pid in marked(mark):
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes()
            found |= {int(port) for port in re.findall(rb"\0MASTER_PORT=([0-9]+)\0", variables)}
    return found


def _listening() -> set[int]:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTEN}


def full_table(options: Options) -> dict[str, Any]:
    """Start runs as a user who may have only so many processes: from too few for a launcher to enough for all."""
    wrong, codes = list[str](), list[int]()
    for number, most in enumerate((1, 2, 3, 4, 5, 6, 8, 12, 20)):
        place = options.folder / f"few{number}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        user = 20_000 + os.getpid() % 10_000 + number
        os.chown(place, user, user)
        done = _as_user(user, most, words(options, "dp2", place / "run"), {"TMPDIR": str(place), "HOME": str(place)})
        codes.append(done.returncode)
        # because: an orphan that has ended waits for the system's first process to notice, which can take a while
        left = [pid for pid in Path("/proc").iterdir() if pid.name.isdecimal() and _owner(pid) == user]
        left = [pid for pid in left if not _has_ended(pid)]
        wrong += [f"{most} processes: left {pid.name}" for pid in left]
        output = done.stdout
        # because: a rank that gets no thread from the system may be ended by torch, and says so in torch's words
        silent = done.returncode != 0 and "rror: " not in output
        wrong += [f"{most} processes: no message: {output[-1500:]}"] * silent
        # because: what a rank itself cannot start is an error of the rank; the launcher and the server must not fail so
        ours = "Traceback" in output and re.search(r"in (launch|serve|fork_for_launcher|_fork_helper)\n", output)
        wrong += [f"{most} processes: a traceback: {output[-3000:]}"] * bool(ours)
        shutil.rmtree(place)
    return {"wrong": wrong, "codes": codes}


def _as_user(
    user: int, most: int, command: Sequence[str], variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    # because: what belongs to root is to be read still, as a user's own environment would be
    drop = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", f"--inh-caps=-all,+{_CAP_READ}"]
    drop += [f"--ambient-caps=-all,+{_CAP_READ}", f"--bounding-set=-all,+{_CAP_READ}"]
    return subprocess.run(
        ["prlimit", f"--nproc={most}", *drop, sys.executable, "-m", "lmtrain", *command], text=True, check=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, errors="replace",
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200", **variables},
    )  # fmt: skip


def _has_ended(path: Path) -> bool:
    with suppress(OSError):
        return (path / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def _owner(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_uid
    return -1
