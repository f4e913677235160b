"""The launcher's side of the server: a server that is lost or stands still is replaced, and no process runs twice."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lmtrain.runtime.processes import start_rank_processes
from lmtrain.runtime.processes.start_rank_processes import OrphanAdoption, RankStarter, StartCancelledError
from tests.marks import wide
from tests.unit.runtime.starting import MODULE, Place

ANOTHER = "A new server starts when it is needed."


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def server_of(starter: RankStarter) -> int:
    assert starter._server is not None
    return starter._server.pid


def test_a_server_that_was_killed_is_named_and_replaced(place: Place) -> None:
    with place.starter(place.program("print('done')")) as starter:
        starter.open()
        first = server_of(starter)
        os.kill(first, signal.SIGKILL)
        assert place.run(starter) == (0, "done\n", "")
        assert server_of(starter) != first
    assert place.said == [f"On node here, the server that forks the ranks was ended by SIGKILL. {ANOTHER}"]


def test_a_server_that_is_lost_while_nothing_is_asked_of_it_is_named(place: Place) -> None:
    with place.starter(place.program("")) as starter:
        starter.open()
        starter.check_server()
        assert place.said == []
        os.kill(server_of(starter), signal.SIGTERM)  # blocked, as in its forks
        os.kill(server_of(starter), signal.SIGQUIT)
        os.waitid(os.P_PID, server_of(starter), os.WEXITED | os.WNOWAIT)
        starter.check_server()
    assert place.said == [f"On node here, the server that forks the ranks was ended by SIGQUIT. {ANOTHER}"]


def test_a_server_that_stands_still_is_replaced(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_rank_processes, "_MAX_STOPPED_S", 0.05)
    with place.starter(place.program("print('done')")) as starter:
        starter.open()
        os.kill(server_of(starter), signal.SIGSTOP)
        assert place.run(starter) == (0, "done\n", "")
    assert place.said == [
        f"On node here, the server that forks the ranks was stopped by a signal for 0 s. {ANOTHER}"
    ]


def test_a_server_that_stood_still_for_a_moment_is_kept(place: Place) -> None:
    with place.starter(place.program("print('done')")) as starter:
        starter.open()
        server = server_of(starter)
        os.kill(server, signal.SIGSTOP)
        with subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -CONT {server}"]):
            assert place.run(starter) == (0, "done\n", "")
        assert server_of(starter) == server
    assert place.said == []


# makes the first server end as soon as it has forked a process, before it can say so
DIES_AFTER_FORK = """
import os, pathlib, signal, sys
server, first = sys.modules["__main__"], pathlib.Path(__file__).with_name("first")
fork = server.fork_for_launcher
def fork_and_die():
    answer = fork()
    if answer[0] and not first.exists():
        first.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return answer
