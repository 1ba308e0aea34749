"""Seam: CUDA graphs and the compiler, settled as a plan needs them.

``isolate`` and ``pack``: FULL_DECODE_ONLY graphs with the one capture size ``max_num_seqs``.
``certified``: vLLM's own graphs, at sizes of the certified class. There the compiler's choices are
pinned too: what Inductor picks by timing may differ from start to start, and what it picks for the
range of ``max_num_batched_tokens`` differs between engines, so it always compiles for the same
range, while the scheduler's budget is what was asked for.
"""

from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from corun.engine.refusals import refuse
from corun.plan import Plan

SEAMS: tuple[tuple, ...] = (
    ("vllm.config", "CUDAGraphMode.FULL_DECODE_ONLY"),
    ("vllm.config", "CompilationConfig.cudagraph_capture_sizes"),
    ("vllm.config", "CompilationConfig.inductor_compile_config"),
)

# Sizes that are captured where vLLM's own default list is not certified throughout.
CAPTURE_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
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


def settle_graphs(args: EngineArgs, plan: Plan) -> bool:
    """Put the plan's graphs into `args`; returns whether decode replays graphs."""
    if _without_graphs(args):
        return False
    if plan.certified:
        _settle_certified(args, plan)
    else:
        _settle_one_size(args, plan.decode_rows)
    return True


def _settle_one_size(args: EngineArgs, rows: int) -> None:
    from vllm.config import CUDAGraphMode

    compilation = args.compilation_config
    mode = compilation.cudagraph_mode
    if mode not in (None, CUDAGraphMode.FULL_DECODE_ONLY):
        refuse(
            "compilation_config.cudagraph_mode", mode.name, "decode must replay its one graph alone"
        )
    for holder, name in (
        (args, "cudagraph_capture_sizes"),
        (compilation, "cudagraph_capture_sizes"),
        (args, "max_cudagraph_capture_size"),
        (compilation, "max_cudagraph_capture_size"),
    ):
        value = getattr(holder, name)
        if value not in (None, rows, [rows]):
            refuse(name, value, f"the one captured size is max_num_seqs ({rows})")
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    args.cudagraph_capture_sizes = None
    args.max_cudagraph_capture_size = None
    compilation.max_cudagraph_capture_size = None
    compilation.cudagraph_capture_sizes = [rows]


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


def check(compilation: Any, plan: Plan) -> None:
    """ValueError where vLLM's finished compilation config departs from the plan."""
    sizes = list(compilation.cudagraph_capture_sizes or ())
    if plan.certified:
        wrong = [size for size in sizes if size not in plan.step_rows]
        if wrong and compilation.cudagraph_mode.name != "NONE":
            raise ValueError(
                f"vLLM would capture graphs of {wrong} rows, which are not certified; "
                "use enforce_eager=True"
            )
    elif plan.decode_graph and (
        compilation.cudagraph_mode.name != "FULL_DECODE_ONLY" or sizes != [plan.decode_rows]
    ):
        raise ValueError(
            f"vLLM changed the decode graph to {compilation.cudagraph_mode.name} at "
            f"{compilation.cudagraph_capture_sizes}; use enforce_eager=True"
        )
