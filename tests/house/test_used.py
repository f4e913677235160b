"""Nothing is defined for tests alone: what no other line of the packages names is either used or gone."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

# what somebody else calls by its name, or a promise of a published list, with the reason
ALLOWED = {
    "lmtrain.exchange.torch_files.read_pt_files_without_torch.readable": "asked by io.BufferedReader",
    "lmtrain.exchange.torch_files.read_pt_files_without_torch.seekable": "asked by zipfile",
    "lmtrain.exchange.torch_files.read_pt_files_without_torch.readinto": "called by io.BufferedReader",
    "lmtrain.exchange.torch_files.read_pickle_as_data.readline": "called by pickletools",
    "data_tools.read.compressed_and_parquet_readers.readable": "asked by io.BufferedReader",
    "data_tools.read.compressed_and_parquet_readers.readinto": "called by io.BufferedReader",
    "data_tools.corpora.download.redirect_request": "called by urllib",
    "lmtrain.cli.runs.runs_command.parse_args": "called by typer",
    "lmtrain.cli.subcommands.get_command": "called by typer",
    "lmtrain.cli.subcommands.resolve_command": "called by typer",
    "lmtrain.observe.hang_watch.start_companion_and_raise_verdict.send_stop": "passed to the signal handlers",
    "lmtrain.config.compose_files_with_hydra.load_config": "called by hydra",
    "lmtrain.config.compose_files_with_hydra.is_group": "called by hydra",
    "lmtrain.config.compose_files_with_hydra.is_config": "called by hydra",
    "lmtrain.config.compose_files_with_hydra.available": "called by hydra",
    "lmtrain.config.strict_yaml.compose_node": "called by yaml",
    "lmtrain.config.strict_yaml.compose_mapping_node": "called by yaml",
    "lmtrain.config.strict_yaml.compose_scalar_node": "called by yaml",
    "lmtrain.config.strict_yaml.construct_object": "called by yaml",
    "lmtrain.cli.screen.print_facts_and_tables.render_str": "called by rich",
    "lmtrain.eval.harness.eot_token_id": "asked by lm_eval",
    "lmtrain.eval.harness.tokenizer_name": "asked by lm_eval",
    "lmtrain.eval.harness.loglikelihood_rolling": "called by lm_eval",
    "lmtrain.eval.harness.generate_until": "called by lm_eval",
    "lmtrain.cli.screen.print_facts_and_tables.render": "called by rich",
    "lmtrain.cli.ranks.process_options.prepare_pretrain": "called by the forking server",
    "lmtrain.observe.hang_watch.watchdog_companion_process.main_of_fork": "called by the forking server",
    "lmtrain.observe.sinks.weights_and_biases.main_of_child": "called by the child process, by its name",
    "lmtrain.parallel.weights.fsdp_sharding.allocate": "called by FSDP",
}
QUIET = {"property", "cached_property", "cache", "abstractmethod", "classmethod", "staticmethod", "contextmanager"}


class Definition(NamedTuple):
    name: str  # as in ALLOWED
    word: str
    is_method: bool
    node: ast.AST
    shown: str


class Use(NamedTuple):
    module: str
    line: int
    is_attribute: bool


def definitions(house: Any) -> Iterator[Definition]:
    for module in house.modules.values():
        classes = [node for node in module.tree.body if isinstance(node, ast.ClassDef)]
        inside = [(node, True) for cls in classes for node in cls.body]
        for node, is_method in [*((node, False) for node in module.tree.body), *inside]:
            if is_method and module.name.startswith("lmtrain.api."):
                continue  # because: users call these
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not (node.name.startswith("_") or found(node)):
                where = f"{module.shown}:{node.lineno}"
                yield Definition(f"{module.name}.{node.name}", node.name, is_method, node, where)


def found(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Registered by a decorator, as commands are, or a kind, which is found by its room."""
    words = {ast.unparse(d).split("(")[0].rpartition(".")[2] for d in node.decorator_list}
    if words - QUIET - {"dataclass", "no_grad", "runtime_checkable", "setter", "total_ordering"}:
        return True
    lines = node.body if isinstance(node, ast.ClassDef) else ()
    stated: list[ast.expr] = [target for line in lines if isinstance(line, ast.Assign) for target in line.targets]
    stated += [line.target for line in lines if isinstance(line, ast.AnnAssign) and line.value is not None]
    return any(ast.unparse(target) in ("kind", "model_type") for target in stated)


def uses(house: Any) -> dict[str, list[Use]]:
    result: dict[str, list[Use]] = defaultdict(list)
    for module in house.modules.values():
        for node in module.nodes:
            match node:
                case ast.Attribute(attr=word):
                    result[word].append(Use(module.name, node.lineno, True))
                case ast.Name(id=word):
                    result[word].append(Use(module.name, node.lineno, False))
                case ast.Constant(value=str(word)) if word.isidentifier():  # getattr, tables of names
                    result[word].append(Use(module.name, node.lineno, True))
    return result


def unused_problems(house: Any) -> list[str]:
    """A name that occurs elsewhere counts as used, whoever means it: common words can hide here, rare ones cannot."""
    seen, problems = uses(house), []
    for one in definitions(house):
        own = range(one.node.lineno, (one.node.end_lineno or 0) + 1)  # type: ignore[attr-defined]
        home = one.name.rpartition(".")[0]
        others = [u for u in seen[one.word] if u.is_attribute or not one.is_method]
        if one.name not in ALLOWED and not any(u.module != home or u.line not in own for u in others):
            problems.append(f"{one.shown} defines {one.word}, which nothing but a test uses. Use it, or take it out.")
    return problems


def test_nothing_is_kept_for_tests_alone(house: Any) -> None:
    problems = unused_problems(house)
    assert not problems, "\n" + "\n".join(problems)


def test_what_is_allowed_is_there(house: Any) -> None:
    stale = set(ALLOWED) - {one.name for one in definitions(house)}
    assert not stale, f"take out of ALLOWED: {', '.join(sorted(stale))}"


def test_a_planted_leftover_is_named(planted: Any) -> None:
    tree = planted(
        {
            "lmtrain/units.py": "def left():\n    return left()\n\n\ndef used():\n    return 1\n\n\nx = used()\n",
            "lmtrain/layout.py": "class A:\n    def asked(self):\n        return 2\n\n\ny = A()\nasked = 3\n",
        }
    )
    problems = unused_problems(tree)
    assert sorted(problem.split(" defines ")[1].split(",")[0] for problem in problems) == ["asked", "left"]
