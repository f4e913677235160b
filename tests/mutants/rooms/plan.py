"""Mistakes in lmtrain/plan: units, fullest ranks, and which links and layers are priced."""

from tests.mutants.mutant import Mutant

MUTANTS = [
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
        name="optimizer_is_shared_among_copies_too",
        file="lmtrain/plan/cost_model/step_time_and_energy.py",
        function="price_step",
        old="updated_weights = num_weights / cases.state_shards",
        new="updated_weights = num_weights / np.where(cases.zero > 0, cases.dp, 1.0)",
        breaks="The optimizer's share of a step is too short by the number of copies, which favours layouts with many.",
        only_for="dp_replicate > 1 with dp_shard > 1",
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
]
