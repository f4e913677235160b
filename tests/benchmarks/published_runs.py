"""Published training runs as cases of the planner: which rows are priced, in which units, and why others are not.

Reads the table of published runs. Each source's program is described by properties that its authors state; nothing
here is fitted. Called by plan_score.py and its tests.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lmtrain.plan.cost_model.hardware_figures import Hardware
from lmtrain.plan.cost_model.training_workload import (
    Attention,
    Case,
    Overlap,
    Pointwise,
    Program,
    RecomputedShares,
    Schedule,
)
from tests.unit.plan.machines import hardware_named

CONF = Path(__file__).parents[2] / "conf" / "hardware"
Row = Mapping[str, str]

MEGATRON_2020 = Program(
    attention=Attention.FUSED, pointwise=Pointwise.FUSED, tp_overlap=Overlap.NONE, reduce_overlap=False,
    whole_messages=True, reduce_bytes=2,
)  # fmt: skip
MEGATRON_2021 = replace(MEGATRON_2020, whole_messages=False)
MEGATRON_2022 = replace(MEGATRON_2021, tp_overlap=Overlap.WEIGHTS, fused_gradients=True, reduce_bytes=4)
# DeepSpeed's pipe/engine.py splits messages over tp
MEGATRON_DEEPSPEED = replace(MEGATRON_2020, whole_messages=False, reduce_whole=True, flat_copies=True)
MEGATRON_CORE = Program(
    attention=Attention.CUDNN, pointwise=Pointwise.FUSED, tp_overlap=Overlap.CHUNKED, reduce_overlap=True,
    gather_overlap=True, send_overlap=True, fused_gradients=True,
)  # fmt: skip
EAGER = Program(attention=Attention.FLASH2, pointwise=Pointwise.EAGER)
PROGRAMS: dict[str, Program] = {
    # Aleph-Alpha/scaling, the authors' framework of 2024: allreduce.py, linear/utils.py, lm_head.py, communicator.py
    "hagemann2023": replace(
        EAGER,
        tp_overlap=Overlap.NONE,
        reduce_overlap=False,
        reduce_whole=True,
        sum_bytes=2,
        whole_logits=True,
        whole_messages=True,
        keeps_gathered=True,
        fused_optimizer=False,
    ),
    # no dropout; norms of one kernel in 16 bits (benchmarking/submit_benchmarks.py); a loss of one (modeling_mpt.py)
    "llmfoundry": replace(EAGER, attention=Attention.FLASH1, pointwise=Pointwise.FUSED, fused_loss=True),
    "bloom_tuning": MEGATRON_DEEPSPEED,
    "bloom_prod": replace(MEGATRON_DEEPSPEED, reduce_bytes=4),
    "mtnlg530b": MEGATRON_DEEPSPEED,
    "glm130b": MEGATRON_DEEPSPEED,
    "megatron_bridge": MEGATRON_CORE,
    "nemo2407a_h100": MEGATRON_CORE,
    "nemo2407b_h100": MEGATRON_CORE,
    "nemo_launcher2024_h100": MEGATRON_CORE,
    "nemo_longseq_h100": MEGATRON_CORE,
    "mlperf_gpt3": MEGATRON_CORE,
    "nemotron4_340b": MEGATRON_CORE,
    "nemotron4_15b": MEGATRON_CORE,
    "mcore_ci_7b": replace(
        MEGATRON_CORE, attention=Attention.FLASH2, tp_overlap=Overlap.NONE, send_overlap=False, fused_gradients=False
    ),
    "zerobubble": replace(MEGATRON_2022, tp_overlap=Overlap.NONE),
    "internevo": replace(EAGER, attention=Attention.FLASH1, reduce_bytes=2, fused_rotary=True, fused_loss=True),
    "torchtitan": EAGER,
    # policies/mixed_precision.py: bfSixteen
    "ibm_fms_fsdp": replace(EAGER, pointwise=Pointwise.COMPILED, reduce_bytes=2),
    "bigscience_1b3_v100": MEGATRON_DEEPSPEED,
    "megatron_readme2020": replace(MEGATRON_2020, reduce_overlap=True),  # torch's DistributedDataParallel
    "megatron_readme_gpt3": MEGATRON_2021,
    "megatron2019": replace(MEGATRON_2020, attention=Attention.SCORES, pointwise=Pointwise.EAGER),
    "korthikanti2022": MEGATRON_2022,
    "megascale2024_t2": replace(MEGATRON_2022, attention=Attention.FLASH2, reduce_overlap=True),
    "nanotron_ultrascale": replace(EAGER, tp_overlap=Overlap.WEIGHTS, eager_norm=False),
}
KERNELS = {
    "torch": Attention.SCORES, "fused": Attention.FUSED, "flash_attentionv1.0.8": Attention.FLASH1,
    "flash_attention": Attention.FLASH1, "flash_attention2": Attention.FLASH2,
    "flash_attention2 + RMS kernel": Attention.FLASH2,
}  # fmt: skip
HARDWARE = (
    ("V100-SXM3", "v100_dgx2"), ("DGX-2", "v100_dgx2"), ("V100-SXM2-16GB", "v100_16gb"), ("V100", "v100_32gb"),
    ("A100-40GB-PCIe", "a100_pcie_40gb"), ("A100-40GB", "a100_40gb"), ("A100", "a100_80gb"),
    ("H100-96GB", "h100_96gb"), ("H100", "h100"), ("H200", "h200"), ("GB200", "gb200"), ("GB300", "gb300"),
    ("B200", "b200"),
)  # fmt: skip
# GB/s of a node's adapters where the source says another figure than the machine's file
NICS = (
    ("1600 Gbps node", 200.0), ("400Gbps per node", 50.0), ("800Gbps per node", 100.0), ("4x100Gb RoCE", 50.0),
    ("4x OmniPath 100Gb", 50.0), ("4x200Gb RDMA", 100.0),
    ("200Gb HDR IB per NIC", 70.0),  # how many is not published: the middle, by factors, of one and eight
)  # fmt: skip


NETWORKS = (("RoCE", "ethernet"), ("OmniPath", "omnipath"), ("EFA", "ethernet"), ("Gbps", "ethernet"))


@dataclass(frozen=True)
class Published:
    row: Row
    case: Case
    seconds: float  # of a step
    resolution: float = 0.0  # seconds: figures are printed to so much


def read_rows(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def number(row: Row, key: str) -> float:
    text = row[key].split("(")[0].strip().rstrip("?")
    return float(text) if re.fullmatch(r"[0-9.]+", text) else 0.0


def seconds_of(row: Row) -> float:
    """Seconds a step, from seconds or tokens a second: MFU and FLOP/s have conventions, these have none."""
    if row["iter_time_s"]:
        return float(row["iter_time_s"])
    rate, gpus = number(row, "tokens_per_s_per_gpu"), number(row, "gpus") or _layout_gpus(row)
    return number(row, "global_batch") * number(row, "seq_len") / (rate * gpus) if rate and gpus else 0.0


def _layout_gpus(row: Row) -> float:
    return number(row, "tp") * number(row, "pp") * number(row, "dp") * max(number(row, "cp"), 1)


def why_not(row: Row) -> str:
    """Why a row with shape and layout is not priced; empty where it is."""
    if not row["hidden"] or not layers_of(row):
        return "no shape"
    if not row["tp"] or not row["pp"]:
        return "no layout"
    if number(row, "cp") > 1:
        return "context parallelism, which lmtrain does not have"
    if "LoRA" in row["notes"]:
        return "LoRA, which is not pretraining"
    if not row["global_batch"]:
        return "no batch"
    gpus = number(row, "gpus") or _layout_gpus(row)
    dp = gpus / (number(row, "tp") * number(row, "pp"))
    if row["dp"] and number(row, "dp") != dp:
        return f"tp x pp x dp is not {gpus:g} devices"
    micro = microbatch_of(row)
    if number(row, "global_batch") / (dp * micro) % 1 > 0.01 and number(row, "global_batch") / (dp * micro) < 20:
        return "its batch is no whole number of microbatches"
    return ""


def layers_of(row: Row) -> int:
    """As published, or of a plain GPT of the published width and number of parameters."""
    width, vocab = number(row, "hidden"), number(row, "vocab") or 50304
    if row["layers"] or not width or number(row, "ffn_hidden") not in (0, 4 * width):
        return int(number(row, "layers"))
    return max(round((number(row, "params_B") * 1e9 - vocab * width) / (12 * width**2)), 0)


def microbatch_of(row: Row) -> float:
    """Where it is not published: one sequence, the usual choice of models that need a pipeline."""
    if row["source"] == "torchtitan" and number(row, "pp") > 1:
        return 1.0  # "local batch 32, microbatching inside"
    return number(row, "micro_batch") or 1.0


def machine(row: Row) -> Hardware:
    name = next(file for word, file in HARDWARE if word in row["hardware"])
    found = hardware_named(name, CONF)
    nic = next((speed for words, speed in NICS if words in row["interconnect_note"]), 0.0)
    found = replace(found, nic_GBps=nic) if nic else found
    words = row["interconnect_note"]
    network = next((name for sign, name in NETWORKS if sign in words), "infiniband")
    return replace(found, network=network)


def published(row: Row) -> Published:
    return Published(row, build_case(row), seconds_of(row), 0.5 if row["source"] == "bigscience_1b3_v100" else 0.0)


def build_case(row: Row) -> Case:
    tp, pp = int(number(row, "tp")), int(number(row, "pp"))
    gpus = int(number(row, "gpus") or _layout_gpus(row))
    dp = gpus // (tp * pp)
    layers, width = layers_of(row), int(number(row, "hidden"))
    heads = int(number(row, "heads")) or width // 128
    keys = int(number(row, "kv_heads")) or heads
    ffn = int(number(row, "ffn_hidden")) or 4 * width
    vocab = -(-int(number(row, "vocab") or 50304) // (128 * tp)) * 128 * tp
    micro = int(microbatch_of(row))
    precision = precision_of(row)
    program = build_program(row)
    zero, shard, regather = sharding(row, dp)
    first, largest, last = stages(row, layers, pp)
    gated = _gated(row, layers, width, heads, keys, ffn)
    return Case(
        hardware=machine(row), program=program, num_layers=layers, width=width, num_heads=heads, num_kv_heads=keys,
        head_width=width // heads, ffn_width=ffn, gated=gated, vocab=vocab,
        seq_len=int(number(row, "seq_len")), tied=True, pp=pp, vp=_chunks(row, layers, pp), dp=dp, tp=tp, zero=zero,
        shard=shard, regather=regather, each_microbatch=not (row["source"] == "torchtitan" and pp > 1),
        sequence_parallel=_sequence_parallel(row, tp), microbatch=micro,
        num_microbatches=max(round(number(row, "global_batch") / (dp * micro)), 1), schedule=_schedule(row),
        first_stage=first, largest_stage=largest, last_stage=last, precision=precision,
        recomputed=again_of(row, program),
        # because: of these programs, those with a gate turn queries and keys, and the others do not
        rotary=gated, parallel_block="parallel block" in row["notes"],
        window=512 if "sliding-window" in row["notes"] else 0,  # how wide is not published
    )  # fmt: skip


def precision_of(row: Row) -> str:
    word = row["precision"].lower()
    for sign, name in (
        ("rowwise", "float8_row"),
        ("nvfp4", "nvfp4"),
        ("mxfp8", "mxfp8"),
        ("float8", "float8"),
        ("fp8", "float8"),
    ):
        if sign in word:
            return name
    return "fp16" if word.startswith("fp16") else "bf16"


def build_program(row: Row) -> Program:
    program = PROGRAMS[row["source"]]
    notes = row["notes"]
    if row["source"] == "hagemann2023":
        kernel = notes.split("kernel=")[1].split(";")[0]
        return replace(program, attention=KERNELS[kernel], eager_norm="RMS kernel" not in kernel)
    if row["source"] == "llmfoundry":
        pure = "mp mode PURE" in notes
        newer = "H100" in row["hardware"]
        return replace(
            program, reduce_bytes=2 if pure else 4, attention=Attention.FLASH2 if newer else Attention.FLASH1
        )
    if row["source"] == "torchtitan":
        compiled = "compile" in notes or "float8" in row["precision"] or "TP" in notes
        chunked = "AsyncTP" in notes or "async TP" in notes
        return replace(
            program, pointwise=Pointwise.COMPILED if compiled else Pointwise.EAGER,
            tp_overlap=Overlap.CHUNKED if chunked else Overlap.NONE,
        )  # fmt: skip
    if "MegaScale" in notes.split(";")[0]:
        return replace(program, tp_overlap=Overlap.CHUNKED, gather_overlap=True, send_overlap=True)
    if row["source"] == "bloom_tuning" and row["precision"] == "bf16":
        return replace(program, reduce_bytes=4)
    return program


def again_of(row: Row, program: Program) -> RecomputedShares:
    """What recompute does again. `selective` is a different thing in each program."""
    word, full = row["recompute"], RecomputedShares(products=1.0, attention=1.0, pointwise=1.0, collectives=1.0)
    if word.startswith("full"):
        return full
    if row["source"] == "ibm_fms_fsdp" and word == "selective":
        hfu = re.search(r"HFU ([0-9.]+)", row["notes"])
        share = 3 * (float(hfu[1]) / number(row, "mfu_pct") - 1) if hfu else 0.5
        return RecomputedShares(products=share, attention=share, pointwise=share)
    if row["source"] == "torchtitan" and word == "selective(layer)":
        return RecomputedShares(products=0.5, attention=0.5, pointwise=0.5, collectives=0.5)
    if row["source"] == "torchtitan" and word.startswith("selective"):
        return RecomputedShares(products=0.5, pointwise=1.0)  # every second product is kept, and attention
    if word == "selective" and program.attention <= Attention.FUSED:
        return RecomputedShares(attention=1.0)
    return RecomputedShares()


def sharding(row: Row, dp: int) -> tuple[int, int, bool]:
    """ZeRO's level, ranks that share, and whether weights are gathered again for the backward."""
    word = row["zero_or_fsdp"]
    group = re.search(r"group=([0-9]+)", word)
    if "SHARD_GRAD_OP" in word:
        return 3, dp, False
    if "HSDP" in word:
        return 3, min(8, dp), True
    if "FSDP" in word or "ZeRO-3" in word:
        return 3, dp, True
    if "ZeRO-1" in word or "dist" in word or "ZeRO-2" in word:
        return 1, min(int(group[1]), dp) if group else dp, True
    if row["source"] == "bigscience_1b3_v100":
        return 1, dp, True  # ZERO_STAGE=1 in the authors' train/tr3-1B3-baseline/tr3m-1B3-emb-norm-pile.slurm
    return 0, 1, True


