"""The build backend: setuptools, told what packages and C++ files there are, and where pybind11's headers stand.

Called by pip through pyproject.toml's [build-system], in the repository's root. Packages and sources are found, so that
a new folder or file needs no list. The compiled helper is optional: an install without a compiler succeeds and the
Python twins take over.
"""

from __future__ import annotations

import os
from glob import glob
from typing import Any

import setuptools
from setuptools.build_meta import *  # noqa: F403 - the hooks of PEP 517 and PEP 660, all of them

try:
    import pybind11
except ImportError:  # the extension is optional, and so is what it needs
    pass
else:
    _known = os.environ.get("CPLUS_INCLUDE_PATH")
    os.environ["CPLUS_INCLUDE_PATH"] = os.pathsep.join(filter(None, [pybind11.get_include(), _known]))

_setup = setuptools.setup


def setup(**given: Any) -> Any:
    """What setuptools calls where a project has no setup.py, with what pyproject.toml cannot say without a list."""
    packages = [name for root in ("lmtrain", "data_tools") for name in (root, *_below(root))]
    helper = setuptools.Extension(
        "lmtrain._native",
        sources=sorted(glob("csrc/*.cpp")),
        depends=sorted(glob("csrc/*.h")),
        language="c++",
        extra_compile_args=["-std=c++17", "-O3", "-g0", "-fvisibility=hidden"],
        optional=True,
    )
    return _setup(packages=[*packages, "lmtrain.conf"], ext_modules=[helper], **given)


def _below(root: str) -> list[str]:
    return [f"{root}.{name}" for name in setuptools.find_packages(root)]


setuptools.setup = setup
