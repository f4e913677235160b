"""Planted mistakes in lmtrain/cli: verbs, their keys and codes, and what they print."""

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
        name="reshard_forgets_the_type_in_the_command_to_type",
        file="lmtrain/cli/checkpoint/reshard_command.py",
        function="refuse_other_programs",
        old='commands[-1] += ["--dtype", dtype] if dtype else []',
        new="commands[-1] += []",
        breaks="The command that the message says to type writes fp32, where bf16 was asked for.",
        only_for="lmtrain reshard --to hf --dtype bf16, as it was typed before there was export",
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
    Mutant(
        name="only_the_first_runs_of_a_sweep_are_looked_at",
        file="lmtrain/cli/find_accepted_line.py",
        function="_covering",
        old="if not (result and seen.issuperset(run)):",
        new="if not seen:",
        breaks="The line advised for a sweep is refused for its second value.",
        only_for="pretrain -m with two values or more that are refused",
    ),
    Mutant(
        name="a_value_changed_for_another_stays_changed",
        file="lmtrain/cli/find_accepted_line.py",
        function="_with_own_values",
        old="command = candidate if refusal_of(candidate) is None else command",
        new="command = command if refusal_of(candidate) is None else command",
        breaks="The line advised keeps a batch that was changed to fit a layout which is no longer in it.",
        only_for="lines with two wrong settings, of which the second takes the reason for the first change away",
    ),
]
