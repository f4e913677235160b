"""Mistakes in lmtrain/plan: units, fullest ranks, and which links and layers are priced."""

from tests.mutants.mutant import Mutant

MUTANTS = [
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
]
