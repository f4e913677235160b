"""Removes the line that a verb prints after five seconds, since whether it does depends on the machine."""

import re

_LINE = re.compile(r"(?m)^lmtrain [a-z -]+: at work, .* elapsed\n")


def without_at_work_lines(output: str) -> str:
    return _LINE.sub("", output)
