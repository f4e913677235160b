"""How lmtrain was installed, and so the command that adds one of its extras. Called where a package is missing."""

from __future__ import annotations

import json
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from urllib.parse import unquote, urlparse


def install_command(extra: str) -> str:
    """Return the pip command that installs an extra, for an lmtrain from a checkout, a file or an index."""
    try:
        told = Distribution.from_name("lmtrain").read_text("direct_url.json")
    except PackageNotFoundError:  # because: a checkout can be on PYTHONPATH alone
        return f"pip install -e '{Path(__file__).parents[3]}[{extra}]'"
    if told is None:
        return f"pip install 'lmtrain[{extra}]'"
    found = json.loads(told)
    url = str(found["url"])
    if "dir_info" in found:
        option = "-e " if found["dir_info"].get("editable") else ""
        return f"pip install {option}'{unquote(urlparse(url).path)}[{extra}]'"
    url = f"{found['vcs_info']['vcs']}+{url}" if "vcs_info" in found else url
    return f"pip install 'lmtrain[{extra}] @ {url}'"
