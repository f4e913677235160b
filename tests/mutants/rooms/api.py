"""Mistakes in lmtrain/api, and in lmtrain/__init__.py, which imports it."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="the_garbage_collector_stays_off",
        file="lmtrain/__init__.py",
        function="",
        old="            if was_enabled:\n",
        new="            if not was_enabled:\n",
        breaks="After the first use of a name Python collects no cycles any more, and a notebook's memory grows.",
    ),
    Mutant(
        name="an_evaluation_ignores_the_stride",
        file="lmtrain/api/evaluate.py",
        function="evaluate",
        old="stride=stride",
        new="stride=None",
        breaks="An evaluation from Python has other windows than the command with the same options.",
        only_for="calls with a stride",
    ),
]
