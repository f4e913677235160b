"""Planted mistakes in lmtrain/cli: units, and advice for a sweep."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="switch_of_nodes_as_sold",
        file="lmtrain/cli/plan/plan_command.py",
        function="plan",
        old="""    if gpus_per_node is not None:
        question = with_gpus_per_node(question, gpus_per_node)
    gpus_per_switch = (nodes_per_switch or 0) * question.hardware.gpus_per_node
""",
        new="""    gpus_per_switch = (nodes_per_switch or 0) * question.hardware.gpus_per_node
    if gpus_per_node is not None:
        question = with_gpus_per_node(question, gpus_per_node)
""",
        breaks="The limit below one switch counts GPUs of the nodes as they are sold, so that layouts beyond the "
        "switch are allowed or good ones are not.",
        only_for="`lmtrain plan` with --gpus-per-node and --nodes-per-switch together",
    ),
]
