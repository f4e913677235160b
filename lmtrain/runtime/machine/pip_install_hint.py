"""The pip command that adds one of lmtrain's extras to this installation. Called where a package is missing."""

from __future__ import annotations

import json
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from urllib.parse import unquote, urlparse


def install_command(extra: str) -> str:
    """Return the pip command that installs the optional dependencies `extra` of lmtrain. It names the source from which
    lmtrain itself was installed: a checkout, a file, a URL or the package index.
    """
    try:
        direct_url_text = Distribution.from_name("lmtrain").read_text("direct_url.json")
    except PackageNotFoundError:  # because: a checkout can be on PYTHONPATH alone
        return f"pip install -e '{Path(__file__).parents[3]}[{extra}]'"
    if direct_url_text is None:
        return f"pip install 'lmtrain[{extra}]'"
    direct_url = json.loads(direct_url_text)
    url = str(direct_url["url"])
    if "dir_info" in direct_url:
        option = "-e " if direct_url["dir_info"].get("editable") else ""
        return f"pip install {option}'{unquote(urlparse(url).path)}[{extra}]'"
    url = f"{direct_url['vcs_info']['vcs']}+{url}" if "vcs_info" in direct_url else url
    return f"pip install 'lmtrain[{extra}] @ {url}'"
