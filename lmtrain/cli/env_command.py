"""`lmtrain env`: print the facts about this machine and installation that a bug report needs."""

from __future__ import annotations

from contextlib import closing

from lmtrain.cli.screen.print_facts_and_tables import PlainConsole
from lmtrain.cli.screen.print_messages_and_json import print_json, print_message
from lmtrain.cli.shared_options import Json
from lmtrain.runtime.processes.process_environment import ProcessEnv, environment_report, has_compiled_helpers
from lmtrain.units import format_bytes


def env(as_json: Json = False) -> None:
    """Print versions, processor, devices and compiled helpers, for a bug report. No secrets are read."""
    import torch

    from lmtrain.runtime.machine.choose_device import device_name, pick_device, total_memory_bytes

    device = pick_device("auto")
    report = environment_report() | {
        "device": device_name(device),
        "device_memory": format_bytes(total_memory_bytes(device)),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "compiled_helpers": has_compiled_helpers(),
        "ranks": _describe_rank_start(),
    }
    if as_json:
        return print_json(report)
    for key, value in report.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        print_message(PlainConsole(), f"{key:18} {'none' if value is None else value}")
    return None


def _describe_rank_start() -> str:
    """Return in words how a run would start its ranks on this machine: forked from one server process, or each as a new
    process, with the reason. To find out, start such a server and stop it again.
    """
    from lmtrain.runtime.processes.start_rank_processes import Program, RankStarter
    from lmtrain.start.processes_of_command import TRAINING_IMPORTS

    reasons: list[str] = []
    environment, host = ProcessEnv().shared_environment(), ProcessEnv.detect().host
    program = Program([], imports=TRAINING_IMPORTS)
    starter = RankStarter(program, environment, host, report=reasons.append, explain_no_server=reasons.append)
    with closing(starter):
        starter.open()
    if not reasons:
        return "forked from one process, which imports for all of them"
    return f"each started by itself ({'; '.join(reasons)})"
