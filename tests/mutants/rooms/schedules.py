"""Mistakes in lmtrain/schedules: what is said of time and memory."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="activations_are_let_go_with_the_first_half",
        file="lmtrain/schedules/schedule_simulator.py",
        function="activations_held",
        old="Kind.INPUT: 0, Kind.BACKWARD: -1, Kind.WEIGHT: -1",
        new="Kind.INPUT: -1, Kind.BACKWARD: -1, Kind.WEIGHT: 0",
        breaks="The preview of a run promises fewer held activations than its ranks have, since the second half of a "
        "backward still needs them.",
        only_for="zb_h1 and zb_v",
    ),
    Mutant(
        name="check_lets_doubled_actions_pass",
        file="lmtrain/schedules/table.py",
        function="ScheduleTable.__post_init__",
        old="if actual != expected:",
        new="if expected - actual:",
        breaks="A schedule that runs an action twice is not refused: it fails in the middle of a step, or counts a "
        "gradient twice.",
        only_for="schedules of plugins that have an action too often",
    ),
]
