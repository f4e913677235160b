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
        name="reason_of_an_earlier_loss_told_again",
        file="lmtrain/cli/ranks/launch_ranks.py",
        function="launch_training",
        old="        stamp_before = stop_stamp(folder)\n        path = find_resume_checkpoint(config)\n",
        new="        path = find_resume_checkpoint(config)\n",
        breaks="stop.json and the exit keep the rank and the cause of the loss before, and what has ended the run is "
        "written nowhere.",
        only_for="--max-restarts, where a start after the first is lost before it has its folder",
    ),
    Mutant(
        name="begins_anew_as_its_run_did",
        file="lmtrain/cli/pretrain/settings_from_run.py",
        function="SourceRun.base_settings",
        old='elif is_branch or checkpoint.get("resume") == "none":',
        new="elif is_branch:",
        breaks="Going on with a run is refused because it would start over.",
        only_for="--from-run, with its own folder, of a run that was begun with checkpoint.resume=none",
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
        name="journal_forgets_the_precision",
        file="lmtrain/cli/eval/run_tasks.py",
        function="Session.evaluate_tasks",
        old='computed = (subject.dtype, subject.layout, facts["device"], torch.__version__, __version__)',
        new='computed = (subject.layout, facts["device"], torch.__version__, __version__)',
        breaks="Scores that were computed in other numbers are taken over from the call that was killed, and the "
        "result mixes two precisions.",
        only_for="`lmtrain eval --output` that was killed and is started again with another --precision",
    ),
    Mutant(
        name="results_paired_in_their_order",
        file="lmtrain/cli/eval/run_tasks.py",
        function="_pair_results",
        old="other = next((o for o in same_task if o.result.text_sha256 == text), next(iter(same_task), None))",
        new="other = next(iter(same_task), None)",
        breaks="Results of different texts are set beside each other, and the comparison is refused though both files "
        "hold the same texts.",
        only_for="one task of several texts that the two files have in different orders",
    ),
    Mutant(
        name="documents_run_together_in_the_hash",
        file="lmtrain/cli/eval/evaluate_command.py",
        function="read_texts",
        old='digest.update(document.encode() + b"\\0")',
        new="digest.update(document.encode())",
        breaks="Texts that are cut into other documents have one hash, are compared as the same, and the hash is not "
        "the one that its description says.",
        only_for="tasks that read several files or standard input",
    ),
    Mutant(
        name="larger_nodes_with_the_same_network",
        file="lmtrain/cli/plan/layout_search.py",
        function="with_gpus_per_node",
        old="nic = hardware.nic_GBps * gpus / hardware.gpus_per_node",
        new="nic = hardware.nic_GBps",
        breaks="Each GPU has another share of the network than the help says, and times over several nodes are wrong.",
        only_for="`lmtrain plan --gpus-per-node` with another number than the machine's own",
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
        name="epochs_of_a_blend_added_up",
        file="lmtrain/cli/data/data_command.py",
        function="blend",
        old="""total |= {"dataset": f"{len(rows)} datasets", "epochs": total["run_samples"] / total["samples"]}""",
        new="""total |= {"dataset": f"{len(rows)} datasets"}""",
        breaks="The last line tells the sum of the datasets' epochs, and not how often the whole is read.",
        only_for="blends of two or more datasets",
    ),
    Mutant(
        name="samples_cut_as_a_new_run_would",
        file="lmtrain/cli/data/data_command.py",
        function="_show_samples",
        old="split_rule_of(open_resume_checkpoint(config, newest))",
        new="split_rule_of(open_resume_checkpoint(config, None))",
        breaks="`lmtrain data show --run` shows other samples under a number than those that the run has read.",
        only_for="runs begun by an older version, in which the third share of data.split is kept from training",
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
        name="prompt_loses_its_last_spaces",
        file="lmtrain/cli/generate_command.py",
        function="generate",
        old='sys.stdin.read().removesuffix("\\n")',
        new="sys.stdin.read().rstrip()",
        breaks="The model goes on from other tokens than those that were piped in, and the same prompt by --prompt "
        "gives another text.",
        only_for="prompts from a pipe that end with spaces, tabs or an empty line",
    ),
    Mutant(
        name="memory_of_an_earlier_start",
        file="lmtrain/cli/report/rank_sections.py",
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
        file="lmtrain/cli/trace/print_trace.py",
        function="_coordinate_facts",
        old="coordinate.dp_replicate * segment.layout.dp_shard + coordinate.dp_shard",
        new="coordinate.dp_shard * segment.layout.dp_replicate + coordinate.dp_replicate",
        breaks="`lmtrain trace` gives ranks the dp coordinate of another copy.",
        only_for="layouts with dp_replicate and dp_shard both above 1",
    ),
    Mutant(
        name="a_branch_keeps_the_text_of_its_source",
        file="lmtrain/cli/pretrain/settings_from_run.py",
        function="SourceRun._data_settings",
        old="if not is_branch:",
        new="if True:",
        breaks="A branch of a run that was made of a text is refused, or makes the same dataset once more for itself.",
        only_for="--from-run with another run.dir, of a run that was started with data.text",
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
        name="model_of_init_from_replaces_that_of_an_own_root",
        file="lmtrain/cli/pretrain/model_of_init_from.py",
        function="defaults_of_init_from",
        old="if own_root or {",
        new="if {",
        breaks="The model that a user's own pretrain.yaml chooses gives way to that of the weights, where the two "
        "should be compared.",
        only_for="checkpoint.init_from with a --config-dir that has a root config of the usual name",
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
]
