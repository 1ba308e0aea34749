"""CoRun's GPU sampler against its CPU reference, against itself, and against vLLM's speed.

python benchmarks/gpu_sampling_check.py --out FILE.json

Needs a CUDA GPU and Triton; with vLLM installed it also times vLLM's own sampling on the same
machine. Under a minute on an H200. Exit status 0: every check held; 1: one did not; 2: no GPU.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from corun.engine.sampling import philox
from corun.engine.sampling.core import processed_logits, sample_rows
from corun.engine.sampling.cpu_race import exact_score
from corun.engine.sampling.logprobs import RowScores, score_table
from corun.engine.sampling.params import RowParams

ROWS, VOCAB, ODD_VOCAB = 256, 151_936, 151_645
GPU, CPU = torch.device("cuda"), torch.device("cpu")
CHECKS: list[dict] = []
CHI_SQUARE_SEEDS = (42, 7, 2026, -1, 1 << 62)


def check(name, ok, compared, **detail):
    CHECKS.append({"name": name, "ok": bool(ok), "compared": int(compared), **detail})
    print(f"{'ok  ' if ok else 'FAIL'} {name}: {int(compared):,} values compared {detail or ''}")


def make_params(rows, vocab, device, **given):
    columns = {"temperature": 1.0, "top_k": vocab, "top_p": 1.0, "min_p": 0.0, **given}
    columns.setdefault("seeds", np.arange(rows, dtype=np.int64) * 7919 - 3)
    columns = {k: np.broadcast_to(np.asarray(v), (rows,)) for k, v in columns.items()}
    columns["top_k"] = np.minimum(columns["top_k"], vocab)
    return RowParams.build(rows, vocab, device, **columns)


def mixed(rows, vocab, device):
    """Every kind of row, in turn: greedy, plain, each filter, filters together, wide and narrow."""
    kinds = np.array(
        [  # temperature, top_k, top_p, min_p
            (0, vocab, 1, 0),
            (1, vocab, 1, 0),
            (0.6, vocab, 1, 0),
            (1, 50, 1, 0),
            (1, vocab, 0.9, 0),
            (0.8, 50, 0.9, 0),
            (1.2, vocab, 1, 0.02),
            (0.7, 20, 0.8, 0.05),
            (2, vocab, 0.999, 0),
            (1, 20_000, 1, 0),
            (1.5, vocab, 0.99, 0.0001),
            (1, 1, 1, 0),
            (0.05, vocab, 1, 0),
        ]
    )[np.arange(rows) % 13]
    t, k, p, m = kinds.T
    rng = np.random.default_rng(1)
    seeds = rng.integers(-(2**63), 2**63, rows, dtype=np.int64)
    return make_params(
        rows, vocab, device, temperature=t, top_k=k.astype(int), top_p=p, min_p=m, seeds=seeds
    )


def make_logits(rows, vocab, kind, seed=0):
    """Random rows with a language model's spread: a few high entries over a wide low body."""
    generator = torch.Generator(device=GPU).manual_seed(seed)
    logits = torch.randn(rows, vocab, device=GPU, generator=generator) * 2.5
    return logits.to(torch.bfloat16) if kind == "bf16" else logits


def on(device, p):
    return RowParams(*(getattr(p, f).to(device) for f in p.__slots__))


def bits(values):
    return [v.view(torch.int32) if v.dtype == torch.float32 else v for v in values]


def everything(logits, p, positions, whole=False):
    """All that a row gets, in a form where equal means equal bits."""
    tokens, cut_logit, cut_entry = sample_rows(logits, p, positions)
    scores = RowScores(logits, tokens)
    entries, values = score_table(scores, tokens, 20)
    parts = [tokens, cut_logit, cut_entry, scores.rank, entries, values]
    if whole:
        parts += [processed_logits(logits, p, cut_logit, cut_entry), scores.full()]
    return bits(parts)


def check_philox():
    from corun.engine.sampling import triton_noise

    generator = torch.Generator().manual_seed(5)
    seeds = torch.randint(-(2**62), 2**62, (64,), generator=generator) * 2
    positions = torch.randint(0, 2**40, (64,), generator=generator)
    found = triton_noise.noise_words(seeds.to(GPU), positions.to(GPU), 10_001).cpu()
    expected = philox.noise_words(seeds, positions, 10_001)
    check("philox: Triton = torch, bitwise", torch.equal(found, expected), found.numel())


