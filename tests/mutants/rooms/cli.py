"""Planted mistakes in lmtrain/cli: verbs, their keys and codes, and what they print."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="blames_a_node_that_was_left_out",
        file="lmtrain/cli/slurm/slurm_body.sh",
        function="",
        old="""| grep -vxF "${left_out//,/$'\\n'}" | sed -n""",
        new="| sed -n",
        breaks="Ranks are looked up among nodes that no longer take part: a healthy node is left out in place of the "
        "one that is broken, until no spare is left.",
        only_for="jobs with spare nodes, from the second node that is lost on",
    ),
    Mutant(
        name="losses_are_counted_over_the_whole_job",
        file="lmtrain/cli/slurm/slurm_body.sh",
        function="",
        old="|| num_lost=0 saved=$(newest)",
        new="|| saved=$(newest)",
        breaks="A job ends for good with 93 after its fourth lost task, though checkpoints were saved between them.",
        only_for="jobs that lose a task four times or more",
    ),
    Mutant(
        name="done_though_some_settings_changed",
        file="lmtrain/cli/pretrain/sweep.py",
        function="is_finished",
        old="wanted_values == saved_values",
        new='all(wanted_values[key] == saved_values[key] for key in ("model", "data", "optim", "train"))',
        breaks="A sweep that is started again with another schedule, precision or layout leaves its runs as they are "
        "and calls them done.",
        only_for="sweeps whose fixed settings outside of model, data, optim and train were changed after they ended",
    ),
    Mutant(
        name="third_of_one_name_shares_a_folder",
        file="lmtrain/cli/pretrain/sweep.py",
        function="_choose_folder",
        old="while folder in used_folders:",
        new="if folder in used_folders:",
        breaks="Two runs of a sweep have one folder: the later one goes on with the earlier one's checkpoints, under "
        "other settings.",
        only_for="sweeps over three or more values that differ in signs alone, such as a/b, a_b and a:b",
    ),
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
        name="step_times_with_validations_in_them",
        file="lmtrain/cli/plan/calibrate_command.py",
        function="_step_times",
        old="in pairwise(rows):",
        new='in pairwise([row for row in rows if row["event"] == "step"]):',
        breaks="Time of validations, evaluations and saves counts as time of steps, and the machine is fitted to be "
        "slower than it is.",
        only_for="calibrating by runs that validate, evaluate or save between rows of steps",
    ),
    Mutant(
        name="shards_measured_in_bytes",
        file="lmtrain/cli/data/preprocess_command.py",
        function="preprocess",
        old='parse_size("--shard-tokens", shard_tokens, parse_count)',
        new='parse_size("--shard-tokens", shard_tokens)',
        breaks="10B is read as ten bytes and starts a new shard every ten tokens, and 10M is refused.",
        only_for="--shard-tokens with a letter behind its number",
    ),
    Mutant(
        name="memory_of_an_earlier_start",
        file="lmtrain/cli/report/rank_timeline_and_memory_sections.py",
        function="newest_peaks",
        old='if not rows or (starts and rows[-1].get("attempt") != starts[-1].get("attempt")):',
        new="if not rows:",
        breaks="The report draws peaks of an earlier start into the layout of the newest, as if they were its own.",
        only_for="runs that went on with another layout of as many ranks, before it has told of its memory",
    ),
    Mutant(
        name="change_after_the_step_explains_it",
        file="lmtrain/cli/runs/diff_command.py",
        function="_differing_before",
        old='if facts["after"][key] < step',
        new='if facts["after"][key] <= step',
        breaks="A setting that was changed after the first step that differs is named as its cause, and the true one "
        "is not looked for.",
        only_for="runs whose first difference is at the very step at which one of them went on with other settings",
    ),
    Mutant(
        name="copies_numbered_the_wrong_way_round",
        file="lmtrain/cli/trace/trace_as_text_and_json.py",
        function="_coordinate_facts",
        old="coordinate.dp_replicate * segment.layout.dp_shard + coordinate.dp_shard",
        new="coordinate.dp_shard * segment.layout.dp_replicate + coordinate.dp_replicate",
        breaks="`lmtrain trace` gives ranks the dp coordinate of another copy.",
        only_for="layouts with dp_replicate and dp_shard both above 1",
    ),
    Mutant(
        name="runs_of_different_texts_share_a_folder",
        file="lmtrain/cli/pretrain/sweep.py",
        function="_place_text_datasets",
        old="folder = Path(job.config.run.dir) if len(recipes) == 1 else job.folder",
        new="folder = Path(job.config.run.dir)",
        breaks="The second run of a sweep over data.text is refused, since the folder holds the dataset of the first.",
        only_for="sweeps over what decides a dataset of a text",
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
        name="decay_is_a_share_of_the_trunk",
        file="lmtrain/cli/checkpoint/branch_command.py",
        function="_build_branches",
        old="number / (100 - number)",
        new="number / 100",
        breaks="The decay is shorter than its share of the branch's whole run.",
    ),
    Mutant(
        name="ancestors_of_a_run_that_is_gone_are_forgotten",
        file="lmtrain/cli/runs/family_tree.py",
        function="family_rows",
        old="lineage[depth - 1] if depth else None)",
        new="None)",
        breaks="A run whose folder is gone stands at the root of the tree, and not below its parent.",
        only_for="families of three generations, of which the middle is gone",
    ),
    Mutant(
        name="a_merge_stands_below_its_oldest_ancestor",
        file="lmtrain/cli/runs/family_tree.py",
        function="family_rows",
        old="lineage[depth - 1] if depth else None",
        new="lineage[0] if depth else None",
        breaks="The tree of runs shows a merged checkpoint below the oldest run of its family, not below the run of "
        "its newest parent.",
        only_for="ancestors that are not listed themselves, of a run with three ancestors or more",
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
    Mutant(
        name="a_line_without_words_is_not_checked",
        file="lmtrain/cli/find_accepted_line.py",
        function="_covering",
        old="if not (result and seen.issuperset(run)):",
        new="if not seen.issuperset(run):",
        breaks="A line that is left without a word is advised, though the verb needs one.",
        only_for="pretrain and slurm, of which all words are left out",
    ),
]
