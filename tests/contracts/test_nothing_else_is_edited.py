"""A kind is a file, its settings and a config, as CONTRIBUTING's table says: no list of kinds stands in another file.

The plugin's kinds are put into a copy of the tree as if they were the house's own, and the tests that look kinds up are
run there: also one with a list, which has to be the only one that complains.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmtrain.config.settings_base import kinds
from lmtrain.optim.schedule_settings import ScheduleSettings

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("lmtrain", "data_tools", "conf", "tests", "docs", "pyproject.toml")
EXAMPLE = "tests/plugin_example"
HOMES = {
    f"{EXAMPLE}/mean_mixer.py": "lmtrain/models/new_mean_mixer.py",
    f"{EXAMPLE}/mean_mixer_settings.py": "lmtrain/models/new_mean_mixer_settings.py",
    f"{EXAMPLE}/conf/model/mean_mixer.yaml": "conf/model/new_mean_mixer.yaml",
    f"{EXAMPLE}/heavy_ball.py": "lmtrain/optim/new_heavy_ball.py",
    f"{EXAMPLE}/heavy_ball_settings.py": "lmtrain/optim/new_heavy_ball_settings.py",
    f"{EXAMPLE}/conf/optim/heavy_ball.yaml": "conf/optim/new_heavy_ball.yaml",
    f"{EXAMPLE}/stairs_settings.py": "lmtrain/optim/new_stairs_settings.py",
    f"{EXAMPLE}/conf/schedule/stairs.yaml": "conf/schedule/new_stairs.yaml",
    f"{EXAMPLE}/eager_schedule.py": "lmtrain/schedules/new_eager.py",
    f"{EXAMPLE}/lines_task.py": "lmtrain/eval/tasks/new_lines.py",
    "data_tools/corpora/openwebtext.py": "data_tools/corpora/new_openwebtext.py",
}
LIST = "tests/unit/optim/test_schedule_settings.py"
WORDS = ("mean_mixer", "heavy_ball", "stairs", "eager", "lines", "openwebtext")
LOOKING = (
    "tests/contracts/test_schedules.py", "tests/contracts/test_tasks.py",
    "tests/contracts/test_optimizers.py::test_its_settings_know_its_memory",
    *(f"tests/contracts/test_models.py::{test}[new_mean_mixer]" for test in (
        "test_settings_go_round_and_every_key_is_explained", "test_words_are_true", "test_shape_is_the_models",
        "test_settings_tell_every_weight_and_its_cut_before_torch_is_there", "test_stages_hold_what_the_settings_say",
    )),
    f"{LIST}::test_what_holds_for_all", f"{LIST}::test_a_list",
    "tests/unit/schedules/test_schedules.py::test_every_table_up_to_eight_ranks_is_complete_and_never_halts[new_eager]",
    "tests/unit/data_tools/corpora/test_recipe.py::test_every_recipe_is_found_pinned_and_safe",
    "tests/promise/test_promise.py::test_every_key_has_a_proof_and_every_proof_has_a_key",
    "tests/promise/test_promise.py::test_every_word_that_a_key_knows_is_tried",
    "tests/house/test_style.py", "tests/house/test_docs.py::test_every_key_of_the_shipped_configs_has_a_comment",
    "tests/cli/test_config.py::test_explain_a_key", "tests/cli/test_config.py::test_groups_and_their_choices",
    "tests/cli/test_terminal.py::test_kinds_that_have_a_key_are_a_sentence",
    "tests/cli/test_evaluate.py::test_the_list_names_every_task_with_its_file",
)  # fmt: skip


def as_the_houses(text: str) -> str:
    """What a plugin's file would be in the house: imports from its new home, and a word that is not taken."""
    modules = {old.removesuffix(".py").replace("/", "."): new.removesuffix(".py").replace("/", ".")
               for old, new in HOMES.items() if old.endswith(".py")}  # fmt: skip
    text = re.sub(r"tests\.plugin_example\.\w+", lambda found: modules[found[0]], text)
    word = "|".join(WORDS)
    return re.sub(rf'(?<=")({word})(?=")|(?<=^kind: )({word})\b', r"new_\g<0>", text, flags=re.MULTILINE)


@pytest.mark.wide
def test_a_new_kind_of_each_is_found_and_no_list_is_missed(tmp_path: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, tmp_path / name)
        else:
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for old, new in HOMES.items():
        (tmp_path / new).write_text(as_the_houses((ROOT / old).read_text()))
    with (tmp_path / LIST).open("a") as file:
        file.write(f"\n\ndef test_a_list() -> None:\n    assert list(KINDS) == {list(kinds(ScheduleSettings))}\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    asked = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "not wide", *LOOKING]
    ran = subprocess.run(asked, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    failed = re.findall(r"^FAILED (\S+)|^ERROR (\S+)", ran.stdout, re.MULTILINE)
    assert failed == [(f"{LIST}::test_a_list", "")], ran.stdout + ran.stderr
    missing = [f"new_{word}" for word in WORDS[:-1] if f"[new_{word}" not in ran.stdout]
    assert not missing