def check_reference():
    """Tokens and kept entries against the CPU's; a difference must be a rounding-wide one."""
    for kind, vocab in (("fp32", VOCAB), ("bf16", VOCAB), ("fp32", ODD_VOCAB)):
        rows = 104
        logits = make_logits(rows, vocab, kind, seed=vocab)
        p, positions = mixed(rows, vocab, CPU), torch.arange(rows) * 1001
        tokens, cut_logit, cut_entry = sample_rows(logits, on(GPU, p), positions.to(GPU))
        ref, ref_logit, ref_entry = sample_rows(logits.cpu(), p, positions)
        words = philox.noise_words(p.seeds, positions, vocab)
        gaps = []
        for row in (tokens.cpu() != ref).nonzero()[:, 0].tolist():
            score = [
                exact_score(float(logits[row, t]), float(p.temperature[row]), int(words[row, t]))
                for t in (int(tokens[row]), int(ref[row]))
            ]
            gaps.append(score[1] - score[0])
        check(
            f"tokens = CPU reference ({kind}, V={vocab})",
            len(gaps) <= 1 and all(abs(g) < 1e-4 for g in gaps),
            rows,
            token_mismatches=len(gaps),
            score_gaps=gaps,
        )
        kept = processed_logits(logits, on(GPU, p), cut_logit, cut_entry) > -torch.inf
        ref_kept = processed_logits(logits.cpu(), p, ref_logit, ref_entry) > -torch.inf
        unlike = kept.cpu() != ref_kept
        # Sums in fp32 against float64: a cut may move by entries of next to no probability.
        temperature = torch.where(p.random(), p.temperature, 1.0)[:, None]
        mass = (logits.cpu().float() / temperature).softmax(dim=-1)
        moved = (mass * unlike).sum(dim=-1)
        check(
            f"kept entries = CPU reference ({kind}, V={vocab})",
            float(moved.max()) < 2e-5,
            kept.numel(),
            rows_that_differ=int(unlike.any(dim=-1).sum()),
            most_entries_in_a_row=int(unlike.sum(dim=-1).max()),
            most_probability_in_a_row=float(moved.max()),
        )


def check_invariance():
    for kind, vocab in (("fp32", VOCAB), ("bf16", VOCAB), ("fp32", ODD_VOCAB), ("bf16", 50_257)):
        logits = make_logits(ROWS, vocab, kind, seed=3)
        p, positions = mixed(ROWS, vocab, GPU), torch.arange(ROWS, device=GPU) * 77
        reference = everything(logits, p, positions, whole=True)
        compared, ok = 0, True
        generator = torch.Generator().manual_seed(11)
        for rows in (1, 1, 1, 2, 3, 5, 8, 17, 44, 63, 64, 65, 100, 132, 133, 200, 255, 256, 256):
            order = torch.randperm(ROWS, generator=generator)[:rows].to(GPU)
            whole = rows in (5, 64, 133)
            found = everything(logits[order], p.select(order), positions[order], whole)
            for a, b in zip(found, reference, strict=False):
                ok &= torch.equal(a, b[order])
                compared += a.numel()
        check(f"place and number of rows ({kind}, V={vocab})", ok and compared >= 100_000, compared)


def check_neighbours():
    """The same rows beside neighbours that ask for other things and have other logits."""
    logits = make_logits(ROWS, VOCAB, "fp32", seed=4)
    p, positions = mixed(ROWS, VOCAB, GPU), torch.arange(ROWS, device=GPU)
    reference = everything(logits, p, positions)
    even = torch.arange(0, ROWS, 2, device=GPU)
    compared, ok = 0, True
    for seed in range(3):
        rng = np.random.default_rng(seed)
        other = make_params(
            ROWS,
            VOCAB,
            GPU,
            temperature=rng.choice([0.0, 0.3, 1.0, 4.0], ROWS),
            top_k=rng.choice([1, 7, 1000, VOCAB], ROWS),
            top_p=rng.choice([0.1, 0.999, 1.0], ROWS),
            min_p=rng.choice([0.0, 0.5], ROWS),
        )
        beside = make_logits(ROWS, VOCAB, "fp32", seed=100 + seed)
        beside[even] = logits[even]
        columns = {}
        for name in p.__slots__:
            columns[name] = getattr(other, name).clone()
            columns[name][even] = getattr(p, name)[even]
        found = everything(beside, RowParams(**columns), positions)
        for a, b in zip(found, reference, strict=True):
            ok &= torch.equal(a[even], b[even])
            compared += a[even].numel()
    check("neighbours' parameters and logits", ok, compared)


