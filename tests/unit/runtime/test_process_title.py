"""What ps and /proc say of a fork: its own command line, name and variables, whatever its parent was started with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmtrain.runtime.processes.fork_server import PLACEHOLDER_BYTES, PLACEHOLDER_VARIABLE

CODE = """
import os, sys
from pathlib import Path
from lmtrain.runtime.processes.fork_server import show_environment, show_title
def seen():
    words = Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode()
    variables = Path("/proc/self/environ").read_bytes().split(b"\\0")
    return words, Path("/proc/self/comm").read_text().strip(), sorted(v.decode() for v in variables if v)
"""


def told(body: str, *words: str, room: bool = True, **variables: str) -> list[str]:
    env = {"FIRST": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", os.getcwd()), **variables}
    env |= {PLACEHOLDER_VARIABLE: " " * PLACEHOLDER_BYTES} if room else {}
    command = [sys.executable, "-c", CODE + body, *words]
    done = subprocess.run(command, env=env | {"LAST": "2"}, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_the_title_replaces_the_command_line() -> None:
    body = 'show_title("lmtrain rank 3 of 8: pretrain a=b", "lmtrain rank 3 and more")\nprint(*seen()[:2], sep="\\n")'
    assert told(body, "pretrain", "a=b") == ["lmtrain rank 3 of 8: pretrain a=b", "lmtrain rank 3 "[:15].strip()]


def test_a_title_that_is_too_long_is_cut_and_nothing_else_is_written() -> None:
    body = 'before = seen()\nshow_title("x" * 100_000, "name")\nafter = seen()\n'
    body += "print(len(after[0]) == len(before[0]), set(after[0]), before[2] == after[2], os.environ['FIRST'])"
    assert told(body) == ["True {'x'} True 1"]


def test_the_variables_of_a_fork_are_shown_beside_those_of_its_parent() -> None:
    body = "os.environ.update(RANK='3', WORLD_SIZE='8')\nshow_environment({'RANK': '3', 'WORLD_SIZE': '8'})\n"
    body += "print(*seen()[2], sep='\\n')\n"
    body += f"print({PLACEHOLDER_VARIABLE!r} in os.environ, os.environ['FIRST'], os.environ['LAST'])\n"
    body += "import subprocess\nprint(subprocess.run(['env'], capture_output=True, text=True).stdout.count('RANK=3'))"
    found = told(body)
    assert {"FIRST=1", "LAST=2", "RANK=3", "WORLD_SIZE=8"} <= set(found[:-2])
    assert not [line for line in found if line.startswith(PLACEHOLDER_VARIABLE)]
    assert found[-2:] == ["False 1 2", "1"]


@pytest.mark.parametrize("room", [True, False])
def test_what_has_no_room_is_not_shown(room: bool) -> None:
    body = f"show_environment({{'RANK': '3' * {PLACEHOLDER_BYTES + 50}}})\n"
    body += "print([v for v in seen()[2] if v[:4] == 'RANK'], 'FIRST=1' in seen()[2], "
    body += f"{PLACEHOLDER_VARIABLE!r} in os.environ)"
    assert told(body, room=room) == ["[] True False"]


def test_the_name_is_what_the_system_shows(tmp_path: Path) -> None:
    body = "show_title('lmtrain guardian:', 'lmtrain guard')\n"
    body += "import subprocess\ncommand = ['ps', '-o', 'comm=,args=', '-p', str(os.getpid())]\n"
    body += "print(subprocess.run(command, capture_output=True, text=True).stdout.strip())"
    (line,) = told(body, PATH=os.environ["PATH"])
    assert line.split(maxsplit=2) == ["lmtrain", "guard", "lmtrain guardian:"]
