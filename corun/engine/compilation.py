"""Seam: CUDA graphs and the compiler, settled as a plan needs them.

``isolate`` and ``pack``: decode has the one full graph of ``max_num_seqs`` rows. Under ``isolate``
prefills of up to 2048 tokens have piecewise graphs too: one prompt alone is short work, and without
them it waits for the host (55 ms where the GPU needs 17, Qwen3-30B-A3B on an H200). Which graph
depends on the prefill's own length only. ``cudagraph_mode=FULL_DECODE_ONLY`` leaves them out, as in
the paper.

``certified``: vLLM's own graphs, at sizes of the certified class. What Inductor picks for the range
of ``max_num_batched_tokens`` differs between engines, so it always compiles for the same range,
while the scheduler's budget is what was asked for.

All policies: what Inductor would pick by timing is pinned, as it may differ from start to start.
"""

from dataclasses import replace
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from corun.engine.refusals import refuse
from corun.engine.split_switch import mixed_in_graph
from corun.plan import Plan

SEAMS: tuple[tuple, ...] = (
    ("vllm.config", "CUDAGraphMode.FULL_DECODE_ONLY"),
    ("vllm.config", "CUDAGraphMode.FULL_AND_PIECEWISE"),
    ("vllm.config", "CompilationMode.VLLM_COMPILE"),
    ("vllm.config", "CompilationConfig.cudagraph_capture_sizes"),
    ("vllm.config", "CompilationConfig.inductor_compile_config"),
    ("vllm.config", "KernelConfig.enable_flashinfer_autotune"),
)

# Sizes that are captured where vLLM's own default list is not certified throughout.
CAPTURE_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
# isolate: rows of a prefill with graphs, 128 apart: padding costs little even where the GPU is the
# limit.
PREFILL_SIZES = range(128, 2049, 128)
PINNED_INDUCTOR = {"deterministic": True, "benchmark_combo_kernel": False}


def _without_graphs(args: EngineArgs) -> bool:
    from vllm.config import CUDAGraphMode

    mode = args.compilation_config.cudagraph_mode
    return args.enforce_eager or current_platform.is_cpu() or mode == CUDAGraphMode.NONE


def tokens_compiled_for(args: EngineArgs, tokens: int, usual: int) -> int:
    """``max_num_batched_tokens`` for the compiler: at least `usual`, unless nothing is compiled."""
    if args.enforce_eager or current_platform.is_cpu():
        return tokens
    return max(tokens, usual)


def settle_graphs(args: EngineArgs, plan: Plan) -> Plan:
    """Put the plan's graphs into `args`; returns the plan with what replays graphs."""
    if _without_graphs(args):
        return plan
    plan = replace(plan, decode_graph=True)
    if plan.certified:
        _settle_certified(args, plan)
        return plan
    if plan.policy == "isolate" and _pieces_wanted(args):
        longer = (s for s in PREFILL_SIZES if plan.decode_rows < s <= plan.max_prefill_tokens)
        plan = replace(plan, prefill_rows=(plan.decode_rows, *longer))
    _settle_held(args, plan)
    return plan


def _pieces_wanted(args: EngineArgs) -> bool:
    """Whether prefills can have piecewise graphs: nothing else was asked for, and vLLM compiles."""
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = args.compilation_config
    return (
        compilation.cudagraph_mode in (None, CUDAGraphMode.FULL_AND_PIECEWISE)
        and compilation.mode in (None, CompilationMode.VLLM_COMPILE)
        and args.optimization_level > 0
        and args.kv_transfer_config is None
    )


def _graphs_of(plan: Plan) -> tuple[str, list[int]]:
    """vLLM's graph mode, and the sizes to capture, for isolate and pack."""
    mode = "FULL_AND_PIECEWISE" if plan.prefill_rows else "FULL_DECODE_ONLY"
    return mode, sorted({plan.decode_rows, *plan.prefill_rows})


