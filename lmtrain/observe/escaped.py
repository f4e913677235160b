"""Text that a terminal shows and does not obey: what names and files hold is spelt out. No torch, no rich.

Called by whatever writes lines for people: the command line's printing, the log, the live view.
"""

from __future__ import annotations

import re

# because: these move the cursor, change the terminal, turn the order of letters round, or are no characters at all
_OBEYED = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")


def escaped(text: str) -> str:
    r"""Every character that is more than ink as JSON writes it: an escape becomes \u001b. JSON stays the same JSON."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