server.fork_for_launcher = fork_and_die
"""


def test_a_process_whose_server_ended_before_it_could_say_so_runs_nothing(place: Place) -> None:
    """Otherwise two processes would be the same rank."""
    body = f"open({str(place.folder / 'ran')!r}, 'a').write('once ')"
    with place.starter(place.program(body, imported=DIES_AFTER_FORK)) as starter:
        assert place.run(starter) == (0, "", "")
        deadline = time.monotonic() + 30
        while (left := set(place.children()) - {server_of(starter)}) and time.monotonic() < deadline:
            for pid in left:
                os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)
        assert place.children() == [server_of(starter)]
    assert (place.folder / "ran").read_text() == "once "
    assert len(place.said) == 1


def test_a_fork_runs_nothing_before_its_launcher_knows_of_it(place: Place) -> None:
    ran = place.folder / "ran"
    seen: list[tuple[int, bool]] = []

    def announce(pid: int) -> None:
        time.sleep(0.1)
        seen.append((pid, ran.exists()))

    with place.starter(place.program(f"open({str(ran)!r}, 'x')")) as starter:
        assert place.run(starter, announce=announce) == (0, "", "")
    assert [was_there for _, was_there in seen] == [False]
    assert ran.exists()


def test_after_three_lost_servers_processes_are_started_by_themselves(place: Place) -> None:
    body = "import sys\nprint('lmtrain.runtime.processes.fork_server' in sys.orig_argv)"
    imported = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    with place.starter(place.program(body, imported=imported)) as starter:
        assert place.run(starter) == (0, "False\n", "")
    lost = "On node here, the server that forks the ranks was ended by SIGKILL"
    assert place.said == [
        *[f"{lost}. {ANOTHER}"] * 2, f"{lost}, after 2 others were lost. Ranks are now started without a server."
    ]  # fmt: skip


def test_who_is_asked_to_stop_does_not_wait_for_the_server(place: Place) -> None:
    imported = "import time\ntime.sleep(60)"
    began = time.monotonic()
    with (
        pytest.raises(StartCancelledError),
        place.starter(place.program("", imported=imported), is_cancelled=lambda: True) as starter,
    ):
        starter.open()
    assert time.monotonic() - began < 50
    assert place.children() == []


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_full_process_table_is_an_error_of_the_system(place: Place, which: str) -> None:
    """The server cannot fork, or what it has forked cannot fork again."""
    full = "import os\nfork, server = os.fork, os.getpid()\ndef refuse():\n    raise BlockingIOError(11, 'full')\n"
    full += {"first": "os.fork = refuse", "second": "os.fork = lambda: fork() if os.getpid() == server else refuse()"}[
        which
    ]
    with place.starter(place.program("", imported=full)) as starter, pytest.raises(BlockingIOError) as raised:
        place.run(starter)
    assert raised.value.errno == errno.EAGAIN
    assert place.said == []
    assert place.children() == []


def test_settings_can_be_longer_than_a_message(place: Place) -> None:
    """A mix of thousands of datasets is one setting."""
    imported = "kept = []\ndef keep(names):\n    kept.extend(names)\n"
    program = place.program("import imported_first; print(len(imported_first.kept))", imported=imported)
    names = ["x" * 100] * 5000
    long = replace(program, prepare=("imported_first:keep", {"names": names}))
    with place.starter(long) as starter:
        assert place.run(starter) == (0, "5000\n", "")


def test_the_server_is_not_used_where_forks_are_not_adopted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_rank_processes, "_adopts_orphans", lambda: False)
    with place.starter(place.program("print('done')")) as starter:
        assert place.run(starter) == (0, "done\n", "")
    assert place.explained == ["the system does not let this process adopt what another has forked"]


def test_orphans_are_adopted_within_and_not_outside() -> None:
    before = start_rank_processes._adopts_orphans()  # other tests may have had this process adopt them for good
    with OrphanAdoption():
        assert start_rank_processes._adopts_orphans()
    assert start_rank_processes._adopts_orphans() == before


def test_once_the_server_is_closed_processes_are_started_by_themselves(place: Place) -> None:
    body = "import sys\nprint('lmtrain.runtime.processes.fork_server' in sys.orig_argv)"
    with place.starter(place.program(body)) as starter:
        assert place.run(starter) == (0, "True\n", "")
        starter.close_server()
        assert place.children() == []
        assert place.run(starter) == (0, "False\n", "")
    assert place.explained == []


LAUNCHER = f"""
import os, sys
from lmtrain.runtime.processes.local_rank_launcher import launch
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.runtime.processes.start_rank_processes import Program
outcome = launch(Program(sys.argv[1:], module={MODULE!r}), ProcessEnv().as_launcher(2))
os.write(2, b"%d" % outcome.exit_code)
"""


def _ignore_children() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _close_output() -> None:
    os.close(1)


@pytest.mark.parametrize(
    ("prepare", "fork"),
    [(_ignore_children, "1"), (_close_output, "0"), *wide((_ignore_children, "0"), (_close_output, "1"))],
)
def test_a_launcher_that_was_started_in_an_unusual_way(place: Place, prepare: Callable[[], None], fork: str) -> None:
    """By a service that ignores the ends of its children, or without an output."""
    place.program("import os, sys\nprint('done')\nsys.exit(75 if os.environ['RANK'] == '1' else 0)")
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(place.folder / "body.py")], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "LMTRAIN_FORK": fork},
        preexec_fn=prepare,  # because: this process has no other thread that matters
    ) as job:  # fmt: skip
        output, errors = job.communicate(timeout=60)
    assert errors == "[rank 1] done\n75"
    assert output == ("" if prepare is _close_output else "done\n")
