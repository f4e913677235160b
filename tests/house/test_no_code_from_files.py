"""No file can make us run code: what unpickles, evaluates or builds shell commands is not used anywhere."""

from __future__ import annotations

import ast
from typing import Any

import pytest

MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
PICKLING = "torch.distributed.checkpoint"  # reads its own metadata with pickle
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "torch.load", "torch.jit.load", "torch.package.PackageImporter", "yaml.load", "yaml.load_all", "yaml.unsafe_load",
    "yaml.full_load", "os.system", "os.popen", "tempfile.mktemp", "hydra.utils.instantiate", "hydra.utils.call",
    "hydra.utils.get_method", "hydra.utils.get_object", "runpy.run_path", "subprocess.getoutput",
    "subprocess.getstatusoutput", "yaml.unsafe_load_all", "yaml.full_load_all", "yaml.Loader", "yaml.FullLoader",
    "yaml.UnsafeLoader", "runpy.run_module", "torch.hub.load", "torch.export.load", "torch.serialization.load",
    "torch.distributed.checkpoint.load", "pandas.read_pickle", "numpy.lib.format.read_array",
    "asyncio.create_subprocess_shell", "code.interact",
}  # fmt: skip
OBJECT_COLLECTIVES = "torch.distributed."  # ..._object and ..._object_list unpickle what a peer sends


def code_problems(house: Any) -> list[str]:
    problems = []
    for module in house.modules.values():
        names = _names(house, module)
        for node in (n for n in module.nodes if isinstance(n, ast.expr)):
            problems += [
                f"{module.shown}:{node.lineno} uses {what}. Files hold data only." for what in _uses(node, names)
            ]
        for item in house.imports(module):
            if item.target.split(".")[0] in MODULES or item.target.startswith(PICKLING):
                problems.append(f"{module.shown}:{item.line} imports {item.target}. Files hold data only.")
    return problems


def _names(house: Any, module: Any) -> dict[str, str]:
    """What each name of this file stands for: `import torch as t` -> {"t": "torch"}."""
    names: dict[str, str] = {}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            base = house._absolute(module, node)
            names |= {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
    return names


def _uses(node: ast.AST, names: dict[str, str]) -> list[str]:
    found = []
    if isinstance(node, (ast.Name, ast.Attribute)):
        full = _full_name(node, names)
        if full in CALLS:
            found.append(full)
        if full.startswith(OBJECT_COLLECTIVES) and full.endswith(("_object", "_object_list")):
            found.append(full)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in BUILTINS - names.keys():
            found.append(node.id)
    if isinstance(node, ast.Call):
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        shell = keywords.get("shell")
        if shell is not None and not (isinstance(shell, ast.Constant) and not shell.value):
            found.append("shell=True")
        pickled = keywords.get("allow_pickle")
        if pickled is not None and not (isinstance(pickled, ast.Constant) and pickled.value is False):
            found.append("allow_pickle=True")
    return found


def _full_name(node: ast.AST, names: dict[str, str]) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([names.get(node.id, node.id), *reversed(parts)])


def test_no_file_can_make_us_run_code(house: Any) -> None:
    problems = code_problems(house)
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import pickle\n", "imports pickle"),
        ("def f():\n    from joblib import load\n", "imports joblib"),
        ("import torch as t\nt.load('x', weights_only=True)\n", "torch.load"),
        ("from torch import load as read\nread('x')\n", "torch.load"),
        ("import torch.jit\ntorch.jit.load('x')\n", "torch.jit.load"),
        ("import yaml\nyaml.load('x', yaml.SafeLoader)\n", "yaml.load"),
        ("from hydra import utils\nutils.instantiate({})\n", "hydra.utils.instantiate"),
        ("from hydra.utils import instantiate as make\nmake({})\n", "hydra.utils.instantiate"),
        ("import numpy as np\nnp.load('x', allow_pickle=True)\n", "allow_pickle=True"),
        ("import torch.distributed.checkpoint as dcp\ndcp.load({})\n", "torch.distributed.checkpoint"),
        ("from torch.distributed.checkpoint import FileSystemReader\n", "torch.distributed.checkpoint"),
        ("import yaml\nclass A(yaml.UnsafeLoader):\n    pass\n", "yaml.UnsafeLoader"),
        ("import subprocess\nsubprocess.run('ls', shell=True)\n", "shell=True"),
        ("import os\nrun = os.system\n", "os.system"),
        ("import tempfile\ntempfile.mktemp()\n", "tempfile.mktemp"),
        ("eval('1')\n", "uses eval"),
        ("f = exec\n", "uses exec"),
        ("compile('1', '', 'eval')\n", "uses compile"),
        ("__import__('os')\n", "uses __import__"),
        ("import torch.distributed as dist\ndist.broadcast_object_list([])\n", "broadcast_object_list"),
    ],
)
def test_a_planted_danger_is_named(planted: Any, source: str, said: str) -> None:
    assert any(said in problem for problem in code_problems(planted({"lmtrain/data/a.py": source})))


def test_harmless_namesakes_pass(planted: Any) -> None:
    source = (
        "import re, json, torch, numpy as np, subprocess, yaml\n"
        "class A:\n    compile: bool = False\n"
        "re.compile('a')\njson.load(open('x'))\nmodel.compile()\ntorch.compile(model)\nmodel.eval()\n"
        "np.load('x', allow_pickle=False)\nsubprocess.run(['ls'], shell=False)\nyaml.safe_load('x')\n"
        "torch.distributed.all_reduce(x)\n"
    )
    assert code_problems(planted({"data_tools/a.py": source})) == []
