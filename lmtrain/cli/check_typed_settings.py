"""Find what is wrong with the settings of a command line that is refused for another reason: one message has it all.

Called by explain_click_errors, through main, with a line whose options are corrected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lmtrain.errors import LayoutError, LmtrainError, SettingsError


def settings_problems(words: Sequence[str], params: dict[str, Any]) -> Iterator[str]:
    """Yield the marked problems of the settings among `words`, a command line whose parsed parameters are `params`. A
    setting that is missing is none of them.
    """
    overrides, takes_several = params.get("overrides"), params.get("multirun") or params.get("array")
    if not overrides or "config_dir" not in params or takes_several or params.get("calibrate"):
        return
    from lmtrain.cli.plan.plan_question_and_search import read_question
    from lmtrain.cli.pretrain.settings_from_earlier_run import compose_run

    config_dir, name = params["config_dir"], params.get("config_name") or "pretrain"
    try:
        if words[0] == "plan":
            read_question(overrides, params["layout"], config_dir, name)
        else:
            compose_run(overrides, from_run=params.get("from_run"), config_dir=config_dir, name=name)
    except (SettingsError, LayoutError) as error:
        yield from (problem for problem in error.marked_problems if " is not set" not in problem)
    except LmtrainError:
        return  # because: it is about a file or a missing word, and is reported when the corrected line is typed
