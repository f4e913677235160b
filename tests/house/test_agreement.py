"""Ranks agree in one way once they have met: by `Peers`, and by `collective_phase`, which is built on them.

Whoever would ask the group by itself would be one more way, with failures, marks and costs of its own. What else talks
through torch's groups is listed here, with what it sends.
"""

from __future__ import annotations

import ast
from typing import Any

import pytest

AGREE = "lmtrain/parallel/mesh.py"
TALK = {
    AGREE: "what processes agree on",
    "lmtrain/runtime/processes/process_group.py": "names of hosts, bytes of rank 0, and the last meeting of all",
    "lmtrain/parallel/tp_linears_and_collectives.py": "numbers of the model",
    "lmtrain/parallel/pipeline/stage_to_stage_messages.py": "what stages hand to each other",
    "lmtrain/parallel/weights/reduce_and_clip_gradients.py": "gradients of tied weights",
    "lmtrain/train/record/metrics_writer.py": "the sum that is a digest of the first weights",
}
VERBS = {
    "all_gather", "all_reduce", "all_to_all", "barrier", "batch_isend_irecv", "broadcast", "gather", "irecv", "isend",
    "recv", "reduce", "reduce_scatter", "scatter", "send",
}  # fmt: skip
PEERS = {
    "lmtrain/runtime/processes/succeed_on_all_ranks_or_none.py": {"Peers", "SingleProcess"},
    AGREE: {"GroupPeers", "DefaultGroupPeers"},
}


def talks(tree: ast.AST) -> bool:
    """Whether this calls a collective of torch, by whichever of its longer names."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "dist"
        and any(node.func.attr in (verb, f"{verb}_into_tensor", f"{verb}_tensor", f"{verb}_object") for verb in VERBS)
        for node in ast.walk(tree)
    )


def kinds_of_peers(tree: ast.AST) -> set[str]:
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(
            isinstance(part, ast.FunctionDef) and part.name == "gather" and part.args.args[-1].arg == "numbers"
            for part in node.body
        )
    }


@pytest.mark.wide
def test_who_talks_through_groups_is_known(house: Any) -> None:
    found = {module.shown for module in house.modules.values() if talks(module.tree)}
    assert found == set(TALK), "agree by `collective_phase` or `all_equal`, or list what is sent"


def test_peers_are_of_few_kinds(house: Any) -> None:
    found = {module.shown: kinds for module in house.modules.values() if (kinds := kinds_of_peers(module.tree))}
    assert found == PEERS


def test_torch_is_known_by_the_name_that_is_looked_for(house: Any) -> None:
    """`dist` alone: under another name a collective would go unseen."""
    for module in house.modules.values():
        for node in module.nodes:
            match node:
                case ast.Import(names=names):
                    said = {name.asname for name in names if name.name == "torch.distributed"}
                    assert said <= {"dist"}, module.shown
                case ast.ImportFrom(module="torch.distributed", names=names):
                    assert not VERBS & {name.name for name in names}, module.shown


def test_a_collective_is_seen() -> None:
    assert talks(ast.parse("def f(x):\n    return dist.all_gather_into_tensor(x, x)"))
    assert not talks(ast.parse("def f(x):\n    return logits.gather(-1, x)"))
