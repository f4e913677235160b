"""Names as torch, its libraries and its compiler write them, each in the class that a person would put it in."""

from __future__ import annotations

import pytest

from lmtrain.observe.profile.kernel_times import CLASSES, kernel_class

NAMES = {
    "products": [
        "aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "AddmmBackward0", "MmBackward0",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "ampere_bf16_s16816gemm_bf16_128x64",
    ],
    "attention": [
        "aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
        "ScaledDotProductFlashAttentionBackward0", "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>", "aten::add_", "aten::mul",
        "triton_poi_fused_gelu_0", "aten::gelu_backward", "## Call CompiledFxGraph fabc", "CompiledFunctionBackward",
    ],
    "norms": [
        "aten::native_layer_norm", "NativeLayerNormBackward0", "triton_per_fused_native_layer_norm_0",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>", "aten::rms_norm",
    ],
    "collectives": [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ncclDevKernel_SendRecv", "c10d::allreduce_", "gloo:all_reduce",
        "record_param_comms", "nccl:_all_gather_base",
    ],
    "copies": ["Memcpy DtoH (Device -> Pinned)", "Memset (Device)", "aten::copy_", "aten::cat", "aten::zero_"],
    "optimizer": [
        "Optimizer.step#AdamW.step", "aten::_fused_adamw_", "aten::_foreach_mul_",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorListMetadata<4>>",
    ],
    "other": ["aten::embedding", "aten::view", "aten::broadcast_tensors", "aten::_log_softmax"],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_a_name_is_of_its_class(kind: str, name: str) -> None:
    assert kernel_class(name) == kind


def test_every_class_is_tried() -> None:
    assert tuple(NAMES) == CLASSES
