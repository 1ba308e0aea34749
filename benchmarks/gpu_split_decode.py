"""Decode attention with KV splits by each request's own length, against plain vLLM.

python benchmarks/gpu_split_decode.py --seconds 45 --out FILE.json

- plain: FlashAttention 3 as vLLM calls it, with at most 32 splits (vLLM's default in full CUDA
  graphs), with as many as it likes (0), or with one.
- own: the same, with the number of splits of each request written into its schedule, as
  corun.engine.split_schedule has it.

Needs a CUDA GPU of compute capability 9.x and vLLM. Exit status 0: every check held; 1: one did
not; 2: no GPU. What raises is noted and the rest goes on. Speed is measured, not judged.
"""

import argparse
import contextlib
import copy
import json
import math
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from corun.engine.split_schedule import LATENT_RULE, RULES, SplitRule, write_splits

GPU = torch.device("cuda")
CHECKS: list[dict] = []
ROTATE_BYTES = 256 << 20  # more KV than the L2 holds: in a model no layer finds its KV there
CASES = {
    "1 x 8k": [8192],
    "1 x 32k": [32_768],
    "1 x 128k": [131_072],
    "8 x 8k": [8192] * 8,
    "32 x 2k": [2048] * 32,
}
GRAPHS = "FA3 num_splits=32"  # plain vLLM in full CUDA graphs
PLAIN = ("FA3 num_splits=0", GRAPHS, "FA3 num_splits=1")
MLA_RULES = [LATENT_RULE, *(SplitRule(64, *more) for more in ((4, 32), (2, 64), (8, 64)))]
# Heads, KV heads, dimension of the values. vLLM's FLASH_ATTN_MLA has blocks of 16 unless told.
MLA = ((128, 1, 512), {"block": 16, "mla": 64})
FEW = ((16, 1, 512), {"block": 16, "mla": 64})


def heads(kv, dim=128):
    return ((32, kv, dim), {"block": 16})


def rules_of(batch):
    """The rules to try; the first is the one that engines use, where they split."""
    if batch.mla:
        return MLA_RULES
    tile = RULES[batch.dim].tile
    return [RULES[batch.dim], *(SplitRule(tile, *more) for more in ((2, 32), (4, 64)))]


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
        for which in range(self.copies):
            table = torch.zeros(len(lengths), max(*pages, 1), dtype=torch.int32, device=GPU)
            at = which * sum(pages)
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
        steady_tile = query_heads <= 64 if mla else dim == 64
        self.longest_query = 256 if steady_tile else 1  # corun.engine.attention.LONGEST_QUERY

    def out(self, dtype=None):
        return self.query.new_zeros((*self.query.shape[:2], self.dim), dtype=dtype)

    def flash(self, num_splits, ahead, table, out):
        """vLLM's FlashAttention 3 as its decode calls it; `ahead`: a schedule made beforehand."""
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        given = {"q": self.query, "k": self.keys, "v": self.values, "out": out}
        if self.mla:
            given["q"], given["k"] = self.query_rope, self.keys[..., self.dim :]
            given["q_v"] = self.query_latent
        return flash_attn_varlen_func(
            **given, max_seqlen_q=self.longest_query, cu_seqlens_q=self.starts,
            max_seqlen_k=self.longest, seqused_k=self.lengths, softmax_scale=self.scale,
            causal=True, block_table=table, scheduler_metadata=ahead, num_splits=num_splits,
            fa_version=3,
        )  # fmt: skip

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


def name_of(kind, rule):
    return f"{kind}: {rule.least} x {rule.tile} tokens or more, {rule.most} splits or fewer"


def schedule(batch, num_splits):
    """FA3's scheduler metadata of the batch, as vLLM's metadata builders make it."""
    from vllm.vllm_flash_attn import get_scheduler_metadata

    rows, heads = batch.query.shape[:2]
    return get_scheduler_metadata(
        rows, batch.longest_query, batch.longest, heads, batch.keys.shape[2],
        batch.mla or batch.dim, batch.lengths, batch.query.dtype, batch.dim,
        cu_seqlens_q=batch.starts, page_size=batch.keys.shape[1], causal=True,
        num_splits=num_splits,
    )  # fmt: skip


def for_flash(batch):
    """The batch, with what ``Batch.flash`` reads."""
    batch.starts = torch.arange(len(batch.query) + 1, dtype=torch.int32, device=GPU)
    batch.query_latent = batch.query[..., : batch.dim].contiguous()
    batch.query_rope = batch.query[..., batch.dim :].contiguous()
    return batch


def plain(batch, num_splits):
    for_flash(batch)
    plan, out = schedule(batch, num_splits), batch.out()
    return lambda table: batch.flash(num_splits, plan, table, out)


def write(plan, lengths, rule):
    write_splits(plan, torch.from_numpy(rule.counts(lengths.cpu().numpy())).to(GPU))


