"""The most memory a command takes."""

from __future__ import annotations

import subprocess
import sys

# because: ru_maxrss of a process begins with that of the one that started it
_TOLD_AT_THE_END = """
import re, sys
from lmtrain.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1], file=sys.stderr)
"""


def peak_bytes(*arguments: object) -> int:
    """Runs `lmtrain ARGUMENTS`; the memory of that process and its threads."""
    command = [sys.executable, "-c", _TOLD_AT_THE_END, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stderr.splitlines()[-1]) * 1024
