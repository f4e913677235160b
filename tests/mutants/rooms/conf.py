"""Planted mistakes in conf/ and in the defaults of settings: wrong numbers, wrong units, copied lines."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="link_counted_both_ways",
        file="conf/hardware/h200.yaml",
        function="",
        old="link_GBps: 450 ",
        new="link_GBps: 900 ",
        breaks="The planner takes the sum of both ways for one, as vendors print it, and finds tensor parallelism and "
        "sharding twice as cheap as they are.",
        only_for="plans and dry runs with hardware=h200",
    ),
    Mutant(
        name="adapter_in_bits",
        file="conf/hardware/a100_pcie_80gb.yaml",
        function="",
        old="nic_GBps: 25 ",
        new="nic_GBps: 200 ",
        breaks="The network of a node is eight times as fast as it is, since Gb/s stand where GB/s belong.",
        only_for="plans over two or more nodes with hardware=a100_pcie_80gb",
    ),
    Mutant(
        name="scale_grows_half_as_often",
        file="conf/precision/fp16.yaml",
        function="",
        old="growth_interval_steps: 1000",
        new="growth_interval_steps: 2000",
        breaks="The loss scale doubles after 2,000 steps without overflow, not after 1,000 as documented, so that "
        "small gradients are lost for longer after each overflow.",
        only_for="precision=fp16, from step 1,000 on",
    ),
    Mutant(
        name="lamb_with_the_eps_of_adamw",
        file="conf/optim/lamb.yaml",
        function="",
        old="eps: 1.0e-6 ",
        new="eps: 1.0e-8 ",
        breaks="Weights with tiny gradients take steps up to a hundred times as long as LAMB's, and runs are not those "
        "of the documented defaults.",
        only_for="optim=lamb",
    ),
    Mutant(
        name="twice_the_heads_of_keys",
        file="conf/model/llama_1b.yaml",
        function="",
        old="num_kv_heads: 4 ",
        new="num_kv_heads: 8 ",
        breaks="The model is not of TinyLlama's shape: it has more parameters, and none of that family's weights fit.",
        only_for="model=llama_1b",
    ),
    Mutant(
        name="large_bert_with_norms_behind",
        file="conf/model/bert_3_9b.yaml",
        function="",
        old="norm_order: pre  ",
        new="norm_order: post ",
        breaks="The largest BERT has its norms behind attention and MLP, with which it does not train, though its "
        "number of parameters is right.",
        only_for="model=bert_3_9b",
    ),
    Mutant(
        name="large_qwen_with_the_tied_head_of_small_ones",
        file="conf/model/qwen3_14b.yaml",
        function="",
        old="tied: false ",
        new="tied: true  ",
        breaks="The model lacks Qwen3's own head, 778 million parameters, and no released weights fit.",
        only_for="model=qwen3_14b",
    ),
    Mutant(
        name="embedding_scale_that_bf16_does_not_have",
        file="conf/model/gemma3_4b.yaml",
        function="",
        old="embedding_scale: 50.5 ",
        new="embedding_scale: 50.596",
        breaks="The embeddings are scaled by the root of the width, and not by its value in bf16, with which Gemma's "
        "released weights were trained.",
        only_for="model=gemma3_4b",
    ),
    Mutant(
        name="olmo_with_norms_before_its_branches",
        file="conf/model/olmo2_1b.yaml",
        function="",
        old="norm_order: branch ",
        new="norm_order: pre    ",
        breaks="All OLMo 2 presets have their norms before attention and MLP: the same number of parameters, and "
        "another model, into which no released weights fit.",
        only_for="model=olmo2_1b and the larger ones",
    ),
    Mutant(
        name="line_ends_where_the_cosine_does",
        file="conf/schedule/linear.yaml",
        function="",
        old="min_ratio: 0.0 ",
        new="min_ratio: 0.1 ",
        breaks="The learning rate ends at a tenth of its peak, and not at 0 as documented.",
        only_for="schedule=linear",
    ),
]