def chi_square_p(counts, expected):
    counts, expected = counts.double(), expected.double()
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic.cpu() / 2))


def check_distribution():
    draws, vocab = 200_000, 1000
    logits = make_logits(1, vocab, "fp32", seed=8)[0]
    for name, given in {
        "plain": {},
        "temperature": {"temperature": 0.6},
        "top_k": {"top_k": 40},
        "top_p": {"top_p": 0.8},
        "min_p": {"min_p": 0.1},
        "top_k and top_p": {"top_k": 50, "top_p": 0.9},
    }.items():
        p_values, strays = {}, 0
        for seed in CHI_SQUARE_SEEDS:
            seeds = np.full(draws, seed, dtype=np.int64)
            p = make_params(draws, vocab, GPU, seeds=seeds, **given)
            at = torch.arange(draws, device=GPU)
            rows = logits.expand(draws, vocab).contiguous()
            tokens, cut_logit, cut_entry = sample_rows(rows, p, at)
            one = torch.zeros(1, dtype=torch.long, device=GPU)
            shown = processed_logits(logits[None], p.select(one), cut_logit[:1], cut_entry[:1])
            expected = shown[0].softmax(dim=-1).double() * draws
            counts = torch.bincount(tokens, minlength=vocab)
            strays += int(counts[expected == 0].sum())
            # Cells with fewer than 10 expected draws are pooled.
            small = expected < 10
            pool = torch.stack([counts[small].sum().double(), expected[small].sum()])
            cells = torch.cat([counts[~small].double(), pool[:1]])
            wanted = torch.cat([expected[~small], pool[1:]])
            used = wanted > 0
            p_values[seed] = chi_square_p(cells[used].cpu(), wanted[used].cpu())
        # The smallest of k independent p-values is below x with a chance of about k x.
        ok = min(p_values.values()) > 1e-4 / len(p_values) and not strays
        check(f"chi-square, {name}", ok, draws * len(p_values), p_values=p_values)


# Speed