def _settle_held(args: EngineArgs, plan: Plan) -> None:
    from vllm.config import CUDAGraphMode

    compilation, rows = args.compilation_config, plan.decode_rows
    mode, sizes = _graphs_of(plan)
    asked = compilation.cudagraph_mode
    if asked not in (None, CUDAGraphMode[mode]):
        why = "decode must replay its one graph alone"
        refuse("compilation_config.cudagraph_mode", asked.name, why)
    for holder, name in (
        (args, "cudagraph_capture_sizes"),
        (compilation, "cudagraph_capture_sizes"),
        (args, "max_cudagraph_capture_size"),
        (compilation, "max_cudagraph_capture_size"),
    ):
        value = getattr(holder, name)
        if value not in (None, rows, [rows], sizes[-1], sizes):
            refuse(name, value, f"the one captured size of decode is max_num_seqs ({rows})")
    compilation.cudagraph_mode = CUDAGraphMode[mode]
    args.cudagraph_capture_sizes = None
    args.max_cudagraph_capture_size = None
    compilation.max_cudagraph_capture_size = None
    compilation.cudagraph_capture_sizes = sizes


def _settle_certified(args: EngineArgs, plan: Plan) -> None:
    compilation = args.compilation_config
    for holder in (args, compilation):
        sizes = holder.cudagraph_capture_sizes
        wrong = [size for size in sizes or () if size not in plan.step_rows]
        if wrong:
            refuse("cudagraph_capture_sizes", sizes, f"{wrong[0]} rows are not certified")
    asked = args.cudagraph_capture_sizes or compilation.cudagraph_capture_sizes
    if not asked and any(size not in plan.step_rows for size in CAPTURE_SIZES):
        sizes = [s for s in CAPTURE_SIZES if s in plan.step_rows]
        compilation.cudagraph_capture_sizes = sizes or [plan.rows_for(1, decode=True)]


def settle_passes(args: EngineArgs) -> None:
    """Switch off compiler passes that replace what CoRun holds; refuse them where asked for."""
    passes = args.compilation_config.pass_config
    for name in ("fuse_allreduce_rms", "enable_sp", "fuse_gemm_comms"):
        if not hasattr(passes, name):
            continue
        if getattr(passes, name):
            refuse(
                f"compilation_config.pass_config.{name}", True, "it replaces the fixed all-reduce"
            )
        setattr(passes, name, False)
    attention = args.attention_config
    if getattr(attention, "flash_attn_max_num_splits_for_cuda_graph", None) is not None:
        attention.flash_attn_max_num_splits_for_cuda_graph = 1


def settle_determinism(args: EngineArgs) -> None:
    """Pin what Inductor would otherwise choose by timing."""
    import torch._inductor.config as inductor

    given = args.compilation_config.inductor_compile_config
    for name, value in PINNED_INDUCTOR.items():
        if hasattr(inductor, name):  # vLLM's defaults are in `given` already, as if asked for
            given[name] = value


def settle_autotune(vllm_config: Any) -> None:
    """Off in the finished config: vLLM turns it on by default, and it picks kernels by timing."""
    vllm_config.kernel_config.enable_flashinfer_autotune = False


def check(compilation: Any, plan: Plan) -> None:
    """ValueError where vLLM's finished compilation config departs from the plan."""
    sizes = list(compilation.cudagraph_capture_sizes or ())
    if plan.split_beyond and mixed_in_graph(compilation.cudagraph_mode):
        raise ValueError(
            "vLLM would replay whole CUDA graphs for prefills, which split decode cannot be in; "
            "leave split_decode off, or set cudagraph_mode to FULL_AND_PIECEWISE"
        )
    if plan.certified:
        wrong = [size for size in sizes if size not in plan.step_rows]
        if wrong and compilation.cudagraph_mode.name != "NONE":
            raise ValueError(
                f"vLLM would capture graphs of {wrong} rows, which are not certified; "
                "use enforce_eager=True"
            )
    elif plan.decode_graph and (compilation.cudagraph_mode.name, sizes) != _graphs_of(plan):
        raise ValueError(
            f"vLLM changed the decode graph to {compilation.cudagraph_mode.name} at "
            f"{compilation.cudagraph_capture_sizes}; use enforce_eager=True"
        )
