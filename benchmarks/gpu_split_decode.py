"""CoRun's split decode attention against a float64 reference, against itself, and against FA3.

python benchmarks/gpu_split_decode.py --out FILE.json

Needs a CUDA GPU and Triton; with vLLM installed it also times FlashAttention 3 on the same inputs.
Exit status 0: every check held; 1: one did not; 2: no GPU. Speed is measured, not judged: the table
and the sweep over configurations show the ratio to FA3 with its own choice of splits.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from corun.engine.kernels.split_config import CONFIGS, SplitConfig, SplitWorkspace
from corun.engine.kernels.split_decode import split_decode

GPU = torch.device("cuda")
CHECKS: list[dict] = []
ROTATE_BYTES = 256 << 20  # more KV than the L2 holds: in a model no layer finds its KV there
RAGGED = [int(128 * 2 ** (7 * i / 31)) for i in range(32)]  # 128 to 16k tokens
CASES = {
    "1 x 8k": [8192],
    "1 x 32k": [32_768],
    "1 x 128k": [131_072],
    "8 x 8k": [8192] * 8,
    "32 ragged": RAGGED,
    "256 x 1k": [1024] * 256,
}
SWEEP_CASES = ("1 x 8k", "1 x 32k", "1 x 128k", "8 x 8k", "256 x 1k")
BASE = CONFIGS[128]
SWEEP = [
    BASE,
    *(
        SplitConfig(split, tile, max_splits, warps=warps, stages=stages, programs_per_sm=per_sm)
        for split, tile, max_splits, warps, stages, per_sm in (
            (256, 64, 64, 4, 4, 3),
            (256, 64, 64, 4, 7, 2),
            (256, 64, 64, 8, 5, 2),
            (256, 64, 64, 2, 5, 3),
            (256, 32, 64, 4, 7, 4),
            (256, 32, 64, 2, 7, 4),
            (256, 32, 64, 1, 7, 4),
            (256, 128, 64, 8, 5, 1),
            (256, 128, 64, 8, 4, 2),
            (128, 64, 64, 4, 5, 3),
            (128, 64, 128, 4, 5, 3),
            (512, 64, 64, 4, 5, 3),
            (512, 64, 256, 4, 5, 3),
            (128, 32, 128, 4, 7, 4),
        )
    ),
    dataclasses.replace(BASE, overlap=True),
    dataclasses.replace(BASE, merge_warps=8),
]
MLA_SWEEP = [
    CONFIGS[512],
    *(
        SplitConfig(split, tile, 64, heads, warps, stages, programs_per_sm=1)
        for split, tile, heads, warps, stages in (
            (256, 32, 16, 8, 5),
            (256, 64, 16, 8, 5),
            (256, 64, 32, 8, 5),
            (128, 32, 32, 8, 5),
            (128, 32, 64, 8, 3),
            (256, 64, 64, 8, 3),
        )
    ),
]


def check(name, ok, compared, **detail):
    CHECKS.append({"name": name, "ok": bool(ok), "compared": int(compared), **detail})
    print(f"{'ok  ' if ok else 'FAIL'} {name}: {int(compared):,} values compared {detail or ''}")


class Batch:
    """Requests of given lengths in a paged cache; pages lie in no order."""

    def __init__(
        self, lengths, query_heads, kv_heads, dim, *, dtype=torch.bfloat16, block=16, mla=0
    ):
        """mla: dimensions of the keys past those of the values; 0: ordinary heads."""
        pages = [-(-n // block) for n in lengths]
        self.bytes = sum(lengths) * kv_heads * (dim + mla if mla else 2 * dim) * 2
        self.copies = max(1, min(16, math.ceil(ROTATE_BYTES / self.bytes)))
        total = sum(pages) * self.copies
        shape = (total + 1, 1 if mla else 2, block, kv_heads, dim + mla)
        generator = torch.Generator(device=GPU).manual_seed(sum(lengths) + dim)
        cache = torch.empty(shape, dtype=dtype, device=GPU).normal_(generator=generator)
        self.keys = cache[:, 0]
        self.values = self.keys[..., :dim] if mla else cache[:, 1]
        order = torch.randperm(total, device=GPU, generator=generator).int() + 1
        self.tables = []
        for copy in range(self.copies):
            table = torch.zeros(len(lengths), max(*pages, 1), dtype=torch.int32, device=GPU)
            at = copy * sum(pages)
            for row, n in enumerate(pages):
                table[row, :n] = order[at : at + n]
                at += n
            self.tables.append(table)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=GPU)
        query = torch.randn(len(lengths), query_heads, dim + mla, device=GPU, generator=generator)
        # Peaked as in a trained model: scores of a few units, not of 0.1.
        self.query = (query * 2).to(dtype)
        self.dim, self.mla, self.scale = dim, mla, (dim + mla) ** -0.5
        self.longest = max(lengths)

    def workspace(self, config=None, rows=None):
        heads = self.query.shape[1]
        return SplitWorkspace.allocate(rows or len(self.query), heads, self.dim, GPU, config)

    def out(self, dtype=None):
        return self.query.new_zeros((*self.query.shape[:2], self.dim), dtype=dtype)

    def corun(self, workspace, out, table=None):
        table = self.tables[0] if table is None else table
        args = (self.query, self.keys, self.values, table, self.lengths, self.scale)
        split_decode(*args, out, workspace)
        return out

    def flash(self, num_splits, ahead, table, out):
        """vLLM's FlashAttention 3 as its decode calls it; `ahead`: a schedule made beforehand."""
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        given = {"q": self.query, "k": self.keys, "v": self.values, "out": out}
        if self.mla:
            given["q"], given["k"] = self.query_rope, self.keys[..., self.dim :]
            given["q_v"] = self.query_latent
        return flash_attn_varlen_func(
            **given, max_seqlen_q=1, cu_seqlens_q=self.starts, max_seqlen_k=self.longest,
            seqused_k=self.lengths, softmax_scale=self.scale, causal=True, block_table=table,
            scheduler_metadata=ahead, num_splits=num_splits, fa_version=3,
        )  # fmt: skip

    def flash_runs(self):
        """Name -> what to run on a block table."""
        from vllm.vllm_flash_attn import get_scheduler_metadata

        rows, heads = self.query.shape[:2]
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=GPU)
        self.query_latent = self.query[..., : self.dim].contiguous()
        self.query_rope = self.query[..., self.dim :].contiguous()
        out, runs = self.out(), {}
        for splits in (0, 1):
            ahead = get_scheduler_metadata(
                rows, 1, self.longest, heads, self.keys.shape[2], self.mla or self.dim,
                self.lengths, self.query.dtype, self.dim, cu_seqlens_q=self.starts,
                page_size=self.keys.shape[1], causal=True, num_splits=splits,
            )  # fmt: skip
            for name, plan in (("", None), (", scheduled ahead", ahead)):
                runs[f"FA3 num_splits={splits}{name}"] = lambda table, splits=splits, plan=plan: (
                    self.flash(splits, plan, table, out)
                )
        return runs

    def reference(self):
        """Attention in float64, and how far a result with rounded weights may lie from it."""
        kv_heads = self.keys.shape[2]
        out = torch.zeros(self.out().shape, dtype=torch.float64, device=GPU)
        bound = torch.zeros_like(out)
        for row, length in enumerate(self.lengths.tolist()):
            if not length:
                continue
            table = self.tables[0][row]
            table = table[: -(-length // self.keys.shape[1])].long()
            keys, values = (x[table].flatten(0, 1)[:length] for x in (self.keys, self.values))
            keys, values = keys.double(), values.double()
            query = self.query[row].double().unflatten(0, (kv_heads, -1))
            weights = (torch.einsum("ghd,tgd->ght", query, keys) * self.scale).softmax(dim=-1)
            out[row] = torch.einsum("ght,tgd->ghd", weights, values).flatten(0, 1)
            spread = torch.einsum("ght,tgd->ghd", weights, values.abs()).flatten(0, 1)
            rounding = torch.finfo(self.query.dtype).eps / 2
            bound[row] = 1.1 * rounding * spread + length * 2.0**-25 * 4 + 1e-5
        return out, bound


SHAPES = [  # query heads, KV heads, dim, dtype, block, MLA dimensions
    (32, 8, 128, torch.bfloat16, 16, 0),
    (32, 4, 128, torch.bfloat16, 16, 0),
    (16, 16, 128, torch.float16, 32, 0),
    (14, 2, 64, torch.bfloat16, 16, 0),
    (16, 1, 256, torch.bfloat16, 16, 0),
    (128, 1, 512, torch.bfloat16, 64, 64),
    (16, 1, 512, torch.float16, 16, 64),
]


def label(shape):
    heads, kv_heads, dim, dtype, block, mla = shape
    kind = "MLA" if mla else f"D={dim}"
    return f"{heads}/{kv_heads} heads, {kind}, {str(dtype).split('.')[1]}, blocks of {block}"


def make(shape, lengths):
    heads, kv_heads, dim, dtype, block, mla = shape
    return Batch(lengths, heads, kv_heads, dim, dtype=dtype, block=block, mla=mla)


def check_reference(shape):
    batch = make(shape, [1, 0, 17, 255, 256, 257, 1000, 5000, 20_000])
    found = batch.corun(batch.workspace(), batch.out(torch.float32).fill_(7)).double()
    expected, bound = batch.reference()
    expected[1] = 7  # a row of length 0 is not touched
    share = ((found - expected).abs() / bound.clamp(min=1e-9)).max()
    ok = bool(share <= 1)
    check(f"float64 reference, {label(shape)}", ok, found.numel(), share_of_bound=float(share))


def replayed(batch, lengths, workspace):
    """Output of one graph captured on other lengths and replayed on these."""
    batch.lengths = torch.ones_like(lengths)
    out = batch.out(torch.float32)
    batch.corun(workspace, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.corun(workspace, out)
    batch.lengths.copy_(lengths)
    graph.replay()
    return out


def check_invariance(shape):
    """A row alone, in other batches, elsewhere in them, padded, under other grids and graphs."""
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 16, 255, 256, 257, 16_384, 16_385, 20_000, 0]
    lengths += torch.randint(1, 6000, (39,), generator=generator).tolist()
    batch = make(shape, lengths)
    workspace = batch.workspace(rows=256)
    whole = batch.corun(workspace, batch.out(torch.float32)).view(torch.int32)
    query, all_lengths, table = batch.query, batch.lengths, batch.tables[0]
    rows = len(lengths)
    found = [(range(rows), replayed(batch, all_lengths, workspace))]

    def run(order, workspace=workspace, width=0, padded=0):
        """Rows `order` as a batch of their own, with padding rows behind them."""
        n = len(order)
        batch.query = query[order + [0] * padded]
        batch.lengths = all_lengths[order + [0] * padded]
        batch.lengths[n:] = 0
        wide = torch.zeros(n + padded, table.shape[1] + width, dtype=torch.int32, device=GPU)
        wide[:n, : table.shape[1]] = table[order]
        found.append((order, batch.corun(workspace, batch.out(torch.float32), wide)[:n]))

    for row in range(rows):
        run([row])
    for size in (2, 3, 5, 8, 17, 33, rows, rows):
        order = torch.randperm(rows, generator=generator)[:size].tolist()
        run(order)
        run(order, width=size * 3 + 1, padded=256 - size)
    for programs in (1, 77, 1024):
        run(list(range(rows)), dataclasses.replace(workspace, programs=programs))
    ok = all(torch.equal(out.view(torch.int32), whole[list(order)]) for order, out in found)
    compared = sum(out.numel() for _, out in found)
    check(f"invariance, {label(shape)}", ok and compared >= 100_000, compared)


def graph_time(batch, run, repeats=12):
    """Median GPU time of run(table), in microseconds: one graph, as many calls as KV copies."""
    tables = [batch.tables[i % batch.copies] for i in range(max(batch.copies, 4))]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(tables[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for table in tables:
            run(table)
    times = []
    for i in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) * 1000 / len(tables))
    return statistics.median(times)


def corun_time(batch, config):
    workspace, out = batch.workspace(config), batch.out()
    return graph_time(batch, lambda table: batch.corun(workspace, out, table))


def measure(name, batch, configs, notes):
    """Times of FA3 and of CoRun under each configuration, in microseconds."""
    row: dict = {"FA3": {}, "CoRun": {}}
    try:
        for run_name, run in batch.flash_runs().items():
            row["FA3"][run_name] = graph_time(batch, run)
    except Exception as e:  # a machine without vLLM or FA3 still times CoRun
        notes.append(f"{name}, FA3: {type(e).__name__}: {e}")
    for config in configs:
        key = str(config).removeprefix("SplitConfig")
        try:
            row["CoRun"][key] = corun_time(batch, config)
        except Exception as e:  # a configuration that does not fit this GPU is left out
            notes.append(f"{name}, {key}: {type(e).__name__}: {e}")
    best = min(row["CoRun"].values(), default=math.inf)
    row["best_us"] = best
    row["best_gb_s"] = batch.bytes / best / 1000
    plain = min((t for n, t in row["FA3"].items() if "num_splits=0" in n), default=None)
    if plain:
        default = str(configs[0]).removeprefix("SplitConfig")
        row["default / FA3 num_splits=0"] = row["CoRun"].get(default, math.inf) / plain
        row["best / FA3 num_splits=0"] = best / plain
    return row


def rank(table):
    """Configurations by their mean time relative to FA3's own choice (else to the best)."""
    ratios: dict[str, list[float]] = {}
    swept = [row for row in table.values() if len(row["CoRun"]) > 1]
    for row in swept or table.values():
        base = min((t for n, t in row["FA3"].items() if "num_splits=0" in n), default=None)
        base = base or min(row["CoRun"].values())
        for config, t in row["CoRun"].items():
            ratios.setdefault(config, []).append(t / base)
    most = max(map(len, ratios.values()))
    ranked = [
        {"config": c, "worst": max(r), "mean": statistics.geometric_mean(r)}
        for c, r in ratios.items()
        if len(r) == most
    ]
    return sorted(ranked, key=lambda x: x["mean"])


def show(title, table):
    print(f"\n{title}, median microseconds")
    for name, row in table.items():
        flash = "  ".join(f"{k.removeprefix('FA3 ')} {v:.1f}" for k, v in row["FA3"].items())
        ours = next(iter(row["CoRun"].values()), math.nan)
        default, best = (
            row.get(f"{which} / FA3 num_splits=0", math.nan) for which in ("default", "best")
        )
        print(
            f"  {name:24} CoRun {ours:8.1f} ({default:.2f} of FA3's; "
            f"best {row['best_us']:.1f}, {best:.2f}; "
            f"{row['best_gb_s']:.0f} GB/s)  FA3: {flash}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="write the results to this JSON file")
    parser.add_argument("--seconds", type=float, default=80, help="skip what would start later")
    parser.add_argument("--no-sweep", action="store_true", help="time the built-in settings only")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU here", file=sys.stderr)
        return 2
    begun = time.time()
    result: dict = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        result["vllm"] = metadata.version("vllm")
    notes: list[str] = []
    tables: dict[str, dict] = {"GQA": {}, "MLA": {}}

    def write():
        ranks = {k: rank(t) for k, t in tables.items() if t}
        result.update(seconds=round(time.time() - begun, 1), checks=CHECKS, notes=notes)
        result.update(speed_us=tables, ranks=ranks)
        if args.out:
            Path(args.out).write_text(json.dumps(result, indent=1))
        return ranks

    for shape in SHAPES:
        check_reference(shape)
        check_invariance(shape)
        torch.cuda.empty_cache()
    result["seconds_of_checks"] = round(time.time() - begun, 1)
    jobs = [("GQA", kv, case) for kv in (4, 8) for case in CASES]
    jobs += [("MLA", heads, case) for heads in (128, 16) for case in CASES if case != "256 x 1k"]
    # The cases the configurations are judged by first.
    jobs.sort(key=lambda job: job[2] not in SWEEP_CASES)
    for kind, heads, case in jobs:
        name = f"{case}, {heads} {'KV' if kind == 'GQA' else 'query'} heads"
        if time.time() - begun > args.seconds:
            notes.append(f"{kind}, {name}: skipped, out of time")
            continue
        swept = case in SWEEP_CASES and not args.no_sweep
        if kind == "GQA":
            batch, configs = Batch(CASES[case], 32, heads, 128), SWEEP if swept else [BASE]
        else:
            batch = Batch(CASES[case], heads, 1, 512, block=64, mla=64)
            configs = MLA_SWEEP if swept else MLA_SWEEP[:1]
        tables[kind][name] = measure(f"{kind}, {name}", batch, configs, notes)
        del batch
        torch.cuda.empty_cache()
    ranks = write()
    for kind, table in tables.items():
        if table:
            show(kind, table)
            print(f"{kind} configurations, time relative to FA3 num_splits=0")
            for entry in ranks[kind]:
                print(f"  mean {entry['mean']:.2f} worst {entry['worst']:.2f} {entry['config']}")
    for note in notes:
        print(f"note: {note}")
    failed = [c["name"] for c in CHECKS if not c["ok"]]
    print(f"\n{len(CHECKS) - len(failed)} of {len(CHECKS)} checks held", *failed, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
