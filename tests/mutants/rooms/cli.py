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
    Mutant(
        name="gibibytes_of_a_thousand",
        file="lmtrain/cli/plan/print_layout_ranking.py",
        function="layout_row",
        old='"GiB": f"{layout.total_bytes / 2**30:.1f}"',
        new='"GiB": f"{layout.total_bytes / 1e9:.1f}"',
        breaks="The column GiB holds GB, 7% more than the memory that stands below the table and in the JSON.",
    ),
    Mutant(
        name="advice_for_one_run_takes_the_place_of_the_whole_sweep",
        file="lmtrain/config/compose_run_settings.py",
        function="whole_sweep_in_ways.among_all",
        old="if len(listed) > 1 else word",
        new="if not listed else word",
        breaks="The line advised for a wrong value of a sweep drops its other values.",
        only_for="pretrain -m with a list of values, one of which is refused and has a way out",
    ),
]
