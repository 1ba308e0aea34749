"""The paper's Fig. 2: standard against batch-invariant operators, in microseconds.

Mean, RMSNorm and Softmax over rows of one width; MatMul over rows at one K and N, and over a grid
of K and N at one number of rows. On a GPU the weights of MatMul take turns in more memory than the
caches hold, as a model's do; the input is the same each time, and cached as after another operator.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from corun.bench import machine
from corun.jobs.files import write_json

if TYPE_CHECKING:  # torch and vLLM are imported by the command that measures, not by its parser
    from corun.bench.operator_bench import Bench, Measured, Point

FORMAT = "corun-bench-operators/1"
DTYPES = ("bfloat16", "float16", "float32")
ROW_OPERATORS = ("mean", "rmsnorm", "softmax")
GPU_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GPU_SIZES = (512, 1024, 2048, 4096, 8192, 16384)
CPU_ROWS, CPU_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256), (512, 1024, 2048)


def grid(
    rows: Sequence[int], columns: int, sizes: Sequence[int], matmul_rows: int
) -> "list[Point]":
    """Every point: MatMul over ``sizes`` squared and over rows, the others over rows."""
    from corun.bench.operator_bench import Point

    points = [Point("matmul", matmul_rows, n, k) for k in sizes for n in sizes]
    points += [Point(name, r, columns) for name in ROW_OPERATORS for r in rows]
    points += [Point("matmul", r, columns, columns) for r in rows]
    return list(dict.fromkeys(points))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``corun bench operators``."""
    parser.add_argument("--out", required=True, metavar="FILE", help="the JSON file to write")
    parser.add_argument(
        "--seconds",
        type=float,
        default=50.0,
        help="about how long to measure (default 50); what does not fit is listed as skipped",
    )
    parser.add_argument(
        "--repeats", type=int, default=100, help="measurements of a shape at most (default 100)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--rows", type=_sizes, help="numbers of rows, as 1,32,256")
    parser.add_argument("--sizes", type=_sizes, help="values of K and of N, as 1024,4096")
    parser.add_argument(
        "--columns", type=int, default=4096, help="columns where rows vary (default 4096)"
    )
    parser.add_argument(
        "--matmul-rows", type=int, default=32, help="rows where K and N vary (default 32)"
    )


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if min(sizes) < 1:
        raise ValueError(text)
    return sizes


def run(args: argparse.Namespace) -> int:
    """Measure and write the file; returns 0."""
    import torch

    from corun.bench.operator_bench import Bench, measure_all

    for name in ("repeats", "columns", "matmul_rows", "seconds"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be more than 0")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    sizes = args.sizes or (GPU_SIZES if on_gpu else CPU_SIZES)
    rows = args.rows or (GPU_ROWS if on_gpu else CPU_ROWS)
    points = grid(rows, args.columns, sizes, args.matmul_rows)
    started = time.perf_counter()
    largest = max(*sizes, args.columns) ** 2
    bench = Bench(device, getattr(torch, args.dtype), largest)
    left = args.seconds - (time.perf_counter() - started)
    measured, skipped = measure_all(bench, points, repeats=args.repeats, seconds=left)
    if not measured:
        raise ValueError("no shape was measured within --seconds; give it more")
    write_json(args.out, _file(args, bench, measured, skipped))
    print(_summary(measured, skipped, bench.unavailable), f"written to {args.out}", sep="\n")
    return 0


def _file(
    args: argparse.Namespace, bench: "Bench", measured: "list[Measured]", skipped: "list[Point]"
) -> dict[str, Any]:
    on_gpu = bench.device.type == "cuda"
    return {
        "format": FORMAT,
        **machine.stamp(),
        "settings": {
            "dtype": args.dtype,
            "most_repeats": args.repeats,
            "seconds": args.seconds,
            "timed_by": "CUDA graphs and events" if on_gpu else "the host's clock",
        },
        "notes": [bench.unavailable] if bench.unavailable else [],
        "operators": [m.to_mapping() for m in measured],
        "skipped": [asdict(point) for point in skipped],
    }


def _summary(measured: "list[Measured]", skipped: "list[Point]", unavailable: str | None) -> str:
    lines = [f"{len(measured)} shapes measured, {len(skipped)} skipped"]
    for name in (*ROW_OPERATORS, "matmul"):
        ratios = [
            m.batch_invariant.median_us / m.standard.median_us
            for m in measured
            if m.point.operator == name and m.batch_invariant
        ]
        if ratios:
            lines.append(
                f"{name}: batch-invariant / standard from {min(ratios):.2f} to {max(ratios):.2f} "
                f"over {len(ratios)} shapes"
            )
    if unavailable:
        lines.append(f"standard operators only: {unavailable}")
    return "\n".join(lines)