def own(batch, rule, plan=None):
    for_flash(batch)
    out = batch.out()
    plan = schedule(batch, rule.most) if plan is None else plan
    write(plan, batch.lengths, rule)
    return lambda table: batch.flash(rule.most, plan, table, out)


def candidates(batch):
    """Name -> (what makes a run, its arguments), in the order in which they are measured."""
    found = {name: (plain, int(name.split("=")[1])) for name in PLAIN}
    return found | {name_of("own", rule): (own, rule) for rule in rules_of(batch)}


def part(batch, order, *, width=0, padded=0, longest=None):
    """Rows `order` as a batch of their own: a wider table, padding rows, another longest."""
    other, rows, n = copy.copy(batch), list(order) + [0] * padded, len(order)
    other.query, other.lengths = batch.query[rows], batch.lengths[rows]
    other.lengths[n:] = 0
    table = batch.tables[0]
    wide = torch.zeros(n + padded, table.shape[1] + width, dtype=torch.int32, device=GPU)
    wide[:n, : table.shape[1]] = table[list(order)]
    other.tables, other.longest = [wide], longest or int(other.lengths.max())
    return other


def check_reference(shape, label, notes):
    """Against float64. A bf16 result of bf16 partial results has three roundings, not one."""
    batch = Batch([1, 17, 63, 64, 65, 257, 1000, 5000, 20_000], *shape[0], **shape[1])
    expected, bound = batch.reference()
    for name, (make, *args) in candidates(batch).items():
        try:
            found = make(batch, *args)(batch.tables[0]).double()
        except Exception as e:
            notes.append(f"reference, {label}, {name}: {type(e).__name__}: {e}")
            continue
        share = float(((found - expected).abs() / (3 * bound)).max())
        check(
            f"float64 reference, {label}, {name}", share <= 1, found.numel(), share_of_bound=share
        )


