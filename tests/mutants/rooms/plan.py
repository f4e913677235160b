"""Mistakes in lmtrain/plan: fullest ranks, borders of a search, groups, and what a fit is judged by."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="mfu_of_the_settings_precision",
        file="lmtrain/plan/search/predict_layout_cost.py",
        function="LayoutResult.mfu",
        old="self.hardware.peak(self.run.product_precision)",
        new="self.hardware.peak(self.run.precision.kind)",
        breaks="The share of the peak is taken of plain fp32's, so it comes out some eight times too high.",
        only_for="fp32 with compute.tf32=true",
    ),
    Mutant(
        name="a_run_judges_the_fit_that_it_was_in",
        file="lmtrain/plan/calibrate_to_measured_steps.py",
        function="calibrate",
        old="*runs[index + 1 :]]",
        new="*runs[index:]]",
        breaks="Errors after calibration are those of runs that were fitted to, so they and the interval that is "
        "written for the machine are too small.",
    ),
    Mutant(
        name="room_in_decimal_gigabytes",
        file="lmtrain/plan/cost_model/hardware_figures.py",
        function="Hardware.memory_bytes",
        old="self.memory_GiB * 2**30",
        new="self.memory_GiB * 1e9",
        breaks="The memory of a device counts as 7% less than it is, so layouts that fit are said not to.",
        only_for="layouts that fill the last 7% of what may be used",
    ),
    Mutant(
        name="copies_stand_side_by_side",
        file="lmtrain/plan/cost_model/step_time_and_energy.py",
        function="replica_group",
        old="np.maximum(cases.dp / cases.shard, 1.0), cases.tp * cases.shard)",
        new="np.maximum(cases.dp / cases.shard, 1.0), cases.tp)",
        breaks="Sums over copies are priced as if the copies of a shard were neighbours in a node, and not a whole "
        "group of shards apart.",
        only_for="zero=3 with dp_replicate > 1 on more than one node",
    ),
    Mutant(
        name="optimizer_is_shared_among_copies_too",
        file="lmtrain/plan/cost_model/step_time_and_energy.py",
        function="price_step",
        old="updated_weights = num_weights / cases.state_shards",
        new="updated_weights = num_weights / np.where(cases.zero > 0, cases.dp, 1.0)",
        breaks="The optimizer's share of a step is too short by the number of copies, which favours layouts with many.",
        only_for="dp_replicate > 1 with dp_shard > 1",
    ),
    Mutant(
        name="pipelines_of_a_trace_are_mixed",
        file="lmtrain/plan/compare_trace_to_schedule.py",
        function="compare_with_replay",
        old="costs = _median_action_seconds(work, layout.dp * layout.tp)",
        new="costs = _median_action_seconds(work, layout.dp)",
        breaks="Costs of several pipelines are thrown together, so the replay of the slowest one, for which all wait, "
        "becomes that of a mean one.",
        only_for="traces of pipelines with tensor parallelism whose ranks are not equally fast",
    ),
    Mutant(
        name="fullest_rank_of_the_first_ranks",
        file="lmtrain/plan/run_estimates/rank_memory_by_purpose.py",
        function="fullest_rank",
        old="firsts = range(0, layout.world_size, layout.world_size // layout.pp)",
        new="firsts = range(layout.pp)",
        breaks="Ranks of the first stage alone are asked, so a layout whose last stage with the head runs out of "
        "memory is said to fit.",
        only_for="pipelines with dp or tp besides, whose first stage is not the fullest",
    ),
    Mutant(
        name="logits_are_gone_after_the_first_half",
        file="lmtrain/plan/run_estimates/rank_memory_by_purpose.py",
        function="_peak_activation_bytes",
        old="float(np.max((in_flight.awaiting_backward + in_flight.awaiting_weight_half) @ logits)),",
        new="float(np.max(in_flight.awaiting_backward @ logits)),",
        breaks="Gradients of logits that wait for the second half of a backward are not counted, so the rank with the "
        "head needs more than the plan says.",
        only_for="zb_h1 and zb_v, on the rank with the head, where several first halves are ahead of their second ones",
    ),
    Mutant(
        name="a_layer_a_stage_is_never_tried",
        file="lmtrain/plan/search/legal_layouts.py",
        function="_LayoutEnumerator._pipeline_settings",
        old="range(1, num_layers // pp + 1)",
        new="range(1, num_layers // pp)",
        breaks="A search leaves out pipelines with as many stages as their layers allow, one layer in each among them.",
        only_for="pipelines where one more chunk a rank would make more stages than layers",
    ),
    Mutant(
        name="recompute_is_offered_to_split_backwards",
        file="lmtrain/plan/search/legal_layouts.py",
        function="_LayoutEnumerator._recompute_settings",
        old="if not any((*recompute.problems_in_layout(parallel), *recompute.problems_in_model(num_layers))):",
        new="if not any(recompute.problems_in_model(num_layers)):",
        breaks="The search counts and may recommend zero-bubble schedules with recompute, which the settings of a run "
        "refuse.",
        only_for="searches that reach zb_h1 or zb_v, where memory is scarce enough for recompute to win",
    ),
    Mutant(
        name="one_adapter_for_the_whole_node",
        file="conf/hardware/a100_80gb.yaml",
        function="",
        old="nic_GBps: 200 ",
        new="nic_GBps: 25 ",
        breaks="The network of a DGX A100 counts as one of its eight adapters, so what crosses nodes is priced eight "
        "times too slow.",
        only_for="hardware=a100_80gb on more than one node",
    ),
    Mutant(
        name="every_layer_of_a_pattern_is_priced_as_one_with_a_window",
        file="lmtrain/plan/cost_model/step_time_and_energy.py",
        function="_attention_seconds",
        old="window_share = np.where(cases.window > 0, cases.window_share, 0.0)",
        new="window_share = np.where(cases.window > 0, 1.0, 0.0)",
        breaks="Layers that read all tokens are priced as if they read a window, and long sequences look cheap.",
        only_for="layer_pattern with both kinds of layers",
    ),
    Mutant(
        name="norms_from_zero_are_priced_as_one_kernel",
        file="lmtrain/plan/run_estimates/workload_from_settings.py",
        function="_extra_norms",
        old='(2 if getattr(model, "norm_weight", "ones") == "from_zero" else 1)',
        new="1",
        breaks="The planner leaves out the second kernel of a norm times 1 + weight, and the tensor that it keeps.",
        only_for="norm_weight=from_zero",
    ),
    Mutant(
        name="an_average_updated_rarely_costs_as_if_always",
        file="lmtrain/plan/run_estimates/workload_from_settings.py",
        function="build_case",
        old="3 * FP32_BYTES / run.average_every_steps",
        new="3 * FP32_BYTES",
        breaks="The planner predicts too long a step, by a few percent.",
        only_for="runs with checkpoint.ema.every_steps above 1",
    ),
]
