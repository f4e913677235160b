"""`lmtrain env`: print the facts about this machine and installation that a bug report needs."""

from __future__ import annotations

from lmtrain.cli.screen.print_facts_and_tables import PlainConsole
from lmtrain.cli.screen.print_messages_and_json import print_json, print_message
from lmtrain.cli.shared_options import Json


def env(as_json: Json = False) -> None:
    """Print versions, processor, devices and compiled helpers, for a bug report. No secrets are read."""
    from lmtrain.runtime.machine.choose_device import device_report
    from lmtrain.runtime.processes.process_environment import environment_report, has_compiled_helpers
    from lmtrain.runtime.processes.start_rank_processes import describe_rank_start
    from lmtrain.start.processes_of_command import TRAINING_IMPORTS

    helpers, ranks = has_compiled_helpers(), describe_rank_start(TRAINING_IMPORTS)
    report = environment_report() | device_report() | {"compiled_helpers": helpers, "ranks": ranks}
    if as_json:
        return print_json(report)
    for key, value in report.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        print_message(PlainConsole(), f"{key:18} {'none' if value is None else value}")
    return None
