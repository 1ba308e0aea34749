import pytest

from corun.bench import kernel_types as kt
from corun.bench.kernel_types import CPU_RULES, CUDA_RULES, breakdown, classify

# As Kineto names them on Hopper GPUs (some shortened), and what they are.
CUDA = {
    "nvjet_tst_128x64_64x9_2x1_v_bz_TNT": "matmul",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x4_tn>": "matmul",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>": "matmul",
    "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, float>": "matmul",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1": "matmul",
    "matmul_kernel_persistent": "matmul",
    "bmm_kernel": "matmul",
    "triton_tem_fused_mm_0": "matmul",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<>>>": (
        "attention"
    ),
    "void flash::prepare_varlen_num_blocks_kernel<1, true>(int, int, int const*)": "attention",
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>": "attention",
    "kernel_unified_attention": "attention",
    "void flashinfer::BatchDecodeWithPagedKVCacheKernel<>": "attention",
    "fused_moe_kernel": "moe",
    "void vllm::moe::topkGating<8, 128, 4, 16, 32, int>": "moe",
    "void vllm::moe::moe_align_block_size_kernel<int>": "moe",
    "void vllm::moe::count_and_sort_expert_tokens_kernel<int>": "moe",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GroupedGemmUniversal<>> moe": "moe",
    "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>": "norm",
    "void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>": "norm",
    "_rms_norm_kernel": "norm",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "norm",
    "void flashinfer::norm::FusedAddRMSNormKernel<8>": "norm",
    "_race_blocks": "sampling",
    "_finish_rows": "sampling",
    "_score_blocks": "sampling",
    "_gumbel_sample_kernel": "sampling",
    "_topk_log_softmax_kernel": "sampling",
    "_temperature_kernel": "sampling",
    "_bias_kernel": "sampling",
    "_topk_topp_kernel": "sampling",
    "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024>": "sampling",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ArgMaxOps<float>>>": (
        "sampling"
    ),
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float>": "sampling",
    "void at::native::sbtopk::gatherTopK<float, unsigned int, 1, false>": "sampling",
    "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<>": (
        "sampling"
    ),
    "void vllm::rotary_embedding_kernel<c10::BFloat16, true>": "other",
    "void vllm::act_and_mul_kernel<c10::BFloat16, vllm::silu_kernel<>>": "other",
    "Memcpy DtoD (Device -> Device)": "other",
    "_compute_slot_mappings_kernel": "other",
    "_gather_block_tables_kernel": "other",
    "_combine_sampled_and_draft_tokens_kernel": "other",
    "_get_num_sampled_and_rejected_kernel": "other",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "other",
    # The next five stood in a decode step of Qwen3-8B on an H200.
    "triton_red_fused_3": "norm",
    "triton_poi_fused_4": "other",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>": "other",
    "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<>>": "other",
    "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange>": "other",
    "void at::native::some_kernel_that_no_rule_knows<4>": None,
}
# As PyTorch names them in vLLM 0.32's CPU engine.
CPU = {
    "aten::mm": "matmul",
    "aten::addmm": "matmul",
    "aten::linear": "matmul",
    "_C::onednn_mm": "matmul",
    "_C::weight_packed_linear": "matmul",
    "mkldnn::_linear_pointwise": "matmul",
    "vllm::unified_attention_with_output": "attention",
    "_C::cpu_attention_with_kv_cache": "attention",
    "vllm::unified_kv_cache_update": "attention",
    "_C::get_scheduler_metadata": "attention",
    "_C::rms_norm": "norm",
    "aten::rsqrt": "norm",
    "aten::pow": "norm",
    "_C::cpu_fused_moe": "moe",
    "aten::argmax": "sampling",
    "aten::_softmax": "sampling",
    "aten::exponential_": "sampling",
    "aten::sort": "sampling",
    "aten::bitwise_xor": "sampling",
    "aten::__rshift__": "sampling",
    "_C::rotary_embedding": "other",
    "_C::silu_and_mul": "other",
    "aten::copy_": "other",
    "aten::split_with_sizes": "other",
    "aten::mul": None,
    "aten::div_": None,
    "aten::sum": None,
}


@pytest.mark.parametrize(("names", "rules"), [(CUDA, CUDA_RULES), (CPU, CPU_RULES)])
def test_recorded_names(names, rules):
    assert {name: classify(name, rules) for name in names} == names


def test_every_rule_names_a_type():
    assert {kind for kind, _ in CUDA_RULES} == set(kt.TYPES) == {kind for kind, _ in CPU_RULES}


def test_a_breakdown_loses_no_time_and_lists_what_it_does_not_know():
    long = "void strange<" + "x" * 300 + ">"
    times = [("fused_moe_kernel", 3.0), ("nvjet_a", 2.0), (long, 5.0), ("odd", 7.0), ("odd", 1.0)]
    found = breakdown(times, CUDA_RULES)
    assert found.by_type == {
        "matmul": 2.0,
        "attention": 0.0,
        "norm": 0.0,
        "moe": 3.0,
        "sampling": 0.0,
        "other": 13.0,
    }
    assert list(found.unclassified.items()) == [("odd", 8.0), (long[: kt.LONGEST_NAME], 5.0)]
    assert sum(found.by_type.values()) == sum(us for _, us in times)
