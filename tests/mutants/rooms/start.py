"""Planted mistakes in lmtrain/start: settings, stages, evaluations, plans and ranks before their work begins."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="branch_warms_up_again",
        file="lmtrain/start/training_stages_of_branch.py",
        function="BranchPoint.rewrite",
        old='{"warmup_steps": 0}',
        new="{}",
        breaks="The learning rate of a branch begins at almost 0 and rises for as long as at the start of the run.",
        only_for="branches on other data with a typed schedule",
    ),
    Mutant(
        name="megatrons_window_lacks_the_token_itself",
        file="lmtrain/start/other_tools/translate_foreign_flags.py",
        function="_take_numbers",
        old='f"model.window={number + 1}"',
        new='f"model.window={number}"',
        breaks="A line of Megatron-LM's is answered with a window that is one token shorter.",
        only_for="--window-size",
    ),
    Mutant(
        name="done_though_some_settings_changed",
        file="lmtrain/start/sweep_runs.py",
        function="is_finished",
        old="wanted_values == saved_values",
        new='all(wanted_values[key] == saved_values[key] for key in ("model", "data", "optim", "train"))',
        breaks="A sweep that is started again with another schedule, precision or layout leaves its runs as they are "
        "and calls them done.",
        only_for="sweeps whose fixed settings outside of model, data, optim and train were changed after they ended",
    ),
    Mutant(
        name="third_of_one_name_shares_a_folder",
        file="lmtrain/start/sweep_runs.py",
        function="_choose_folder",
        old="while folder in used_folders:",
        new="if folder in used_folders:",
        breaks="Two runs of a sweep have one folder: the later one goes on with the earlier one's checkpoints, under "
        "other settings.",
        only_for="sweeps over three or more values that differ in signs alone, such as a/b, a_b and a:b",
    ),
    Mutant(
        name="blames_a_node_that_was_left_out",
        file="lmtrain/start/slurm_job/slurm_body.sh",
        function="",
        old="""| grep -vxF "${left_out//,/$'\\n'}" | sed -n""",
        new="| sed -n",
        breaks="Ranks are looked up among nodes that no longer take part: a healthy node is left out in place of the "
        "one that is broken, until no spare is left.",
        only_for="jobs with spare nodes, from the second node that is lost on",
    ),
    Mutant(
        name="losses_are_counted_over_the_whole_job",
        file="lmtrain/start/slurm_job/slurm_body.sh",
        function="",
        old="|| num_lost=0 saved=$(newest)",
        new="|| saved=$(newest)",
        breaks="A job ends for good with 93 after its fourth lost task, though checkpoints were saved between them.",
        only_for="jobs that lose a task four times or more",
    ),
]