def gpu_time(run, prepare=lambda: None, repeats=25):
    """Median GPU time of `run` in microseconds; its launches are queued before the clock starts."""
    times = []
    for i in range(repeats + 3):
        prepare()
        torch.cuda._sleep(2_000_000)  # about 1 ms, longer than any launch sequence here
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def host_time(run, repeats=25):
    """Median host time to launch `run`, in microseconds."""
    times = []
    for i in range(repeats + 3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        if i >= 3:
            times.append((time.perf_counter() - begun) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def vllm_paths(work, temperature, top_k, top_p, flashinfer):
    """vLLM's own samplers: case -> name -> a function that samples from `work` in place."""
    from vllm.v1.sample.ops import topk_topp_sampler as ops
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample

    rows = torch.arange(ROWS, dtype=torch.int32, device=GPU)
    seeds, positions = torch.arange(ROWS, device=GPU), torch.arange(ROWS, device=GPU)
    generators = {i: torch.Generator(device=GPU).manual_seed(i) for i in range(ROWS)}

    def v1(k=None, p=None, seeded=False):
        logits = work.div_(temperature[:, None])
        logits = ops.apply_top_k_top_p(logits, k, p)
        probs = logits.softmax(dim=-1, dtype=torch.float32)
        return ops.random_sample(probs, generators if seeded else {})

    def v2(k=None, p=None):
        apply_temperature(work, rows, temperature)
        logits = ops.apply_top_k_top_p(work, k, p)
        extra = {} if "is_drafting" not in gumbel_sample.__code__.co_varnames else {
            "is_drafting": False
        }  # fmt: skip
        return gumbel_sample(
            logits, rows, temperature, seeds, positions, apply_temperature=False, **extra
        )

    def with_flashinfer():
        return ops.flashinfer_sample(work.div_(temperature[:, None]), top_k, top_p)

    paths = {
        "plain": {"vLLM V1 unseeded": v1, "vLLM V2": v2},
        "top_k=50 top_p=0.9": {
            "vLLM V1 unseeded": lambda: v1(top_k, top_p),
            "vLLM V2": lambda: v2(top_k, top_p),
        },
        "top_p=0.9": {
            "vLLM V1 unseeded": lambda: v1(None, top_p),
            "vLLM V2": lambda: v2(None, top_p),
        },
        "plain, seeded": {"vLLM V1 seeded": lambda: v1(seeded=True)},
    }
    if flashinfer:
        paths["top_k=50 top_p=0.9"]["vLLM V1 unseeded, FlashInfer"] = with_flashinfer
    return paths


def measure_speed(flashinfer):
    """CoRun's draw and vLLM's, GPU time side by side, 256 x 151,936."""
    base = make_logits(ROWS, VOCAB, "fp32", seed=9)
    work = base.clone()
    at = torch.arange(ROWS, device=GPU)
    temperature = torch.full((ROWS,), 0.9, device=GPU)
    top_k = torch.full((ROWS,), 50, dtype=torch.int32, device=GPU)
    top_p = torch.full((ROWS,), 0.9, device=GPU)
    ours = {
        "plain": make_params(ROWS, VOCAB, GPU, temperature=0.9),
        "top_k=50 top_p=0.9": make_params(ROWS, VOCAB, GPU, temperature=0.9, top_k=50, top_p=0.9),
        "top_p=0.9": make_params(ROWS, VOCAB, GPU, temperature=0.9, top_p=0.9),
        "top_k=50": make_params(ROWS, VOCAB, GPU, temperature=0.9, top_k=50),
        "mixed": mixed(ROWS, VOCAB, GPU),
        "greedy": make_params(ROWS, VOCAB, GPU, temperature=0.0),
    }
    table = {}
    for name, p in ours.items():
        table[name] = {
            "CoRun": gpu_time(lambda p=p: sample_rows(base, p, at), lambda: work.copy_(base)),
            "CoRun, launch on the host": host_time(lambda p=p: sample_rows(base, p, at)),
        }
    half = base.to(torch.bfloat16)
    table["plain"]["CoRun from bf16 logits"] = gpu_time(
        lambda: sample_rows(half, ours["plain"], at), lambda: work.copy_(base)
    )
    tokens = sample_rows(base, ours["plain"], at)[0]
    table["top-20 logprobs"] = {
        "CoRun": gpu_time(lambda: score_table(RowScores(base, tokens), tokens, 20))
    }
    notes = []
    try:
        paths = vllm_paths(work, temperature, top_k, top_p, flashinfer)
    except ImportError as e:
        paths = {}
        notes.append(f"vLLM not timed: {e}")
    for case, runs in paths.items():
        row = table.setdefault(case, {"CoRun": table["plain"]["CoRun"]})
        for name, run in runs.items():
            try:
                row[name] = gpu_time(run, lambda: work.copy_(base))
            except Exception as e:  # a path that this vLLM or machine cannot run is left out
                notes.append(f"{case}, {name}: {type(e).__name__}: {e}")
    if paths:
        row = table["top-20 logprobs"]

        def v1_logprobs():
            logprobs = base.log_softmax(dim=-1, dtype=torch.float32)
            chosen = logprobs.gather(-1, tokens[:, None])
            return logprobs.topk(20, dim=-1), (logprobs >= chosen).sum(-1)

        row["vLLM V1's operations"] = gpu_time(v1_logprobs)
    for case, row in table.items():
        unseeded = [v for k, v in row.items() if k.startswith("vLLM") and k != "vLLM V1 seeded"]
        if unseeded and case != "top-20 logprobs":
            row["vLLM's fastest / CoRun"] = min(unseeded) / row["CoRun"]
            check(
                f"speed, {case}: not above vLLM's unseeded sampling",
                row["CoRun"] <= min(unseeded),
                len(unseeded),
                **{k: round(v, 2) for k, v in row.items()},
            )
    return table, notes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="write the results to this JSON file")
    parser.add_argument(
        "--flashinfer", action="store_true", help="time FlashInfer's sampler too (it may compile)"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU here", file=sys.stderr)
        return 2
    begun = time.time()
    for step in (
        check_philox,
        check_reference,
        check_invariance,
        check_neighbours,
        check_distribution,
    ):
        step()
        torch.cuda.empty_cache()
    table, notes = measure_speed(args.flashinfer)
    for case, row in table.items():
        print(f"\n{case} ({ROWS} x {VOCAB}), median microseconds")
        for name, value in row.items():
            print(f"  {name:32} {value:9.2f}")
    for note in notes:
        print(f"note: {note}")
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": round(time.time() - begun, 1),
        "checks": CHECKS,
        "speed_us": table,
        "notes": notes,
    }
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1))
    failed = [c["name"] for c in CHECKS if not c["ok"]]
    print(f"\n{len(CHECKS) - len(failed)} of {len(CHECKS)} checks held", *failed, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
