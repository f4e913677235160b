"""The newest rows of torch's flight recorder, as text: which collectives this process has begun and not ended.

Called by the watch when a run stands still. Only this process's own rows: what others write is never read.
"""

from __future__ import annotations

import json
import queue
import threading
from typing import Any

_NUM_ROWS = 30
_MOST_S = 1.0  # because: it asks for locks that a process which hangs may hold


def newest_rows() -> str:
    """Empty where this torch has no recorder, it was switched off, or it does not answer."""
    answer: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(_rows()), name="flight recorder", daemon=True).start()
    try:
        return answer.get(timeout=_MOST_S)
    except queue.Empty:
        return ""


def _rows() -> str:
    try:
        from torch._C import _distributed_c10d  # because: there is no public way, and not every build has this one

        dump: Any = vars(_distributed_c10d)["_dump_fr_trace_json"]
        entries = json.loads(dump()).get("entries", [])
        return "".join(f"{json.dumps(entry)}\n" for entry in entries[-_NUM_ROWS:])
    except Exception:  # because: whatever is wrong with it, the run is ending anyway
        return ""
