"""`lmtrain env`: what a bug report needs to know about this machine."""

from __future__ import annotations

import json

from lmtrain.cli.options import Json
from lmtrain.cli.say import say
from lmtrain.cli.terminal import echo


def env(as_json: Json = False) -> None:
    """Print versions, processor, devices and compiled helpers, for a bug report. No secrets are read."""
    import torch

    from lmtrain.cli.screen import Screen
    from lmtrain.native import lib
    from lmtrain.runtime.device import device_name, memory_stats, pick_device
    from lmtrain.runtime.process import environment_report
    from lmtrain.units import format_bytes

    device = pick_device("auto")
    report = environment_report() | {
        "device": device_name(device),
        "device_memory": format_bytes(memory_stats(device).total_bytes),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "compiled_helpers": lib is not None,
    }
    if as_json:
        echo(json.dumps(report, indent=1))
        return
    for key, value in report.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        say(Screen(), f"{key:18} {'none' if value is None else value}")
