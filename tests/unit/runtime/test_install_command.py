"""The command that adds an extra, for each way to have come here."""

from __future__ import annotations

import json
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from lmtrain.runtime.machine.pip_install_hint import install_command


@pytest.mark.parametrize(
    ("told", "command"),
    [
        ({"url": "file:///a%20b/lm", "dir_info": {"editable": True}}, "pip install -e '/a b/lm[wandb]'"),
        ({"url": "file:///lm", "dir_info": {}}, "pip install '/lm[wandb]'"),
        ({"url": "file:///lm-0.1.whl", "archive_info": {}}, "pip install 'lmtrain[wandb] @ file:///lm-0.1.whl'"),
        ({"url": "https://x/lm", "vcs_info": {"vcs": "git"}}, "pip install 'lmtrain[wandb] @ git+https://x/lm'"),
        (None, "pip install 'lmtrain[wandb]'"),
        ("absent", f"pip install -e '{Path(__file__).parents[3]}[wandb]'"),
    ],
)  # fmt: skip
def test_an_extra_comes_from_where_lmtrain_came(told: Any, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        def read_text(self, name: str) -> str | None:
            return None if told is None else json.dumps(told)

    def from_name(name: str) -> Found:
        if told == "absent":
            raise PackageNotFoundError
        return Found()

    monkeypatch.setattr(Distribution, "from_name", from_name)
    assert install_command("wandb") == command
