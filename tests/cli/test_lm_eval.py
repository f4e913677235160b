"""`python -m lmtrain.cli.harness`: the harness's own command, and what is said where there is no harness."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lmtrain.cli import harness
from lmtrain.runtime.machine.pip_install_hint import install_command


def test_without_the_package_the_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval" or name == "lmtrain.eval.harness"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # an import that fails
    with pytest.raises(SystemExit) as ended:
        harness.main()
    assert ended.value.code == 2
    assert install_command("harness") in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_an_error_of_ours_is_said_as_everywhere(tmp_path: Path) -> None:
    words = ["--model=lmtrain", "--model_args", f"pretrained={tmp_path}/absent", "--tasks", "lambada_openai"]
    done = subprocess.run(
        [sys.executable, "-m", "lmtrain.cli.harness", "run", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 66, done.stderr
    assert f"{tmp_path}/absent" in done.stderr.splitlines()[-1]
