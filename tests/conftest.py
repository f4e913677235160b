"""What every test may ask for, the rule that a skipped test must be on a list with a reason, and what was left out."""

from __future__ import annotations

import os
import signal
import sys
import tomllib
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.layouts.workers import Pool

ROOT = Path(__file__).resolve().parent.parent
# marker -> the command that runs the tests that bear it
COMMANDS = {"wide": "make test-all", "slow": "make test-slow"}
ENVIRONMENT = dict(os.environ)  # in which the tests were started
_skipped: list[tuple[str, str]] = []
_left: Counter[str] = Counter()
hypothesis.settings.register_profile("house", deadline=None)  # because: a busy machine is not a slow function
hypothesis.settings.load_profile("house")

# because: a shell starts background commands deaf to Ctrl-C and Ctrl-\, nohup makes them deaf to hanging up, and what
# is under test would inherit that
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL),
):  # fmt: skip
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real corpora that are not part of the project; a folder `shared/data` beside the checkout, if there is one."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("shared/data is not beside the checkout")
    return folder


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for tests over several ranks; none is started before a test needs it."""
    with Pool() as workers:
        yield workers


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Let no test depend on variables that collection, other tests or the fixtures of their modules have left behind.
    """
    restore_environment()
    result = yield
    restore_environment()
    return result


def restore_environment() -> None:
    """Make the environment what it was at the start: commands called in this process write variables, and so does
    torch's compiler when it is imported.
    """
    for name in {name for name in os.environ.keys() | ENVIRONMENT.keys() if not name.startswith("PYTEST")}:
        if name not in ENVIRONMENT:
            del os.environ[name]
        elif os.environ.get(name) != ENVIRONMENT[name]:
            os.environ[name] = ENVIRONMENT[name]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tests share few cores; equality must not hang on how many there are."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _skipped.append((report.nodeid, reason.removeprefix("Skipped: ")))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In continuous integration a test that skips is a failure unless tests/allowed_skips.toml says why it may."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:  # a worker of pytest-xdist
        output["left"] = dict(_left)
        return
    if not os.environ.get("CI"):
        return
    allowed = tomllib.loads((ROOT / "tests" / "allowed_skips.toml").read_text())["skip"]
    for nodeid, reason in _skipped:
        if not any(nodeid.startswith(entry["test"]) and entry["reason"] in reason for entry in allowed):
            print(f"\nskipped without being on tests/allowed_skips.toml: {nodeid} ({reason})")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    _left.update(name for item in items for name in COMMANDS if item.get_closest_marker(name))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker of pytest-xdist leaves out the same tests."""
    _left.update(Counter(getattr(node, "workeroutput", {}).get("left", {})) - _left)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, count in _left.items():
        terminalreporter.write_line(f"{count} tests marked {name} were left to `{COMMANDS[name]}`")
