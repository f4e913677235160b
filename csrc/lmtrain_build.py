"""The build backend: setuptools, with pybind11's headers where a compiler finds them.

Called by pip through pyproject.toml's [build-system]. Everything is handed on to setuptools; the compiled helper is
optional there, so that an install without a compiler succeeds and the Python twins take over.
"""

from __future__ import annotations

import os

from setuptools.build_meta import *  # noqa: F403 - the hooks of PEP 517 and PEP 660, all of them

try:
    import pybind11
except ImportError:  # the extension is optional, and so is what it needs
    pass
else:
    _known = os.environ.get("CPLUS_INCLUDE_PATH")
    os.environ["CPLUS_INCLUDE_PATH"] = os.pathsep.join(filter(None, [pybind11.get_include(), _known]))