def stages(row: Row, layers: int, pp: int) -> tuple[int, int, int]:
    """Layers of the first stage, of the fullest but the last, and of the last, uneven where the source says so."""
    if row["source"] == "hagemann2023" and pp > 1:  # "balanced" in their examples/transformer_example/config.yml
        width = number(row, "hidden")
        return balanced(layers, pp, number(row, "vocab") / (4 * width + 3 * number(row, "ffn_hidden")))
    if row["source"] == "zerobubble":
        even = (layers + 2) // pp
        return even - 1, even, even - 1
    if row["source"] == "bloom_tuning" and pp > 1 and layers % pp and (layers + 2) % pp == 0:
        even = (layers + 2) // pp
        return even - 1, even, even - 1
    return -(-layers // pp), -(-layers // pp), max(layers - (pp - 1) * -(-layers // pp), layers // pp)


def balanced(layers: int, pp: int, table: float) -> tuple[int, int, int]:
    """Layers of the first stage, of those between and of the last, by weights; `table` is the embedding's, in blocks.

    Stages are filled from the left up to the least weight that all fit into; the head is as heavy as the embedding.
    """
    least, most = (layers + 2 * table) / pp, layers + 2 * table
    for _ in range(40):
        middle = (least + most) / 2
        left = layers - int(middle - table) - (pp - 2) * int(middle) + table
        least, most = (least, middle) if left <= middle else (middle, most)
    first, others = int(most - table), int(most)
    return first, others if pp > 2 else first, max(layers - first - (pp - 2) * others, 0)


def _chunks(row: Row, layers: int, pp: int) -> int:
    if row["vpp"].startswith(">1"):
        return max((layers + 2) // pp, 1) if row["source"] == "zerobubble" else 2
    core = PROGRAMS[row["source"]].send_overlap and pp > 1
    return int(number(row, "vpp")) or (-(-layers // pp) if core and not row["vpp"] else 1)


def _schedule(row: Row) -> Schedule:
    for word, schedule in (("ZB-V", Schedule.ZB_V), ("ZB-2p", Schedule.ZB_2), ("ZB-1p", Schedule.ZB_1)):
        if word in row["notes"]:
            return schedule
    return Schedule.ONE_F_ONE_B


def _gated(row: Row, layers: int, width: int, heads: int, keys: int, ffn: int) -> bool:
    """Whether two input matrices explain the published number of parameters better than one."""
    if "ffn=4h default" in row["notes"]:
        return False
    found, vocab = number(row, "params_B") * 1e9, number(row, "vocab") * width
    attention = width * width * (2 + 2 * keys / heads)
    plain, gated = (layers * (attention + n * width * ffn) for n in (2, 3))
    return min(abs(gated + n * vocab - found) for n in (1, 2)) < min(abs(plain + n * vocab - found) for n in (1, 2))


def _sequence_parallel(row: Row, tp: int) -> bool:
    word = row["seq_parallel"]
    core = PROGRAMS[row["source"]].tp_overlap is Overlap.CHUNKED or row["source"] == "megascale2024_t2"
    return tp > 1 and (word == "yes" or (not word and core))