def replayed(batch, rule):
    """Output of one graph captured on lengths of 1 and replayed on the batch's."""
    real = batch.lengths
    real_plan = schedule(for_flash(batch), rule.most)
    write(real_plan, real, rule)
    batch = copy.copy(batch)
    batch.lengths = torch.ones_like(real)
    plan = schedule(for_flash(batch), rule.most)
    run = own(batch, rule, plan)
    run(batch.tables[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(batch.tables[0])
    batch.lengths.copy_(real)
    plan.copy_(real_plan)
    graph.replay()
    return out


def check_invariance(shape):
    """A row alone, in other batches, elsewhere in them, padded, under other bounds and graphs."""
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 63, 64, 65, 128, 4096, 8192, 8193, 20_000, 40_000]
    lengths += torch.randint(1, 6000, (14,), generator=generator).tolist()
    batch = Batch(lengths, *shape[0], **shape[1])
    rows, rule = len(lengths), rules_of(batch)[0]
    whole = own(batch, rule)(batch.tables[0]).clone().view(torch.int16)
    found = [(list(range(rows)), replayed(batch, rule))]

    def run(order, **how):
        other = part(batch, order, **how)
        found.append((list(order), own(other, rule)(other.tables[0])[: len(order)]))

    for row in range(rows):
        run([row])
    for size in (2, 3, 5, 8, 17, rows):
        order = torch.randperm(rows, generator=generator)[:size].tolist()
        run(order)
        run(order, width=size * 3 + 1, padded=40 - size, longest=131_072)
    differing = sum(int((out.view(torch.int16) != whole[order]).sum()) for order, out in found)
    compared = sum(out.numel() for _, out in found)
    ok = differing == 0 and compared >= 100_000
    check(f"invariance, {label(shape)}, {name_of('own', rule)}", ok, compared, differing=differing)


def label(shape):
    (query_heads, kv_heads, dim), more = shape
    kind = "MLA" if "mla" in more else f"D={dim}"
    return f"{query_heads}/{kv_heads} heads, {kind}, blocks of {more['block']}"


def check_effect(shape):
    """FA3 splits by the numbers written; a row of one split is as in a call with num_splits=1."""
    batch = Batch([8192, 5000, 1, 130, 2048, 2049, 700], *shape[0], **shape[1])
    rule, table = rules_of(batch)[0], batch.tables[0]
    split = own(batch, rule)(table).clone().view(torch.int16)
    plan = schedule(batch, rule.most)
    shown = plan.tolist()
    write_splits(plan, torch.ones(len(batch.lengths), dtype=torch.int32, device=GPU))
    one = batch.flash(rule.most, plan, table, batch.out()).view(torch.int16)
    detail = {
        "schedule_of_fa3": shown,
        "written": rule.counts(batch.lengths.cpu().numpy()).tolist(),
    }
    rows = torch.tensor(detail["written"], device=GPU) > 1
    differs = bool((split != one).flatten(1).any(dim=1)[rows].all())
    check(f"FA3 splits by the numbers written, {label(shape)}", differs, one.numel(), **detail)
    # Steps with chunks are computed with one split, and without a schedule.
    unsplit = batch.flash(1, None, table, batch.out()).view(torch.int16)
    differing = int((one != unsplit).sum())
    check(
        f"one split as num_splits=1, {label(shape)}",
        not differing,
        one.numel(),
        differing=differing,
    )
    # There a request whose only row is split has length 0.
    rest = copy.copy(batch)
    rest.lengths = torch.where(rows, 0, batch.lengths)
    left = rest.flash(1, None, table, batch.out()).view(torch.int16)
    differing = int((left != unsplit)[~rows].sum())
    compared = left[~rows].numel()
    name = f"one split beside rows of length 0, {label(shape)}"
    check(name, not differing, compared, differing=differing)


def host_time(call, repeats=50):
    """Mean time of call(), launches and GPU together, in microseconds."""
    call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e6 / repeats


def measure(name, batch, notes):
    """Candidate -> its time in microseconds."""
    row = {}
    for label, (make, *args) in candidates(batch).items():
        try:
            row[label] = graph_time(batch, make(batch, *args))
        except Exception as e:
            notes.append(f"{name}, {label}: {type(e).__name__}: {e}")
            torch.cuda.synchronize()
    return row


def show(name, row):
    print(f"\n{name}: median us, share of num_splits=0 and of num_splits=32 (full CUDA graphs)")
    for label, t in sorted(row.items(), key=lambda x: x[1]):
        shares = "  ".join(f"{t / row[p]:5.2f}" if p in row else "    -" for p in PLAIN[:2])
        print(f"  {t:8.1f}  {shares}  {label}")


def guarded(notes, call, *args):
    try:
        call(*args)
    except Exception as e:
        detail = f"{call.__name__}{args[:2]}: {type(e).__name__}: {e}"
        check(detail, False, 0)
        notes.append(detail)
    torch.cuda.empty_cache()


def once_a_step(batch):
    """Host and GPU time of what is done once a step, not once a layer."""
    rule = rules_of(batch)[0]
    plan = schedule(for_flash(batch), rule.most)
    counts = torch.from_numpy(rule.counts(batch.lengths.cpu().numpy())).to(GPU)
    return {
        "get_scheduler_metadata": host_time(lambda: schedule(batch, rule.most)),
        "write_splits": host_time(lambda: write_splits(plan, counts)),
    }


def jobs():
    """(name, lengths, shape) in the order in which they are measured."""
    shapes = {f"GQA, {kv} KV heads": heads(kv) for kv in (4, 8)}
    shapes |= {"MLA, 128 query heads": MLA, "MLA, 16 query heads": FEW}
    return [(f"{c}, {s}", CASES[c], shape) for s, shape in shapes.items() for c in CASES]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--seconds", type=float, default=45, help="skip what would start later")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU here", file=sys.stderr)
        return 2
    begun = time.time()
    result: dict = {"benchmark": "split-decode", "device": torch.cuda.get_device_name()}
    result["command"] = (
        f"python benchmarks/gpu_split_decode.py --seconds {args.seconds:g} --out FILE"
    )
    result["torch"] = torch.__version__
    with contextlib.suppress(metadata.PackageNotFoundError):
        result["vllm"] = metadata.version("vllm")
    notes: list[str] = []
    speed: dict[str, dict] = {}

    def write():
        shares = {
            name: {p: {k: t / row[p] for k, t in row.items()} for p in PLAIN[:2] if p in row}
            for name, row in speed.items()
        }
        result.update(seconds=round(time.time() - begun, 1), checks=CHECKS, notes=notes)
        result.update(speed_us=speed, share_of=shares)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1))

    shapes = (heads(8), heads(4), heads(8, 64), heads(8, 256), MLA, FEW)
    for shape in shapes:
        guarded(notes, check_effect, shape)
        guarded(notes, check_reference, shape, label(shape), notes)
        guarded(notes, check_invariance, shape)
    result["seconds_of_checks"] = round(time.time() - begun, 1)
    for i, (name, lengths, (sizes, more)) in enumerate(jobs()):
        if time.time() - begun > args.seconds:
            notes.append(f"{name}: skipped, out of time")
            continue
        batch = Batch(lengths, *sizes, **more)
        speed[name] = measure(name, batch, notes)
        show(name, speed[name])
        if i == 0:
            with contextlib.suppress(Exception):
                result["once_a_step_us"] = once_a_step(batch)
        del batch
        torch.cuda.empty_cache()
        write()
    write()
    for note in notes:
        print(f"note: {note}")
    failed = [c["name"] for c in CHECKS if not c["ok"]]
    print(f"once a step: {result.get('once_a_step_us')}")
    print(f"\n{len(CHECKS) - len(failed)} of {len(CHECKS)} checks held", *failed, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
